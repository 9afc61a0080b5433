"""The numbers behind the report's figures, and that the pictures show those numbers."""

from __future__ import annotations

import json
import math
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from groupline.cli import main
from groupline.report import figures
from groupline.report.figure import load_pyplot, save
from groupline.report.figures import estimators, groups, models, progress, write_figures

RUN_FREE = ["ppo_to_grpo", "kl_estimators"]


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    load_pyplot().close("all")


def answer(step: int, group: int, reward: float | None, advantage: float | None) -> dict[str, Any]:
    return {"step": step, "group": group, "reward": reward, "advantage": advantage}


def row(step: int, accuracy: float, length: float) -> dict[str, Any]:
    return {"step": step, "accuracy": accuracy, "completions/mean_length": length}


def measured(**passes: tuple[float, float, float]) -> dict[str, Any]:
    return {f"pass@{k[1:]}": {"value": v, "wilson": [low, high]} for k, (v, low, high) in passes.items()}


def write_run(folder: Path, rows: list[Any], answers: list[Any] = (), held: Any = None) -> Path:  # type: ignore[assignment]
    folder.mkdir(parents=True)
    for name, lines in (("metrics.jsonl", rows), ("rollouts.jsonl", answers)):
        if lines or name == "metrics.jsonl":
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if held is not None:
        frame = {"problems": 100, "samples_per_problem": 8, "history": [], "before": None, "after": None}
        (folder / "results.json").write_text(json.dumps({"held_out": frame | held}))
    return folder


STEPS = [row(s, s / 10, 20 + s) for s in range(1, 6)]
BEFORE, AFTER = (
    measured(k1=(0.4, 0.31, 0.5), k8=(0.9, 0.83, 0.94)),
    measured(k1=(0.7, 0.6, 0.78), k8=(0.92, 0.85, 0.96)),
)


def test_the_example_groups_by_hand() -> None:
    """[1,1,0,0]: mean 1/2, sample std sqrt(4 * 1/4 / 3); a group of equal rewards gets exactly 0."""
    teaching, dead = groups.example_groups()
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert teaching.advantages == pytest.approx([expected, expected, -expected, -expected], rel=1e-12)
    assert dead.advantages == (0.0, 0.0, 0.0, 0.0)
    assert (teaching.rewards, dead.rewards) == ((1, 1, 0, 0), (1, 1, 1, 1))
    assert teaching.teaches
    assert not dead.teaches


def test_the_recorded_groups_are_of_the_first_step_that_has_both(tmp_path: Path) -> None:
    answers = [
        *(answer(1, 0, r, a) for r, a in ((1, 1), (0, -1))),  # step 1 has none without spread
        *(answer(2, 0, r, a) for r, a in ((1, 0.5), (0.5, -0.5))),
        *(answer(2, 1, r, a) for r, a in ((2, 0.7), (0, -0.7))),  # spread most
        *(answer(2, 2, r, a) for r, a in ((1, 0), (1, 0))),
        *(answer(2, 3, r, a) for r, a in ((0, 0), (0, 0))),
        *(answer(3, 0, r, a) for r, a in ((9, 1), (0, -1))),
    ]
    teaching, dead = groups.recorded_groups(write_run(tmp_path / "run", STEPS, answers))
    assert teaching == groups.ShownGroup("step 2, group 2", (2, 0), (0.7, -0.7))
    assert dead == groups.ShownGroup("step 2, group 3", (1, 1), (0, 0))


def test_groups_of_different_steps_and_the_example_fill_in(tmp_path: Path) -> None:
    spread = [answer(1, 0, 1, 1), answer(1, 0, 0, -1)]
    flat = [answer(4, 0, 0, 0), answer(4, 0, 0, 0)]
    teaching, dead = groups.recorded_groups(write_run(tmp_path / "a", STEPS, spread + flat))
    assert (teaching.origin, dead.origin) == ("step 1, group 1", "step 4, group 1")
    teaching, dead = groups.recorded_groups(write_run(tmp_path / "b", STEPS, spread))
    assert (teaching.origin, dead) == ("step 1, group 1", groups.example_groups()[1])
    assert groups.recorded_groups(write_run(tmp_path / "c", STEPS)) == groups.example_groups()


@pytest.mark.parametrize(
    ("why", "pairs"),
    [
        ("an answer not scored", [(1, 1.0), (None, 0.0), (0, -1.0)]),
        ("a value model's baseline", [(1, 0.9), (0, 0.1)]),
        ("no advantage recorded", [(1, None), (0, None)]),
        ("an answer by itself", [(1, 0.0)]),
        ("equal rewards, yet a push", [(1, 0.5), (1, -0.5)]),
    ],
)
def test_groups_not_judged_by_their_mean_are_not_shown(why: str, pairs: list[Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS, [answer(1, 0, r, a) for r, a in pairs])
    assert groups.recorded_groups(run) == groups.example_groups(), why


def test_the_bars_are_the_group_s_numbers() -> None:
    shown = (
        groups.ShownGroup("here", (1.5, 0.25, 0.5), (1.13, -0.74, -0.39)),
        groups.ShownGroup("here", (0.5, 0.5, 0.5), (0.0, 0.0, 0.0)),
    )
    figure = groups.draw_groups(load_pyplot(), shown)
    for row_of_axes, group, mean in zip(np.array(figure.axes).reshape(2, 2), shown, (0.75, 0.5), strict=True):
        left, right = row_of_axes
        assert [bar.get_height() for bar in left.patches] == pytest.approx(list(group.rewards))
        assert [bar.get_height() for bar in right.patches] == pytest.approx(list(group.advantages))
        assert left.lines[0].get_ydata()[0] == pytest.approx(mean)
        assert left.get_title("right") == f"- - mean {mean:.2f}"
    assert [t.get_text() for t in figure.axes[1].texts] == ["+1.13", "-0.74", "-0.39"]


def test_the_exact_kl_by_fractions() -> None:
    p = [Fraction(x) for x in ("0.4", "0.3", "0.15", "0.1", "0.05")]
    q = [Fraction(x) for x in ("0.25", "0.25", "0.2", "0.2", "0.1")]
    assert sum(p) == sum(q) == 1
    assert [float(x) for x in p] == list(estimators.POLICY)
    assert [float(x) for x in q] == list(estimators.REFERENCE)
    assert estimators.exact_kl() == pytest.approx(sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True)))


@pytest.mark.parametrize(
    ("name", "formula"), [("k1", lambda x: -math.log(x)), ("k3", lambda x: x - 1 - math.log(x))], ids=["k1", "k3"]
)
def test_the_running_means_are_the_formula_s(name: Any, formula: Any) -> None:
    """k1 = -log x and k3 = x - 1 - log x with x = q/p, token by token in plain Python; their mean is the KL."""
    p, q = estimators.POLICY, estimators.REFERENCE
    found = estimators.converge(name, repetitions=40, tokens=50)
    drawn = np.random.default_rng(0).choice(5, size=(40, 50), p=p)
    for place, count in enumerate(found.counts):
        means = sorted(math.fsum(formula(q[t] / p[t]) for t in line[: int(count)]) / count for line in drawn.tolist())
        assert found.mean[place] == pytest.approx(math.fsum(means) / 40, abs=1e-12)
        assert (
            means[1] - 1e-12 <= found.low[place] <= means[2] + 1e-12
        )  # the 5% quantile of 40: between the 2nd and the 3rd
        assert means[37] - 1e-12 <= found.high[place] <= means[38] + 1e-12
    expected = math.fsum(a * formula(b / a) for a, b in zip(p, q, strict=True))
    assert expected == pytest.approx(estimators.exact_kl(), abs=1e-15)
    second = math.fsum(a * formula(b / a) ** 2 for a, b in zip(p, q, strict=True))
    assert found.spread == pytest.approx(math.sqrt(second - expected**2), rel=1e-9)


def test_both_are_without_bias_and_k1_swings() -> None:
    one, three = estimators.converge("k1"), estimators.converge("k3")
    kl = estimators.exact_kl()
    for found in (one, three):
        error = found.spread / np.sqrt(estimators.REPETITIONS * found.counts)  # of the mean of all repetitions
        assert (np.abs(found.mean - kl) < 4.5 * error).all()
        width = (found.high[-1] - found.low[-1]) / (2 * 1.6449 * found.spread / math.sqrt(estimators.TOKENS))
        assert width == pytest.approx(1, abs=0.12)  # a normal distribution's 90%, by the central limit theorem
    assert one.spread > 3 * three.spread
    assert one.low[0] < 0 < three.low[0]


def test_the_picture_of_the_estimators_is_theirs() -> None:
    figure = estimators.draw_estimators(load_pyplot())
    for axis, name in zip(figure.axes, ("k1", "k3"), strict=True):
        found = estimators.converge(name)  # type: ignore[arg-type]
        *single, mean, exact = [line.get_ydata() for line in axis.lines]
        assert np.array_equal(mean, found.mean)
        assert np.array_equal(single, found.single)
        assert set(exact) == {estimators.exact_kl()}
        band = axis.collections[0].get_paths()[0].vertices[:, 1]
        assert band.min() == pytest.approx(found.low.min())
        assert band.max() == pytest.approx(found.high.max())


def test_what_grpo_deletes() -> None:
    """The four of PPO for language models (arXiv 2203.02155); GRPO (2402.03300) has no value model."""
    assert {m.name: (m.trained, m.grpo) for m in models.MODELS} == {
        "Policy": (True, "kept"), "Reference": (False, "optional"), "Reward model": (False, "deleted"),
        "Value model": (True, "deleted"),
    }  # fmt: skip
    said = [t.get_text() for t in models.draw_models(load_pyplot()).axes[0].texts]
    assert "4 models, 2 trained" in said
    assert "1 model, 1 trained; with a KL also the reference" in said
    assert said.count("deleted") == 2
    assert "".join(said).count("optional") == 1


def test_progress_reads_the_run(tmp_path: Path) -> None:
    held = {"before": BEFORE, "after": AFTER, "history": [{"step": s, "pass@1": v} for s, v in ((0, 0.4), (5, 1.0))]}
    found = progress.read_progress(write_run(tmp_path / "run", STEPS, held=held))
    assert found.steps == (1, 2, 3, 4, 5)
    assert found.accuracy == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert found.length == (21, 22, 23, 24, 25)
    (first, last) = found.held_out  # Wilson's interval of 40 of 100, and of 100 of 100: 1 / (1 + z^2 / 100) to 1
    assert first == (0, 0.4, pytest.approx(0.3094, abs=5e-5), pytest.approx(0.4980, abs=5e-5))
    assert last == (5, 1.0, pytest.approx(1 / (1 + 1.959964**2 / 100), abs=1e-6), 1.0)


def test_progress_of_a_run_that_is_going(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "accu')  # being written
    assert progress.read_progress(run).steps == (1, 2, 3, 4, 5)
    assert progress.read_progress(run).held_out == ()
    assert progress.read_ends(run) is None


def test_smoothing_is_a_moving_mean() -> None:
    values = np.random.default_rng(3).random(47)
    found = progress.smoothed(tuple(values.tolist()))
    assert found[2:-2] == pytest.approx(np.convolve(values, np.full(5, 0.2), "valid").tolist())
    assert found[0] == pytest.approx((values[0] + values[1] + values[2]) / 3)
    assert found[-1] == pytest.approx((values[-1] + values[-2] + values[-3]) / 3)
    assert progress.smoothed((1.0, 5.0)) == [1.0, 5.0]


def test_the_lines_of_progress_are_the_run_s() -> None:
    shown = progress.Progress((1, 2, 3), (0.1, 0.2, 0.4), (30.0, 20.0, 25.0), ((0, 0.1, 0.05, 0.3), (3, 0.5, 0.4, 0.6)))
    top, bottom = progress.draw_progress(load_pyplot(), shown).axes
    assert top.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.4]
    assert bottom.lines[0].get_ydata().tolist() == [30, 20, 25]
    assert top.get_shared_x_axes().joined(top, bottom)
    bars = top.collections[0].get_segments()
    assert np.array(bars)[:, :, 1] == pytest.approx(np.array([[0.05, 0.3], [0.4, 0.6]]))


@pytest.mark.parametrize(("ks", "chosen"), [((1, 2, 8, 16), (1, 8)), ((1, 4), (1, 4)), ((1,), (1, 1))])
def test_the_ks_of_ability(ks: tuple[int, ...], chosen: tuple[int, int], tmp_path: Path) -> None:
    values = measured(**{f"k{k}": (k / 20, k / 40, k / 18) for k in ks})
    found = progress.read_ends(write_run(tmp_path / "run", STEPS, held={"before": values, "after": values}))
    assert found is not None
    assert found.ks == chosen
    assert found.after == tuple((k / 20, k / 40, k / 18) for k in chosen)


def test_ability_shows_values_and_their_intervals(tmp_path: Path) -> None:
    found = progress.read_ends(write_run(tmp_path / "run", STEPS, held={"before": BEFORE, "after": AFTER}))
    assert found is not None
    axis = progress.draw_ability(load_pyplot(), found).axes[0]
    segments = [np.array(c.get_segments())[:, :, 1].tolist() for c in axis.collections]
    assert segments == [
        [pytest.approx([0.31, 0.5]), pytest.approx([0.83, 0.94])],
        [pytest.approx([0.6, 0.78]), pytest.approx([0.85, 0.96])],
    ]
    assert [t.get_text() for t in axis.texts] == ["40.0%", "90.0%", "70.0%", "92.0%"]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["pass@1\n+30.0 points", "pass@8\n+2.0 points"]
    assert "100 held-out problems, 8 answers each" in axis.get_title()


def test_files_of_one_run(tmp_path: Path) -> None:
    held = {"before": BEFORE, "after": AFTER}
    run = write_run(tmp_path / "run", STEPS, held=held)
    made = write_figures([run], tmp_path / "out")
    names = [*RUN_FREE, "two_groups", "length_accuracy", "ability"]
    assert made == [tmp_path / "out" / f"{name}{ending}" for name in names for ending in (".png", ".svg")]
    for file in made:
        data = file.read_bytes()
        if file.suffix == ".png":
            assert data[:8] == b"\x89PNG\r\n\x1a\n"
            assert len(data) < 100_000
        else:
            assert ElementTree.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"
            assert not re.findall(rb'(?:href|src)="(?!#)', data)  # fetches nothing
    drawn = groups.draw_groups(load_pyplot(), groups.recorded_groups(run))
    again = save(drawn, tmp_path / "two_groups", (".png", ".svg"))
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in made if p.stem == "two_groups"]


@pytest.fixture
def only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and their names given, but no file is written, which is what takes the time."""
    monkeypatch.setattr(figures, "save", lambda figure, path, endings: [path.with_suffix(e) for e in endings])


@pytest.mark.usefixtures("only_named")
def test_files_of_several_runs_and_what_they_lack(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "runs" / "whole", STEPS, held={"before": BEFORE, "after": AFTER})
    fresh = write_run(tmp_path / "runs" / "fresh", [])
    said: list[str] = []
    made = write_figures([whole, fresh], tmp_path / "out", said.append)
    assert {str(p.relative_to(tmp_path / "out").with_suffix("")) for p in made} == {
        *RUN_FREE, "whole/two_groups", "whole/length_accuracy", "whole/ability", "fresh/two_groups",
    }  # fmt: skip
    assert said == [
        f"no length_accuracy: {fresh} has no step yet",
        f"no ability: {fresh} has no evaluation before and after in results.json",
    ]


@pytest.mark.usefixtures("only_named")
def test_without_a_run(tmp_path: Path) -> None:
    made = write_figures([], tmp_path / "out")
    assert [p.name for p in made if p.suffix == ".png"] == ["ppo_to_grpo.png", "kl_estimators.png", "two_groups.png"]


def test_what_cannot_be_drawn_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no metrics\.jsonl, so it is not a run's folder"):
        write_figures([tmp_path / "empty"], tmp_path / "out")
    pair = [write_run(tmp_path / part / "run", STEPS) for part in ("a", "b")]
    with pytest.raises(ValueError, match="several runs are called run; their figures would lie in one folder"):
        write_figures(pair, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'groupline\[plot\]'"):
        write_figures([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("only_named")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--figures"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(Path("figures/ppo_to_grpo.png"))
    run = write_run(tmp_path / "run", STEPS)
    assert main(["report", str(run), "--figures", "--out", "there"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"no ability: {run} has no evaluation before and after in results.json" in said
    assert str(Path("there/length_accuracy.svg")) in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name a run's folder"),
        (["--figures", "--open"], "--open and --rollouts concern the page, and --figures writes none; leave them out"),
        (["--figures", "--rollouts", "0"], "--open and --rollouts concern the page"),
        (["--figures", "nowhere"], "nowhere holds no metrics.jsonl, so it is not a run's folder"),
    ],
)
def test_what_the_command_refuses(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *args]) == 2
    assert f"groupline report: {message}" in capsys.readouterr().err
