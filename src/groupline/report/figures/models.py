"""What GRPO deletes from PPO: the four models, and which remain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupline.report.figure import BLUE, GREY, ORANGE


@dataclass(frozen=True, slots=True)
class Model:
    """A model of PPO. trained: by PPO. grpo: "kept", "optional" or "deleted". stead: what does its work in GRPO."""

    name: str
    trained: bool
    does: str
    grpo: str
    stead: str


MODELS = (
    Model("Policy", True, "writes the answers", "kept", "writes G answers\nto each prompt"),
    Model("Reference", False, "KL: stay near\nthe start", "optional", "KL, if beta > 0"),
    Model("Reward model", False, "scores an answer", "deleted", "code that checks\nthe answer"),
    Model("Value model", True, "baseline of\neach token", "deleted", "mean of the group's\nown rewards"),
)
LINES = ("advantage = GAE(reward, value)", "advantage = (reward - group mean) / group std")
DARK = "#5c5c5c"  # GREY is too light for text
WIDTH, HEIGHT, PITCH = 1.9, 0.66, 2.2


def draw_models(pyplot: Any) -> Any:
    """Two rows of four boxes, PPO above and GRPO below; a deleted model is crossed out."""
    figure, axis = pyplot.subplots(figsize=(7.4, 4.6))
    for row, (name, line) in enumerate(zip(("PPO", "GRPO"), LINES, strict=True)):
        top = 5.4 - 2.9 * row
        held = [m for m in MODELS if row == 0 or m.grpo == "kept"]
        also = [m.name.lower() for m in MODELS if row and m.grpo == "optional"]
        count = f"{len(held)} model{'s' * (len(held) > 1)}, {sum(m.trained for m in held)} trained"
        axis.text(0, top + 0.42, name, fontsize=13, fontweight="bold")
        axis.text(1.0, top + 0.42, f"{count}{f'; with a KL also the {also[0]}' if also else ''}", fontsize=10)
        axis.text(0, top - 1.62, line, fontsize=10, style="italic")
        for place, model in enumerate(MODELS):
            _box(axis, PITCH * place, top - HEIGHT, model, "kept" if row == 0 else model.grpo)
            axis.text(
                PITCH * place + WIDTH / 2, top - HEIGHT - 0.1, model.does if row == 0 else model.stead,
                ha="center", va="top", fontsize=9,
                color=ORANGE if row and model.grpo == "deleted" else "black",
            )  # fmt: skip
    axis.set(xlim=(-0.1, 3 * PITCH + WIDTH + 0.1), ylim=(0.7, 6.3))
    axis.axis("off")
    return figure


def _box(axis: Any, x: float, y: float, model: Model, fate: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    gone = fate == "deleted"
    filled = model.trained and not gone
    axis.add_patch(
        FancyBboxPatch(
            (x + 0.05, y),
            WIDTH - 0.1,
            HEIGHT,
            boxstyle="round,pad=0.04",
            linewidth=1.8,
            edgecolor=GREY if gone else BLUE,
            facecolor=BLUE if filled else "white",
            linestyle="-" if fate == "kept" else "--",
        )
    )
    if gone:
        for ends in ((y, y + HEIGHT), (y + HEIGHT, y)):
            axis.plot((x + 0.05, x + WIDTH - 0.05), ends, color=ORANGE, linewidth=1.8, alpha=0.4)
    state = "deleted" if gone else "trained" if model.trained else "frozen"
    state += ", optional" if fate == "optional" else ""
    colour = "white" if filled else DARK if gone else "black"
    for text, height, size in ((model.name, 0.46, 10.5), (state, 0.17, 8.5)):
        axis.text(x + WIDTH / 2, y + height, text, ha="center", va="center", fontsize=size, color=colour)
