"""Each control of the explainer does what it says: the numbers shown become those that the library gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from report.explainer_page import Opened, read, written

from groupline.metrics import p_no_signal, pass_at_k
from groupline.objective import group_advantages, k1, k2, k3, token_weights
from groupline.report.explain import FOLDER

GROUP = json.loads((FOLDER / "group.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """One page for all tests here: its sections do not touch one another."""
    one = Opened(browser, written(tmp_path_factory.mktemp("page")))
    yield one
    assert not one.trouble
    one.context.close()


def of(*groups: list[float], **rule: Any) -> list[float]:
    rewards = torch.tensor(groups, dtype=torch.float64).flatten()
    return [float(a) for a in group_advantages(rewards, len(groups[0]), **rule)]


def test_rewards_become_advantages(opened: Opened) -> None:
    page, one, two = opened.page, [2.0, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]

    def shown() -> list[float]:
        return opened.numbers("advantages-data", 2)

    page.fill("#rewards-1", "2; 0.5，0 0")
    assert (opened.number("#mean-1"), opened.number("#std-1")) == (0.625, pytest.approx(0.946, abs=6e-4))
    assert shown() == pytest.approx(of(one, two), abs=6e-5)
    page.check("#ddof-0")
    assert opened.number("#std-1") == pytest.approx(0.820, abs=6e-4)
    assert shown() == pytest.approx(of(one, two, ddof=0), abs=6e-5)
    page.check("#scale-batch")
    assert shown() == pytest.approx(of(one, two, ddof=0, scale="batch"), abs=6e-5)
    page.check("#scale-none")
    page.check("#baseline-leave_one_out")
    assert shown() == pytest.approx(of(one, two, scale="none", baseline="leave_one_out"), abs=6e-5)
    page.check("#ddof-1")
    page.check("#scale-group")
    page.check("#baseline-mean")
    page.click("#preset-parts")
    assert shown()[:8] == pytest.approx([1.56, -0.55, -0.20, 1.56, -0.55, -1.08, -0.55, -0.20], abs=6e-3)
    chart = page.get_attribute("#advantage-chart", "aria-label")
    assert "+1.56, −0.55, −0.20" in chart


def test_a_dead_group_turns_grey(opened: Opened) -> None:
    page = opened.page
    page.click("#preset-half")
    assert page.locator("#advantage-chart rect.dead").count() == 0
    page.click("#preset-dead")
    assert page.locator("#advantage-chart rect.dead").count() == 4
    assert "no signal" in opened.text("#advantage .facts >> nth=0")
    assert opened.numbers("advantages-data", 2)[:4] == [0, 0, 0, 0]


def test_what_is_typed_wrong_is_named_and_changes_nothing(opened: Opened) -> None:
    page = opened.page
    page.click("#preset-half")
    before = opened.numbers("advantages-data", 2)
    for text, message in (
        ("1, one", "“one” is not a number"),
        ("1", "2 to 16 rewards; here are 1"),
        ("", "here are 0"),
    ):
        page.fill("#rewards-1", text)
        assert message in opened.text("#rewards-1-problem")
        assert page.get_attribute("#rewards-1", "aria-invalid") == "true"
        assert opened.numbers("advantages-data", 2) == before
    page.fill("#rewards-1", "1, −1")
    assert opened.text("#rewards-1-problem") == ""
    assert opened.numbers("advantages-data", 2)[:2] == pytest.approx(of([1, -1]), abs=6e-5)


def test_how_often_a_group_is_dead(opened: Opened) -> None:
    opened.slide("p-right", 0.9)
    opened.slide("group-size", 4)
    assert opened.number("#no-signal") == pytest.approx(p_no_signal(0.9, 4), abs=6e-4)
    box = opened.page.locator("#signal-chart").bounding_box()
    opened.page.locator("#signal-chart").click(
        position={"x": 44 + (box["width"] - 56) / 2, "y": 60}
    )  # the middle: p = 0.5
    assert opened.text("#p-right-value") == "0.50"
    assert opened.number("#no-signal") == pytest.approx(p_no_signal(0.5, 4), abs=6e-4)


def test_token_weights(opened: Opened) -> None:
    for slider, value in (("length-1", 20), ("length-2", 80), ("budget", 160)):
        opened.slide(slider, value)
    for rule in ("per_sequence", "per_token", "per_budget"):
        expected = token_weights(torch.tensor([20, 80]), rule, budget=160).tolist()
        for i, (weight, length) in enumerate(zip(expected, (20, 80), strict=True), 1):
            assert opened.number(f"#weight-{i}-{rule}") == pytest.approx(weight, abs=6e-6)
            assert opened.number(f"#pull-{i}-{rule}") == pytest.approx(weight * length, abs=6e-4)


def test_clipping(opened: Opened) -> None:
    """At 1.3 with a bound of 0.28 above; then at 0.7, where only the bad token is stopped."""
    opened.slide("clip-high", 0.28)
    opened.slide("ratio", 1.3)
    assert [opened.number(f"#{name}-up") for name in ("plain", "bounded", "value", "gradient")] == [1.3, 1.28, 1.28, 0]
    assert [opened.number(f"#{name}-down") for name in ("plain", "bounded", "value", "gradient")] == [
        -1.3,
        -1.28,
        -1.3,
        -1.3,
    ]
    assert (opened.text("#verdict-up"), opened.text("#verdict-down")) == ("stopped by the clip", "becomes less likely")
    opened.slide("clip-low", 0.1)
    opened.slide("ratio", 0.7)
    assert [opened.number(f"#gradient-{name}") for name in ("up", "down")] == [0.7, 0]
    assert opened.number("#value-down") == -0.9
    chart = opened.page.locator("#clip-up")
    box = chart.bounding_box()
    opened.page.mouse.move(box["x"] + 60, box["y"] + 100)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 100, steps=3)
    opened.page.mouse.up()
    assert opened.text("#ratio-value") == "2.00"
    assert "stopped by the clip" in chart.get_attribute("aria-label")


def test_kl_of_four_tokens(opened: Opened) -> None:
    logits, ref = [2.0, 0.4, -0.4, -1.2], [0.2, 0.6, 0.1, -2.0]
    opened.slide("kl-logits0", 2)
    opened.slide("kl-ref3", -2)
    p, q = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), 0) for x in (logits, ref))
    kl = float((p.exp() * (p - q)).sum())
    assert opened.number("#kl-exact") == pytest.approx(kl, abs=6e-5)
    for name, estimator in (("k1", k1), ("k2", k2), ("k3", k3)):
        mean = float((p.exp() * estimator(p, q)).sum())
        spread = float((p.exp() * (estimator(p, q) - mean) ** 2).sum().sqrt())
        assert opened.number(f"#kl-mean-{name}") == pytest.approx(mean, abs=6e-5)
        assert opened.number(f"#kl-bias-{name}") == pytest.approx(mean - kl, abs=1.1e-4)
        assert opened.number(f"#kl-spread-{name}") == pytest.approx(spread, abs=6e-5)
    drawn = opened.numbers("kl-table", 4)
    assert drawn == pytest.approx([opened.number(f"#kl-mean-{n}") for n in ("k1", "k2", "k3")], abs=0.15)
    opened.page.click("#kl-again")
    assert opened.numbers("kl-table", 4) != drawn
    rows = {
        name: [opened.number(f"#kl-gradient-{name}-{i}") for i in range(4)]
        for name in ("forward", "k1", "k2", "k3", "reverse")
    }
    assert rows["k1"] == [0, 0, 0, 0]
    assert rows["k2"] == rows["forward"] == pytest.approx((p.exp() * (p - q - kl)).tolist(), abs=6e-4)
    assert rows["k3"] == rows["reverse"] == pytest.approx((p.exp() - q.exp()).tolist(), abs=6e-4)


def test_distributions_can_be_dragged(opened: Opened) -> None:
    page = opened.page
    chart = page.locator("#kl-shapes")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    x = box["x"] + 44 + (box["width"] - 56) * (2 + 0.3) / 4  # the policy's bar of C, to the half of the axis
    height = box["height"] - 30 - 38
    page.mouse.move(x, box["y"] + box["height"] - 42)
    page.mouse.down()
    page.mouse.move(x, box["y"] + 30 + height / 2, steps=3)
    page.mouse.up()
    assert "C 50" in chart.get_attribute("aria-label") or "C 49" in chart.get_attribute("aria-label")
    page.check("#kl-kind-gaussian")
    opened.slide("kl-s", 1.5)
    opened.slide("kl-m", 1)
    expected = math.log(1 / 1.5) + (1.5**2 + 1) / 2 - 0.5
    assert opened.number("#kl-exact") == pytest.approx(expected, abs=6e-5)
    assert opened.number("#kl-gradient-k2-0") == opened.number("#kl-gradient-forward-0") == 1
    assert opened.number("#kl-gradient-k3-0") == pytest.approx(1 / 1.5**2, abs=6e-4)
    box = chart.bounding_box()
    page.mouse.click(box["x"] + 16 + (box["width"] - 28) * 3 / 8, box["y"] + 100)  # of -4 to 4
    assert opened.number("#kl-m-value") == -1
    page.check("#kl-kind-categorical")


def test_pass_at_k(opened: Opened) -> None:
    for name, value in (("n", 16), ("c", 3), ("k", 5)):
        opened.slide(f"pass-{name}", value)
    assert opened.number("#pass-unbiased") == pytest.approx(pass_at_k(16, 3, 5), abs=6e-5)
    assert opened.number("#pass-naive") == pytest.approx(1 - (13 / 16) ** 5, abs=6e-5)
    assert opened.numbers("pass-values-data", 1) == pytest.approx([pass_at_k(16, 3, k) for k in range(1, 17)], abs=6e-5)
    opened.slide("pass-n", 2)  # neither c nor k may be above it
    assert (opened.text("#pass-c-value"), opened.text("#pass-k-value")) == ("2", "2")
    assert opened.number("#pass-unbiased") == 1


def test_pass_at_1_rises_while_pass_at_8_falls(opened: Opened) -> None:
    opened.slide("progress", 1)
    (before_1, after_1), (before_8, after_8) = ([read(x) for x in opened.text(f"#mix-{k}").split("→")] for k in (1, 8))
    assert (before_1, after_1) == (0.3, pytest.approx(0.485))
    assert before_8 == pytest.approx(1 - (0.65**8 + 0.75**8) / 2, abs=6e-4)
    assert after_8 == pytest.approx(1 - (0.05**8 + 0.98**8) / 2, abs=6e-4)
    assert after_8 < before_8


def test_the_bandit_learns_step_by_step(opened: Opened) -> None:
    page = opened.page
    opened.slide("bandit-size", 6)
    page.click("#bandit-reset")
    page.click("#bandit-step")
    assert opened.text("#bandit-steps") == "1"
    names = page.locator("#bandit-draws tbody td:nth-child(2)").all_text_contents()
    rewards = [dict(zip("ABCDE", (0, 0.2, 0.5, 0.8, 1), strict=True))[name] for name in names]
    assert len(rewards) == 6
    advantages = of(rewards)
    assert opened.numbers("bandit-draws", 3) == pytest.approx(advantages, abs=6e-4)
    theta = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05], dtype=torch.float64).log().requires_grad_()
    chosen = torch.log_softmax(theta, 0)[["ABCDE".index(name) for name in names]]
    (gradient,) = torch.autograd.grad((chosen * torch.tensor(advantages, dtype=torch.float64)).mean(), theta)
    assert opened.numbers("bandit-moves", 2) == pytest.approx(gradient.tolist(), abs=6e-5)
    after = torch.softmax(theta + gradient, 0).tolist()
    assert opened.numbers("bandit-moves", 3) == pytest.approx(after, abs=6e-4)
    worth = opened.number("#bandit-worth")
    for _ in range(3):
        page.click("#bandit-twenty")
    assert opened.text("#bandit-steps") == "61"
    assert opened.number("#bandit-worth") > max(0.75, worth)
    page.check("#bandit-judge-right")  # starts again; at 5% most first groups are dead
    assert (opened.text("#bandit-steps"), opened.text("#bandit-worth")) == ("0", "0.050")
    opened.slide("bandit-size", 2)
    page.click("#bandit-twenty")
    assert opened.number("#bandit-dead") >= 1


def test_every_number_of_the_recorded_group_opens_its_formula(opened: Opened) -> None:
    page = opened.page
    answers, weights = GROUP["answers"], GROUP["reward_weights"]
    advantages = of([a["reward"] for a in answers])
    found = page.locator("#group button.number")
    assert found.count() == 2 + len(answers) * (len(weights) + 4) + 6  # the group's, each answer's, the chosen token's
    missing = page.evaluate("""() => [...document.querySelectorAll("#group button.number")].filter((number) => {
        number.click();
        const lines = [...document.querySelectorAll("#formula code")];
        return !lines.length || !number.classList.contains("open") || !document.querySelector("#formula p").textContent;
    }).map((number) => number.dataset.key)""")
    assert not missing
    for i, answer in enumerate(answers):
        assert opened.number(f'[data-key="advantage-{i}"]') == pytest.approx(advantages[i], abs=6e-4)
        assert opened.number(f'[data-key="length-{i}"]') == len(answer["tokens"])
        assert opened.number(f'[data-key="weight-{i}"]') == pytest.approx(1 / (128 * len(answer["tokens"])), abs=6e-7)
    page.click('[data-key="advantage-0"]')
    rewards = [a["reward"] for a in answers]
    mean = sum(rewards) / 8
    assert f"(1.50 − {mean:.4f})" in opened.text("#formula")
    assert opened.text("#formula code >> nth=-1") == f"= +{advantages[0]:.4f}"


def test_the_tokens_of_an_answer(opened: Opened) -> None:
    page = opened.page
    page.click("#answer-5")
    answer = GROUP["answers"][5]
    assert page.locator("#tokens .token").count() == len(answer["tokens"])
    page.click("#token-1")
    ratio = math.exp(answer["logp_after"][1] - answer["logp"][1])
    advantage = of([a["reward"] for a in GROUP["answers"]])[5]
    assert opened.number('[data-key="ratio-5-1"]') == pytest.approx(ratio, abs=6e-5)
    assert opened.number('[data-key="objective-5-1"]') == pytest.approx(0.8 * advantage, abs=6e-5)  # bounded below
    assert opened.number('[data-key="second-5-1"]') == 0
    assert opened.number('[data-key="first-5-1"]') == pytest.approx(advantage / (128 * 12), abs=6e-6)
    assert "stopped" in page.get_attribute("#token-1", "class")
    page.check("#token-colour-ratio")
    assert "minus" in page.get_attribute("#token-1", "class")


def test_the_other_language(browser: Any, tmp_path: Path) -> None:
    """All texts change, what was set stays, and the page written in Chinese opens in it."""
    one = Opened(browser, written(tmp_path))
    one.page.fill("#rewards-1", "3, 1")
    one.page.click("[data-language=zh]")
    assert one.page.get_attribute("html", "lang") == "zh-Hans"
    assert one.text("#advantage h2") == "1好坏由本组来定"
    assert one.page.input_value("#rewards-1") == "3, 1"
    assert one.page.title() == "图解 GRPO：一次看一组"
    english = one.page.evaluate("""() => [...document.querySelectorAll("main p, main label, main legend, main summary")]
        .map((x) => x.innerText.replace(/python bench.*/, "")).filter((x) => /[a-z]{4,} [a-z]{3,}/.test(x))""")
    assert english == []
    one.page.click("[data-language=en]")
    assert one.text("#advantage h2") == "1The group sets the standard"
    assert not one.trouble
    one.context.close()
    two = Opened(browser, written(tmp_path, "zh"))
    assert two.page.get_attribute("[data-language=zh]", "aria-pressed") == "true"
    assert not two.trouble
    two.context.close()
