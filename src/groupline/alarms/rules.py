"""The rules: when an alarm is raised. Thresholds are rules of thumb, stated in docs/alarms.md with their reasons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, Literal

from groupline.alarms.history import Finding, History, Level, Rule


def _above(
    key: str, watch: float, broken: float | None, words: str, steps: int = 5
) -> Callable[[History], Finding | None]:
    """A rule on the mean of a metric over the last steps."""

    def check(run: History) -> Finding | None:
        mean = run.last(key, steps)
        if mean is None or mean <= watch:
            return None
        level: Level = "broken" if broken is not None and mean > broken else "watch"
        return (
            level,
            f"{words} {mean:.3g} over the last {steps} steps (limit {broken if level == 'broken' else watch:g})",
        )

    return check


def _dead(kind: Literal["too easy", "too hard"]) -> Callable[[History], Finding | None]:
    def check(run: History) -> Finding | None:
        dead = run.last("frac_reward_zero_std", 10)
        if dead is None or dead <= 0.8:
            return None
        right, wrong = (run.last(f"groups/{name}", 10) for name in ("all_right", "all_wrong"))
        if right is None or wrong is None:  # TRL's logs do not say which
            right, wrong = 0.0, 1.0
            split = "not told which"
        else:
            split = f"{right:.0%} all right, {wrong:.0%} all wrong"
        if (right >= wrong) != (kind == "too easy"):
            return None
        level: Level = "broken" if kind == "too hard" and dead > 0.98 else "watch"
        return level, f"{dead:.0%} of the groups had equal rewards over the last 10 steps ({split})"

    return check


def _zero_reward(run: History) -> Finding | None:
    recent = run.rows[-5:]
    values, spreads = run.values("reward", recent), run.values("reward_std", recent)
    if len(values) < 5 or any(values) or any(spreads):
        return None
    return "broken", "every reward of the last 5 steps was 0"


def _not_finite(run: History) -> Finding | None:
    bad = [k for k in ("loss", "reward") if k in run.rows[-1] and not _finite(run.rows[-1][k])]
    return ("broken", f"{' and '.join(bad)} of the last step is not a finite number") if bad else None


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _skipped(run: History) -> Finding | None:
    counts = run.values("skipped_steps", run.rows[-10:])
    if len(counts) < 10 or counts[-1] - counts[0] < 5:
        return None
    return "watch", f"{counts[-1] - counts[0]:g} of the last 10 updates were skipped because the gradient overflowed"


def _kl_jump(run: History) -> Finding | None:
    values = run.values("kl")
    if len(values) < 11 or values[-1] <= 0.1:
        return None
    usual = statistics.median(values[-21:-1])
    if values[-1] <= 10 * usual:
        return None
    return (
        "broken" if values[-1] > 1 else "watch"
    ), f"KL {values[-1]:.3g} nats a token; the median before was {usual:.3g}"


def _entropy(run: History) -> Finding | None:
    first, last, rise = run.first("entropy", 5), run.last("entropy", 5), run.rise("reward")
    if first is None or last is None or rise is None or last >= 0.1 * first:
        return None
    before = run.first("reward", 10) or 0.0
    if rise > 0.02 * max(1.0, abs(before)):
        return None
    return "watch", f"entropy fell from {first:.3g} to {last:.3g} nats a token while the reward rose by only {rise:.3g}"


def _held_out_flat(run: History) -> Finding | None:
    rise = run.rise("reward")
    if rise is None or len(run.held_out) < 2:
        return None
    (_, before), (_, now) = run.held_out[0], run.held_out[-1]
    first = run.first("reward", 10) or 0.0
    if rise <= 0.1 * max(1.0, abs(first)) or now - before >= 0.01:
        return None
    level: Level = "broken" if now - before < -0.05 else "watch"
    return level, f"training reward rose by {rise:.3g}, held-out pass@1 went from {before:.1%} to {now:.1%}"


def _one_part(run: History) -> Finding | None:
    gain, right = run.rise("reward"), run.rise("accuracy")
    first = run.first("reward", 10) or 0.0
    if gain is None or right is None or right >= 0.02 or gain <= 0.1 * max(1.0, abs(first)):
        return None
    for name in run.parts():
        part = run.rise(f"rewards/{name}/mean")
        if part is not None and (share := part * run.weights.get(name, 1.0) / gain) > 0.8:
            return (
                "watch",
                f"{name} alone gives {min(share, 1):.0%} of the reward's rise of {gain:.3g}; right answers {right:+.1%}",
            )
    return None


def _form_over_content(run: History) -> Finding | None:
    now = run.last("accuracy", 10)
    right = run.values("accuracy")
    if now is None or len(right) < 20:
        return None
    best = max(statistics.fmean(right[i : i + 10]) for i in range(len(right) - 9))
    if best - now < 0.15:
        return None
    for name in run.parts():
        before, last = run.first(f"rewards/{name}/mean", 10), run.last(f"rewards/{name}/mean", 10)
        if before is not None and last is not None and before < 0.9 and last >= 0.98:
            return (
                "watch",
                f"{name} rose from {before:.2f} to {last:.2f} while right answers fell from {best:.1%} to {now:.1%}",
            )
    return None


def _to_the_cap(run: History) -> Finding | None:
    length, rise = run.last("completions/mean_length", 5), run.rise("completions/mean_length")
    if run.cap is None or length is None or rise is None or length <= 0.9 * run.cap or rise <= 0:
        return None
    return "watch", f"the mean answer has {length:.0f} tokens of the {run.cap} allowed, and has grown by {rise:.0f}"


AUDIT = "Read rollouts.jsonl and run `groupline audit-reward` on the reward functions."
RULES = (
    Rule(
        "loss not finite",
        1,
        _not_finite,
        "Go back to the last checkpoint; lower the learning rate, look at that step's answers.",
    ),
    Rule("updates skipped", 10, _skipped, "Use bf16 or fp32 if the device has it, or lower the learning rate."),
    Rule(
        "reward flat at zero",
        5,
        _zero_reward,
        "Test the judge: `groupline audit-reward`; then the prompt and the answers' format.",
    ),
    Rule("groups too easy", 10, _dead("too easy"), "The prompts teach no more: take harder ones, or stop here."),
    Rule(
        "groups too hard",
        10,
        _dead("too hard"),
        "Take easier prompts, more answers a group or a supervised start; `groupline probe` says which.",
    ),
    Rule(
        "answers cut off",
        5,
        _above("completions/clipped_ratio", 0.3, 0.8, "share of answers at the token limit"),
        "Raise max_completion_length, or find out why answers do not end.",
    ),
    Rule(
        "ratios clipped",
        5,
        _above("clip_ratio/region_mean", 0.3, None, "share of tokens clipped"),
        "Lower the learning rate, or use fewer updates a rollout.",
    ),
    Rule(
        "sampler and trainer differ",
        5,
        _above("sampling/sampling_logp_difference/mean", 0.05, 0.3, "mean difference of a token's log-prob"),
        "Check that the sampler has the newest weights, the same number format and the same temperature; with staleness, "
        "lower it or the learning rate.",
    ),
    Rule("KL jumped", 11, _kl_jump, "Lower the learning rate or raise beta; look at what the answers have become."),
    Rule("entropy collapsed", 20, _entropy, "Raise the temperature or epsilon_high, or lower the learning rate."),
    Rule(
        "reward rises, held-out accuracy does not",
        20,
        _held_out_flat,
        f"The policy may be gaming the reward. {AUDIT}",
    ),
    Rule("one reward explains the gain", 20, _one_part, f"Lower its weight, or make it harder to earn. {AUDIT}"),
    Rule("form gained, accuracy lost", 20, _form_over_content, f"Lower the weight of the form. {AUDIT}"),
    Rule(
        "length runs to the limit",
        20,
        _to_the_cap,
        "See whether longer answers are right more often; if not, use dr_grpo or a length penalty.",
    ),
    Rule(
        "answers repeat themselves",
        5,
        _above("completions/repetition", 0.2, 0.6, "share of answers that repeat n-grams"),
        "Lower the learning rate, raise beta, or go back to an earlier checkpoint.",
    ),
)
