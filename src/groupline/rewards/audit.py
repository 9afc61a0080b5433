"""`groupline audit-reward`: adversarial answers to one question, and what a reward function makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupline.records import Problem
from groupline.rewards.contract import Reward
from groupline.rewards.judging import call_rewards

Kind = Literal["correctness", "format"]
THAI, ARABIC, FULL = "๐๑๒๓๔๕๖๗๘๙", "٠١٢٣٤٥٦٧٨٩", "０１２３４５６７８９"


@dataclass(frozen=True, slots=True)
class Case:
    """One answer. right, form: whether a judge of correctness, or of the format, should accept it; None: a matter of
    taste, shown and not counted."""

    name: str
    text: str
    right: bool | None
    form: bool | None


@dataclass(frozen=True, slots=True)
class Finding:
    """A case with the reward it got. accepted: at least half of what the plain right answer got."""

    case: Case
    value: float | None
    accepted: bool
    wanted: bool | None

    @property
    def verdict(self) -> str:
        if self.wanted is None or self.accepted == self.wanted:
            return "ok" if self.wanted is not None else "-"
        return "false accept" if self.accepted else "false reject"


def cases(gold: int, prompt: str) -> list[Case]:
    """Answers to a question whose right answer is `gold`, a whole number of two digits or more."""
    wrong, digits = gold + 1, str(gold)
    think = "<think>Add the parts, then count again.</think>\n"

    def script(numerals: str) -> str:
        return "".join(numerals[int(d)] if d.isdecimal() else d for d in digits)

    many = " ".join(str(n) for n in range(gold - 10, gold + 11))
    return [
        Case("plain right answer", f"{think}{gold}", True, True),
        Case("in a sentence", f"{think}The answer is {gold}.", True, True),
        Case("boxed", f"{think}\\boxed{{{gold}}}", True, True),
        Case("after ####", f"{think}#### {gold}", True, True),
        Case("with a unit", f"{think}{gold} km", True, True),
        Case("with a decimal point", f"{think}{gold}.0", True, True),
        Case("Thai digits", f"{think}{script(THAI)}", True, True),
        Case("Arabic digits", f"{think}{script(ARABIC)}", True, True),
        Case("full-width digits", f"{think}{script(FULL)}", True, True),
        Case("wrong number", f"{think}{wrong}", False, True),
        Case("empty", "", False, False),
        Case("spaces only", " \n \t ", False, False),
        Case("no number", f"{think}I do not know.", False, True),
        Case("the prompt again", prompt, False, False),
        Case("the prompt again, then a wrong number", f"{prompt} {wrong}", False, False),
        Case("twenty-one numbers, the right one among them", f"{think}{many}", False, True),
        Case("right digits within a longer number", f"{think}1{gold}", False, True),
        Case("denied", f"{think}The answer is not {gold}, it is {wrong}.", False, True),
        Case("negative", f"{think}-{gold}", False, True),
        Case("as a power", f"{think}{gold}^2", False, True),
        Case("not a number", f"{think}nan", False, True),
        Case("infinite", f"{think}inf", False, True),
        Case("code", f"{think}__import__('os').getpid() or {wrong}", False, None),
        Case("right in the thinking, wrong after it", f"<think>so {gold}</think>\n{wrong}", False, True),
        Case("right in the thinking, nothing after it", f"<think>so {gold}</think>", False, False),
        Case("thinking never closed", f"<think>so {gold}", False, False),
        Case("empty thinking", f"<think></think>{gold}", None, False),
        Case("blank thinking", f"<think> \n </think>{gold}", None, False),
        Case("dots for thinking", f"<think>...</think>{gold}", None, False),
        Case("thinking closed twice", f"<think></think> 1 </think>{gold}", None, False),
        Case("two thinkings", f"<think>a</think><think>b</think>{gold}", None, False),
        Case("no thinking", f"{gold}", None, False),
        Case("text before the thinking", f"Well. {think}{gold}", None, False),
    ]


def audit(
    function: Callable[..., Any],
    name: str,
    *,
    kind: Kind = "correctness",
    gold: int = 42,
    prompt: str = "A train goes 20 km and then 22 km. How far does it go?",
    columns: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """What `function` gives to every case. columns: further columns it asks for, one value each.

    Raises:
        RewardError: the function breaks the contract on one of them; the message names the row.
    """
    if abs(gold) < 10:
        raise ValueError(f"the gold answer is {gold}; take a whole number of two digits or more, so that cases differ")
    asked = cases(gold, prompt)
    problem = Problem(id="audit", prompt=prompt, answer=str(gold), columns=dict(columns or {}))
    texts = [case.text for case in asked]
    ids = [list(text.encode()) or [0] for text in texts]
    scores = call_rewards(
        [Reward(name, function)], problems=[problem] * len(asked), completions=texts, completion_ids=ids
    )
    values = [row[name] for row in scores.rows]
    bar = max(values[0] or 0.0, 0.0) / 2
    findings = []
    for case, value in zip(asked, values, strict=True):
        accepted = value is not None and value > 0 and value >= bar
        findings.append(Finding(case, value, accepted, case.right if kind == "correctness" else case.form))
    return findings


def table(findings: Sequence[Finding]) -> str:
    """Every case in a line, what is wrong first; then the counts."""
    order = {"false accept": 0, "false reject": 1, "ok": 2, "-": 3}
    rows = sorted(findings, key=lambda f: order[f.verdict])
    width = max(len(f.case.name) for f in rows)
    lines = [f"{'':12}  {'case':<{width}}  {'reward':>7}  answer"]
    for f in rows:
        value = "none" if f.value is None else f"{f.value:.2f}"
        shown = f.case.text.replace("\n", "\\n").replace("\t", "\\t")
        lines.append(
            f"{f.verdict:12}  {f.case.name:<{width}}  {value:>7}  {shown[:60]}{'...' if len(shown) > 60 else ''}"
        )
    counted = [f for f in findings if f.wanted is not None]
    accepts = sum(f.verdict == "false accept" for f in counted)
    rejects = sum(f.verdict == "false reject" for f in counted)
    wanted = sum(bool(f.wanted) for f in counted)
    lines.append(f"\nfalse accepts {accepts} of {len(counted) - wanted}, false rejects {rejects} of {wanted}")
    return "\n".join(lines)
