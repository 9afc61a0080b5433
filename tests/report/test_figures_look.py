"""How the report's figures look: colours that all eyes tell apart, and texts that keep clear of each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from groupline.report.figure import BLUE, GREY, ORANGE, load_pyplot
from groupline.report.figures import estimators, groups, models, progress


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    load_pyplot().close("all")


# Of full severity, on linear RGB (Machado, Oliveira and Fernandes 2009, table 1).
SEEN_BY = {
    "everyone": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(colour: str, eyes: Any) -> Any:
    """CIELAB of a hexadecimal sRGB colour as these eyes see it (IEC 61966-2-1; white D65)."""
    encoded = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(eyes @ linear, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("pair", [(BLUE, ORANGE), (BLUE, GREY), (ORANGE, "#000000")], ids=lambda p: "-".join(p))
def test_colours_that_stand_side_by_side_differ_for_all_eyes(pair: tuple[str, str], eyes: str) -> None:
    one, two = (lab(colour, SEEN_BY[eyes]) for colour in pair)
    assert np.linalg.norm(one - two) > 25, "2 is just to be seen, 100 is black against white"


GOLDEN = (1.5, 0.3, 0.5, 1.5, 0.3, 0.0, 0.3, 0.5), (1.56, -0.55, -0.2, 1.56, -0.55, -1.08, -0.55, -0.2)
PAIR = (
    groups.ShownGroup("step 10,000, group 16", *GOLDEN),
    groups.ShownGroup("step 1, group 1", (0.0,) * 8, (0.0,) * 8),
)
MANY = tuple(float(i % 2) for i in range(64))
WIDE = (groups.ShownGroup("step 1, group 2", MANY, tuple(2 * r - 1 for r in MANY)), PAIR[1])
CLOSE = progress.Ends((1, 8), ((0.5, 0.4, 0.6), (0.51, 0.41, 0.61)), ((0.5, 0.4, 0.6), (1.0, 0.96, 1.0)), 1000, 16)
LONG = progress.Progress(
    tuple(range(1, 2001)), (0.5,) * 2000, (300.0,) * 2000, ((0, 0.1, 0.05, 0.3), (2000, 0.5, 0.4, 0.6))
)


@pytest.mark.parametrize(
    "draw",
    [
        lambda p: groups.draw_groups(p, PAIR), lambda p: groups.draw_groups(p, WIDE),
        lambda p: groups.draw_groups(p, groups.example_groups()), estimators.draw_estimators, models.draw_models,
        lambda p: progress.draw_ability(p, CLOSE), lambda p: progress.draw_progress(p, LONG),
    ],
    ids=["groups", "groups of 64", "example", "estimators", "models", "ability", "progress"],
)  # fmt: skip
def test_no_text_lies_over_another_or_leaves_the_picture(draw: Any) -> None:
    from matplotlib.text import Text

    figure = draw(load_pyplot())
    figure.tight_layout()
    figure.canvas.draw()
    axes = [axis for a in figure.axes for axis in (a.xaxis, a.yaxis)]
    beyond = {  # the limits: such ticks have texts, which are not drawn
        id(tick.label1)
        for axis in axes
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in beyond]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    width, height = figure.canvas.get_width_height()
    assert len(boxes) > 8
    for i, (text, box) in enumerate(boxes):
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
        for other, its in boxes[:i]:
            over = min(box.x1, its.x1) - max(box.x0, its.x0), min(box.y1, its.y1) - max(box.y0, its.y0)
            assert min(over) <= 1, f"{text!r} over {other!r}"
