"""From rows to preference pairs: text, conversations as TRL writes them, or the token ids that were sampled."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from groupline.records import Group, Message, Pair
from groupline.tasks.problems import is_message, prompt_of, rows_of
from groupline.tasks.table import Row

OWN = ("id", "prompt", "chosen", "rejected", "chosen_ids", "rejected_ids", "columns")


def read_pairs(
    source: str | Path | Iterable[Any],
    *,
    system: str | None = None,
    split: str = "train",
    count: int | None = None,
) -> list[Pair]:
    """One pair per row, at most `count`. Its id is the row's own, else the source's name and the row's number.

    source: a file, folder or hub id (see `table_rows`), or an object that gives mappings, such as a list of dicts or a
    `datasets.Dataset`; pairs among them stay as they are.
    Columns: `prompt` (text or messages), `chosen` and `rejected` (text, or messages as TRL has them: the one answer of
    the assistant, or the whole conversation, and then `prompt` may be missing), `chosen_ids` and `rejected_ids` (lists
    of token ids, if they are to be trained on as they are). Others go to `Pair.columns`, and so does what a mapping
    `columns` holds, as `Pair.to_json` writes it. system: makes a conversation of a text prompt, or opens the one there
    is.

    Raises:
        ValueError: a row cannot be read, lacks a column or has one of the wrong kind, or prefers an answer to the same
            answer; the message names the file, the row and the column.
        TypeError: the source gives something that is not a mapping or a pair.
        ImportError: the package that reads the source is absent; the message names the extra.
    """
    rows, stem = rows_of(source, Pair, "pairs", split)
    return [row if isinstance(row, Pair) else _pair(row, stem, system) for row in islice(rows, count)]


def _pair(row: Row, stem: str, system: str | None) -> Pair:
    where, number, values = row
    for name in ("chosen", "rejected"):
        if name not in values:
            raise ValueError(f"{where} has no column {name!r}; its columns are {', '.join(values) or 'none'}")
    prompt, chosen, rejected = _conversations(values, where)
    columns = values.get("columns") or {}
    if not isinstance(columns, dict):
        raise ValueError(f"{where}: 'columns' is {type(columns).__name__}; it must be a mapping")
    identity = values.get("id")
    try:
        return Pair(
            prompt=prompt_of(prompt, system, f"{where}: 'prompt'"),
            chosen=chosen,
            rejected=rejected,
            id=f"{stem}-{number}" if identity is None or identity == "" else str(identity),
            chosen_ids=_ids(values.get("chosen_ids"), f"{where}: 'chosen_ids'"),
            rejected_ids=_ids(values.get("rejected_ids"), f"{where}: 'rejected_ids'"),
            columns={n: v for n, v in values.items() if n not in OWN} | columns,
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(where) else f"{where}: {text}") from None


def _conversations(values: dict[str, Any], where: str) -> tuple[Any, str, str]:
    """(prompt as it stands or as the two conversations share it, the chosen text, the rejected text)."""
    prompt, answers = values.get("prompt"), [values["chosen"], values["rejected"]]
    if all(isinstance(a, str) for a in answers):
        if prompt is None:
            raise ValueError(
                f"{where} has no column 'prompt'; only conversations in 'chosen' and 'rejected' have it in"
            )
        return prompt, answers[0], answers[1]
    for name, value in zip(("chosen", "rejected"), answers, strict=True):
        if not isinstance(value, list | tuple) or not value or not all(is_message(m) for m in value):
            raise ValueError(
                f"{where}: {name!r} must be text, or a list of messages with a role and a content, and the other alike"
            )
    plain: list[list[Message]] = [[{"role": m["role"], "content": m["content"]} for m in a] for a in answers]
    shared = [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(*plain, strict=False))]
    own = [a[len(shared) :] for a in plain]
    for name, value in zip(("chosen", "rejected"), own, strict=True):
        if len(value) != 1 or value[0]["role"] != "assistant":
            roles = ", ".join(m["role"] for m in value) or "nothing: the two are equal, or one goes on from the other"
            raise ValueError(
                f"{where}: {name!r} must add one message of the assistant to what both share; it adds {roles}"
            )
    if isinstance(prompt, list | tuple):
        opening = [{"role": m["role"], "content": m["content"]} if is_message(m) else m for m in prompt]
        whole = shared if shared[: len(opening)] == opening else [*opening, *shared]  # the two may repeat the prompt
    elif shared:
        whole = shared  # a text `prompt` beside whole conversations repeats their question
    else:
        raise ValueError(
            f"{where}: 'chosen' and 'rejected' are answers alone, so 'prompt' must be a list of messages too; it is "
            f"{'missing' if prompt is None else type(prompt).__name__}"
        )
    return whole, own[0][0]["content"], own[1][0]["content"]


def _ids(value: Any, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ValueError(f"{where} must be a list of token ids (whole numbers)")
    if any(i < 0 for i in value):
        raise ValueError(f"{where} holds {min(value)}; token ids are 0 or more")
    return tuple(value)


def pairs_of_groups(groups: Iterable[Group], seed: int = 0) -> list[Pair]:
    """One pair a group: an answer of its highest reward before one of its lowest, drawn by the seed among equals.

    Groups whose rewards are all equal give none. The ids are those sampled. Columns: the two rewards, and the problem's
    gold `answer`.
    """
    pairs = []
    for group in groups:
        if not group.has_signal:
            continue
        scored = [(r.reward, r) for r in group.rollouts if r.reward is not None]
        draw = random.Random(f"{seed}/{group.problem.id}")
        best, worst = (
            draw.choice([r for reward, r in scored if reward == end(x for x, _ in scored)]) for end in (max, min)
        )
        pairs.append(
            Pair(
                prompt=group.problem.prompt,
                chosen=best.text,
                rejected=worst.text,
                id=group.problem.id,
                chosen_ids=best.completion.ids,
                rejected_ids=worst.completion.ids,
                columns={
                    "answer": group.problem.answer,
                    "chosen_reward": best.reward,
                    "rejected_reward": worst.reward,
                },
            )
        )
    return pairs
