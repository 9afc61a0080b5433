"""The one place that calls reward functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, Literal, Self

from groupline.records import Problem
from groupline.rewards.columns import Table, accepted, make_table
from groupline.rewards.contract import Reward, RewardError, Scores
from groupline.rewards.logs import Log, Recorder
from groupline.rewards.per_sample import adapted
from groupline.rewards.running import Expired, Lane
from groupline.rewards.text import CompletionLike
from groupline.rewards.values import checked, total


def call_rewards(
    rewards: Sequence[Reward],
    *,
    problems: Sequence[Problem],
    completions: Sequence[CompletionLike],
    completion_ids: Sequence[Sequence[int]] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    missing: Literal["error", "none"] = "error",
    on_error: Literal["raise", "skip"] = "raise",
    trainer_state: Any = None,
    group_size: int | None = None,
) -> Scores:
    """Score every completion with every function. The functions run beside each other.

    problems: the problem of each completion, repeated for each of its answers. completions: their texts, or lists of
    messages; a function receives a text as `[{"role": "assistant", "content": text}]` where the prompt is a
    conversation. completion_ids: their token ids. columns: further columns, one value per completion, such as `prefill`.
    missing: a column that only some problems have is an error, or None in the others.
    on_error: an exception in a function stops the run, or makes the rows that raise not applicable and counts them; to
    find those rows the function is called again on each row alone, so skipping does not suit one that compares answers.
    One that raises on every row of several stops the run all the same.
    trainer_state: where the run stands, for functions that ask for it: a `RunState`, or transformers' `TrainerState`.
    group_size: answers of a group, for functions that score group by group; by default a group is the neighbouring
    rows of one problem.

    A function receives every column, `log_extra`, `log_metric` and `trainer_state` (if there is one), or, when it does
    not take `**kwargs`, those that it names.

    Raises:
        RewardError: a function raises, takes longer than its timeout, or returns the wrong number of values, or
            something that is not a finite number or None; a column takes a reserved name, is missing in a row, or has
            the wrong length.
    """
    with Judging(rewards, missing=missing, on_error=on_error, trainer_state=trainer_state) as judging:
        return judging.finish(
            problems=problems,
            completions=completions,
            completion_ids=completion_ids,
            columns=columns,
            group_size=group_size,
        )


@dataclass
class _Run:
    """One call that has begun, on the batch's rows from `first` on. outcome: waits for it."""

    table: Table
    problems: Sequence[Problem]
    first: int
    recorder: Recorder
    outcome: Callable[[], Any]

    @property
    def where(self) -> str:
        return _where(self.first, self.problems)


class Judging:
    """Scores one batch, a group as soon as it is complete where a function allows that (`Reward.by_group`).

    Use as a context manager: `add` for each group while others are still being decoded, if there is anything
    `by_group`; then `finish` with the whole batch. The settings are those of `call_rewards`.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        missing: Literal["error", "none"] = "error",
        on_error: Literal["raise", "skip"] = "raise",
        trainer_state: Any = None,
    ) -> None:
        names = [reward.name for reward in rewards]
        if len(set(names)) != len(names):
            raise RewardError(f"reward names must differ; they are {', '.join(names)}")
        self.rewards, self.missing, self.on_error, self.state = tuple(rewards), missing, on_error, trainer_state
        alone = len(rewards) == 1  # nothing to run beside, so it needs no thread unless it asks for one
        self._lanes = {
            r.name: Lane(
                adapted(r.name, r.function), r.timeout, r.main_thread or (alone and not r.timeout and not r.by_group)
            )
            for r in rewards
        }
        self._early: dict[tuple[str, int], _Run] = {}

    @property
    def by_group(self) -> bool:
        """Whether any function scores group by group."""
        return any(r.by_group for r in self.rewards)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes.values():
            lane.close()

    def add(
        self,
        group: int,
        *,
        problems: Sequence[Problem],
        completions: Sequence[CompletionLike],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Begin to score group number `group` of the batch, which is complete; returns at once."""
        table = make_table(problems, completions, completion_ids, columns or {}, self.missing)
        for reward in self.rewards:
            if reward.by_group:
                self._early[reward.name, group] = self._start(reward, table, problems, group * len(problems))

    def finish(
        self,
        *,
        problems: Sequence[Problem],
        completions: Sequence[CompletionLike],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        group_size: int | None = None,
    ) -> Scores:
        """The scores of the whole batch; what `add` has begun is waited for, and the rest begun here."""
        table = make_table(problems, completions, completion_ids, columns or {}, self.missing)
        spans = _spans(problems, group_size)
        runs: dict[str, list[_Run]] = {}
        for reward in self.rewards:
            own = runs[reward.name] = []
            for number, span in enumerate(spans if reward.by_group else [slice(0, len(problems))]):
                run = self._early.get((reward.name, number))
                if run is None:
                    part = {column: values[span] for column, values in table.items()}
                    run = self._start(reward, part, problems[span], span.start)
                own.append(run)
        for reward in self.rewards:  # those of this very thread, while the others run in theirs
            if self._lanes[reward.name].here:
                for run in runs[reward.name]:
                    run.outcome = _kept(run.outcome)
        log = Log(len(problems))
        values: dict[str, list[float | None]] = {}
        errors: dict[str, int] = {}
        timeouts = {r.name: 0 for r in self.rewards if r.timeout is not None and r.on_timeout == "none"}
        for reward in self.rewards:
            values[reward.name] = []
            for run in runs[reward.name]:
                values[reward.name] += self._values(reward, run, log, errors, timeouts)
            if errors.get(reward.name) == len(problems) > 1:
                raise RewardError(f"reward function {reward.name!r} raised on every one of {len(problems)} rows")
        names = [reward.name for reward in self.rewards]
        rows = tuple({name: values[name][i] for name in names} for i in range(len(problems)))
        totals = tuple(total(self.rewards, row) for row in rows)
        return Scores(rows, totals, errors, log.extras(), log.metrics(), timeouts)

    def _start(self, reward: Reward, table: Table, problems: Sequence[Problem], first: int) -> _Run:
        recorder, lane = Recorder(), self._lanes[reward.name]
        handed = {
            "log_extra": recorder.log_extra,
            "log_metric": recorder.log_metric,
            "trainer_state": self.state,
        }
        keywords = accepted(reward.name, lane.function, table, handed)
        return _Run(table, problems, first, recorder, lane.start(keywords))

    def _values(
        self, reward: Reward, run: _Run, log: Log, errors: dict[str, int], timeouts: dict[str, int]
    ) -> list[float | None]:
        try:
            result = run.outcome()
        except Expired:
            if reward.on_timeout == "none":
                timeouts[reward.name] += len(run.problems)
                return [None] * len(run.problems)
            raise RewardError(
                f"reward function {reward.name!r} took longer than {reward.timeout:g} s on {run.where}"
            ) from None
        except Exception as cause:
            return self._row_by_row(reward, run, cause, log, errors)
        values = checked(reward.name, result, run.problems, run.first)
        log.add(reward.name, run.recorder, run.first, len(run.problems))
        return values

    def _row_by_row(
        self, reward: Reward, whole: _Run, cause: Exception, log: Log, errors: dict[str, int]
    ) -> list[float | None]:
        """Call the function on each row alone: None where it raises. Raises unless such rows are to be skipped."""
        values: list[float | None] = []
        failed = 0
        for row, problem in enumerate(whole.problems):
            part = {column: [values[row]] for column, values in whole.table.items()}
            run = self._start(reward, part, [problem], whole.first + row)
            try:
                result = run.outcome()
            except Exception as own:
                if self.on_error == "raise":
                    raise _raised(reward, own, f"on {run.where}") from own
                values.append(None)
                failed += 1
                continue
            values += checked(reward.name, result, run.problems, run.first)
            log.add(reward.name, run.recorder, run.first, 1)
        if not failed:
            where = "on the whole batch" if not reward.by_group else f"on {whole.where}"
            raise _raised(reward, cause, f"{where}, though on no row alone") from cause
        errors[reward.name] = errors.get(reward.name, 0) + failed
        return values


def _raised(reward: Reward, cause: Exception, where: str) -> RewardError:
    remedy = "; Reward(..., main_thread=True) calls it there" if "only works in main thread" in str(cause) else ""
    return RewardError(f"reward function {reward.name!r} raised {type(cause).__name__} {where}: {cause}{remedy}")


def _where(first: int, problems: Sequence[Problem]) -> str:
    """`row 2 (problem 'p2')`, or `rows 0 to 7 (problems 'p0', 'p1')`."""
    if len(problems) == 1:
        return f"row {first} (problem {problems[0].id!r})"
    ids = list(dict.fromkeys(repr(problem.id) for problem in problems))
    shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    return f"rows {first} to {first + len(problems) - 1} (problem{'s' * (len(ids) > 1)} {shown})"


def _spans(problems: Sequence[Problem], group_size: int | None) -> list[slice]:
    """The rows of each group."""
    if group_size is not None:
        if group_size < 1 or len(problems) % group_size:
            raise RewardError(f"{len(problems)} completions are not whole groups of {group_size}")
        return [slice(start, start + group_size) for start in range(0, len(problems), group_size)]
    spans, start = [], 0
    for _, members in groupby(problems, key=lambda problem: problem.id):
        stop = start + sum(1 for _ in members)
        spans.append(slice(start, stop))
        start = stop
    return spans


def _kept(outcome: Callable[[], Any]) -> Callable[[], Any]:
    """Run it now; the same outcome, a result or an exception, as often as it is asked for."""
    try:
        result = outcome()
    except Exception as error:
        raised = error

        def again() -> Any:
            raise raised

        return again
    return lambda: result
