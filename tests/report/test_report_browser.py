"""What the report shows and what its controls do, in a browser. Numbers are those of `run_files`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.report_page import Opened
from report.run_files import TEXTS, metrics, write_lines, write_run

from groupline.report.page import write_report


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([write_run(tmp_path_factory.mktemp("one") / "run")])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one name; the second is going, has another learning rate and an alarm."""
    folder = tmp_path_factory.mktemp("two")
    other = write_run(folder / "b" / "run", steps=3, finished=False, learning_rate=2e-3)
    rows = [metrics(1 + i % 3) | {"step": i + 1, "completions/clipped_ratio": 0.9} for i in range(8)]
    write_lines(other / "metrics.jsonl", rows, torn='{"step": 9, ')
    return write_report([write_run(folder / "a" / "run"), other], folder / "report.html")


@pytest.fixture
def opened(browser: Any, file: Path) -> Iterator[Opened]:
    one = Opened(browser, file)
    yield one
    assert not one.trouble
    one.context.close()


@pytest.fixture
def both(browser: Any, several: Path) -> Iterator[Opened]:
    one = Opened(browser, several)
    yield one
    assert not one.trouble
    one.context.close()


def test_the_verdict_and_the_last_values(opened: Opened) -> None:
    assert opened.text("#title") == "run"
    assert opened.text(".badge") == "✓ healthy"
    assert "No alarm was raised in 4 steps. 4 of 4 steps in 20 s" in " ".join(opened.text("article.run").split())
    assert "12.5% → 75.0%" in opened.text("article.run")  # held-out pass@1
    assert opened.legend("reward") == {"training, mean (band: ±1 standard deviation)": "1.38", "held out, mean": "1.25"}
    assert opened.legend("parts") == {"right (weight 1)": "0.875", "form (weight 0.5)": "1"}
    assert opened.legend("groups-share") == {"all wrong": "0.0%", "mixed": "50.0%", "all right": "50.0%"}
    assert opened.legend("length") == {"mean": "3.25", "95th percentile": "8", "held out, mean": "5"}
    assert opened.legend("effective") == {"answers that teach": "0.5"}
    assert "estimated by k3" in opened.text("#kl-plot h3")
    assert "near zero whether the run learns or not" in opened.text("#loss-lead")
    assert opened.column("pass-0", 1) == [
        "12.5% (0.7% to 73.6%)", "25.0% (2.7% to 80.2%)", "50.0% (9.5% to 90.5%)", "0.625", "5", "0.0%",
    ]  # fmt: skip


def test_pointer_and_keys_read_a_chart(opened: Opened) -> None:
    page = opened.page
    chart = page.locator("#accuracy")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    assert opened.text("#accuracy-plot .where") == "step 0"
    assert opened.legend("accuracy")["right, held out (pass@1)"] == "12.5%"
    assert opened.legend("accuracy")["right, training"] == "–"  # nothing was trained yet
    chart.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert opened.legend("accuracy") == {
        "right, training": "75.0%", "right, held out (pass@1)": "12.5%", "cut at the token limit": "0.0%",
    }  # fmt: skip
    assert chart.get_attribute("aria-valuetext").startswith("step 2: right, training 75.0%")
    page.keyboard.press("End")
    assert opened.legend("accuracy")["right, training"] == "87.5%"


def test_a_charts_numbers_as_a_table(opened: Opened) -> None:
    opened.page.focus("#accuracy-plot summary")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("#accuracy-data")
    assert opened.column("accuracy-data", 0) == ["0", "1", "2", "3", "4"]
    assert opened.column("accuracy-data", 1) == ["–", "12.5%", "75.0%", "50.0%", "87.5%"]
    assert opened.column("accuracy-data", 2) == ["12.5%", "–", "–", "–", "75.0%"]


@pytest.mark.parametrize(("axis", "where"), [("tokens", "400"), ("seconds", "20 s"), ("step", "step 4")])
def test_the_axis_changes(axis: str, where: str, opened: Opened) -> None:
    opened.page.locator(f"#axis-{axis}").check(force=True)
    assert opened.text("#reward-plot .where") == where


def test_any_series_can_be_drawn(opened: Opened) -> None:
    opened.page.select_option("#any-key", "num_completion_tokens")
    assert opened.text("#any-plot h3") == "num_completion_tokens"
    assert opened.legend("any") == {"num_completion_tokens": "26"}


def test_search_filter_sort_and_pages(opened: Opened) -> None:
    page = opened.page
    assert opened.text("#found") == "12 of the 12 groups in the page."
    assert len(opened.column("group-list", 0)) == 8
    page.click("#groups-next")
    assert len(opened.column("group-list", 0)) == 4
    assert opened.text("#groups-page") == "9–12 of 12 groups"
    page.select_option("#source", "train")
    page.select_option("#pick", "dead")
    assert opened.column("group-list", 1) == ["1", "2", "4"]  # all wrong in step 1, all right in the others
    page.select_option("#pick", "all")
    page.select_option("#sort", "high")
    assert opened.column("group-list", 3)[:2] == ["4 of 4", "4 of 4"]
    page.select_option("#sort", "low")
    assert opened.column("group-list", 3)[0] == "0 of 4"
    page.fill("#search", "S3G1")
    assert opened.column("group-list", 0) == ["Problem p3 <i>?"]
    page.fill("#search", "nowhere")
    assert opened.text("#found") == "0 of the 12 groups in the page."
    assert opened.text("#groups-page") == "no groups"


def test_answers_are_shown_as_they_were_written(opened: Opened) -> None:
    page = opened.page
    page.select_option("#source", "train")
    page.locator(".row-open").first.click()
    assert opened.text("#group-title") == "Training, step 1, group 0"
    assert page.evaluate("document.activeElement.id") == "group-title"
    shown = page.locator(".answer .text").evaluate_all("(all) => all.map((x) => x.textContent)")
    assert shown == [f"{text} s1g0" for text in TEXTS]
    assert page.locator(".answer b").count() == 0  # markup stays text
    assert opened.texts(".answer .mark") == ["✓ right", "✕ wrong", "✕ wrong", "✕ wrong"]
    assert page.locator(".answer").nth(3).locator(".pair").evaluate_all("(all) => all.map((x) => x.innerText)") == [
        "reward\n0.5", "right\n0", "form\n1", "advantage\n−0.50", "tokens\n16", "ended\ncut at the limit",
    ]  # fmt: skip
    page.select_option("#order", "long")
    assert opened.texts(".answer header strong") == ["Answer 3", "Answer 2", "Answer 1", "Answer 0"]
    page.locator(".row-open").nth(1).click()
    assert "every advantage is 0" in opened.text("#group")


def test_next_and_previous_by_key_and_button(opened: Opened) -> None:
    page = opened.page
    page.select_option("#source", "train")
    page.locator(".row-open").first.click()
    page.keyboard.press("n")
    assert opened.text("#group-title") == "Training, step 1, group 1"
    page.keyboard.press("n")
    page.keyboard.press("p")
    page.keyboard.press("p")
    assert opened.text("#group-title") == "Training, step 1, group 0"
    page.keyboard.press("p")  # there is none before
    assert opened.text("#group-title") == "Training, step 1, group 0"
    page.click("#group-next")
    assert opened.text("#group-title") == "Training, step 1, group 1"
    page.focus("#search")
    page.keyboard.press("n")  # typed
    assert page.input_value("#search") == "n"
    assert opened.text("#group-title") == "Training, step 1, group 1"


def test_the_address_names_the_group_and_the_answer(opened: Opened, browser: Any, file: Path) -> None:
    page = opened.page
    page.select_option("#source", "train")
    page.locator(".row-open").nth(2).click()
    page.click("#open-1")
    address = page.evaluate("location.hash")
    assert address == "#at/run/train/2/0/1"
    again = Opened(browser, file, address)
    assert again.text("#group-title") == "Training, step 2, group 0"
    assert again.text("#tokens-title") == "Answer 1, token by token"
    again.page.evaluate("location.hash = '#at/run/held_out/4/1'")
    again.page.get_by_text("Held out, step 4, group 1").wait_for()
    again.page.evaluate("location.hash = '#at/run/train/77/1'")  # no such group: nothing changes
    assert again.text("#group-title") == "Held out, step 4, group 1"
    assert not again.trouble
    again.context.close()


def test_the_same_prompt_at_another_step(opened: Opened) -> None:
    page = opened.page
    page.select_option("#source", "train")
    page.locator(".row-open").first.click()
    steps = [f"step {step}: {right} of 4 right" for step, right in ((1, 1), (2, 2), (3, 3), (4, 4))]
    assert opened.texts(".elsewhere button") == steps
    page.get_by_role("button", name="step 3: 3 of 4 right").click()
    assert opened.text("#group-title") == "Training, step 3, group 0"
    assert opened.texts(".elsewhere [aria-pressed=true]") == ["step 3: 3 of 4 right"]


def test_tokens_and_what_is_known_of_each(opened: Opened) -> None:
    page = opened.page
    page.select_option("#source", "train")
    page.locator(".row-open").first.click()
    page.click("#open-0")
    assert page.locator(".tok").evaluate_all("(all) => all.map((x) => x.textContent)") == ["<think>", " one", "·"]
    assert opened.texts("#tint .option") == ["advantage", "log-prob", "ratio", "entropy", "clipped or masked"]
    page.locator(".tok").nth(0).click()
    page.keyboard.press("ArrowRight")
    said = opened.text("#token-said")
    for words in ('Token 1 " one" (id 1)', "advantage +0.500", "log-prob −0.2500", "ratio 0.7000", "entropy 0.2000 nats",
                  "clipped or masked at the lower bound"):  # fmt: skip
        assert words in said
    page.locator(".tok").nth(2).hover()
    assert "clipped or masked at the upper bound" in opened.text("#token-said")
    assert '"·"' not in opened.text("#token-said")
    shades = """(all) => all.map((x) => Number(x.style.getPropertyValue("--shade")))"""
    for name, expected in (("clipped", [0, 1, 1]), ("entropy", [0.1, 0.2, 0.3]), ("advantage", [0.25] * 3)):
        page.locator(f"#tint-{name}").check(force=True)
        assert page.locator(".tok").evaluate_all(shades) == pytest.approx(expected)
    page.click("#open-1")
    assert "This answer was not trained on in its step" in opened.text("#tokens")
    page.click("#open-2")  # a character in two tokens; and what was not logged
    assert page.locator(".tok").evaluate_all("(all) => all.map((x) => x.textContent)") == [
        "<think>",
        " one",
        "·",
        "ก",
        "↵\n",
    ]
    assert "Not logged for this answer: ratio, entropy, clipped or masked" in opened.text("#tokens")
    page.click("#open-2")
    assert opened.text("#tokens") == ""


def test_several_runs_are_laid_over_one_another(both: Opened) -> None:
    page = both.page
    assert both.text("#title") == "a/run · b/run"
    assert both.texts(".badge") == ["✓ healthy", "✕ broken"]
    broken = both.text("article.broken")
    assert "answers cut off, from step 5" in broken
    assert "First at step 5. What to do: Raise max_completion_length" in broken
    assert "it is running, or was killed" in broken
    assert both.column("alarms-1", 0) == ["answers cut off"]
    assert both.legend("signal-share") == {"a/run": "–", "b/run": "50.0%"}  # at step 8, which a has not
    page.select_option("#reward-series", "held out, mean")
    assert both.legend("reward") == {"a/run": "1.25", "b/run": "0.625"}
    assert both.column("config", 0) == ["learning_rate"]
    assert both.column("config", 1) + both.column("config", 2) == ["0.001", "0.002"]
    page.click("#config-all")
    assert "num_generations" in both.column("config", 0)
    page.locator("#run-1").uncheck()
    assert both.texts(".badge") == ["✓ healthy"]
    assert both.legend("signal-share") == {"with signal": "50.0%"}
    page.click("#run-0")  # one stays
    assert page.is_checked("#run-0")
    page.locator("#run-1").check()
    page.select_option("#sample-run", index=1)
    assert "b/run" in page.evaluate("document.querySelector('#permalink').hash")[1:].replace("%2F", "/")


def test_runs_without_groups_say_what_they_lack(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "sft"
    run.mkdir()
    (run / "config.yaml").write_text("solution_columns: [solution]\n")
    write_lines(
        run / "metrics.jsonl", [{"step": i, "loss": 1.0 / i, "tokens": 10, "seconds": 3.0 * i} for i in (1, 2, 3)]
    )
    one = Opened(browser, write_report([run]))
    for section, words in {
        "rewards": "logs no reward", "signal": "samples no groups", "passk": "No held-out problems were sampled",
        "lengths": "No answer lengths are logged", "policy": "No KL is logged", "samples": "No answers are written",
    }.items():  # fmt: skip
        assert words in one.text(f"#{section}"), section
    assert one.legend("loss-curve") == {"policy": "0.333"}
    assert one.text("#loss-lead") == "What is minimised."
    assert not one.trouble
    one.context.close()


def test_a_run_without_a_step(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    one = Opened(browser, write_report([tmp_path / "run"]))
    assert "No step is written yet." in one.text("#verdict")
    assert not one.trouble
    one.context.close()
