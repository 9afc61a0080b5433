// (6) GRPO step by step on the smallest policy there is: five possible answers, one probability each.
"use strict";
section(
  "bandit",
  { judge: "graded", scale: "group", size: 8, rate: 1, seed: 3, logits: null, past: [], last: null, dead: 0 },
  (root, state) => {
    const NAMES = ["A", "B", "C", "D", "E"];
    const START = [0.35, 0.3, 0.2, 0.1, 0.05].map(Math.log);
    const JUDGES = { graded: [0, 0.2, 0.5, 0.8, 1], right: [0, 0, 0, 0, 1] };
    const rewards = () => JUDGES[state.judge];
    const worth = (logits) => math.sum(math.softmax(logits).map((p, i) => p * rewards()[i]));
    let timer = 0;
    const reset = () => {
      clearInterval(timer);
      Object.assign(state, { logits: [...START], past: [worth(START)], last: null, dead: 0, uniform: math.uniforms(state.seed) });
    };
    const step = () => {
      const probs = math.softmax(state.logits);
      const drawn = Array.from({ length: state.size }, () => math.draw(probs, state.uniform()));
      const made = math.banditStep(state.logits, drawn, rewards(), state.rate, { scale: state.scale });
      state.last = { ...made, drawn, before: probs, rewards: drawn.map((a) => rewards()[a]) };
      state.dead += math.allEqual(state.last.rewards) ? 1 : 0;
      state.logits = made.logits;
      state.past.push(worth(made.logits));
    };

    const policy = chart("bandit-policy", {
      height: 230,
      label: () => t("bandit.policy_chart", { rows: math.softmax(state.logits).map((p, i) => `${NAMES[i]} ${percent(p)}`).join(", ") }),
      draw: (pen) => {
        const now = math.softmax(state.logits);
        pen.bottom = 44;
        pen.frame({ xs: [0, 5], ys: [0, 1.08], yTicks: [0, 0.5, 1], yWrite: (y) => percent(y, 0), yName: t("bandit.probability") });
        now.forEach((p, i) => {
          const was = state.last ? state.last.before[i] : p;
          pen.bar(i + 0.18, i + 0.82, p, p < was ? "against" : "accent");
          if (state.last) pen.line([[i + 0.1, was], [i + 0.9, was]], "ink dashed");
          pen.text(i + 0.5, Math.max(p, was), percent(p, 0), "middle", 0, -6);
          pen.add("text", { x: pen.x(i + 0.5), y: pen.height - 26, class: "name middle" }, NAMES[i]);
          pen.add("text", { x: pen.x(i + 0.5), y: pen.height - 9, class: "tick middle" }, t("bandit.reward_is", { r: fmt(rewards()[i], 1) }));
        });
      },
    });
    const history = chart("bandit-history", {
      height: 230,
      label: () => t("bandit.history_chart", { n: state.past.length - 1, from: fmt(state.past[0]), to: fmt(state.past.at(-1)) }),
      draw: (pen) => {
        const steps = Math.max(20, state.past.length - 1);
        pen.frame({ xs: [0, steps], ys: [0, 1.02], xTicks: ticks(0, steps, 4).filter(Number.isInteger), yTicks: [0, 0.5, 1], xName: t("bandit.step_axis"), yName: t("bandit.worth") });
        pen.line(state.past.map((y, x) => [x, y]), "accent thick");
        pen.dot(state.past.length - 1, state.past.at(-1), "accent", 5);
      },
    });
    const facts = el("div.facts");
    const story = el("div");
    const said = el("p.said", { id: "bandit-said", role: "status" });
    const update = () => {
      fill(
        facts, fact("bandit-steps", t("bandit.steps"), String(state.past.length - 1)),
        fact("bandit-worth", t("bandit.worth"), fmt(state.past.at(-1))), fact("bandit-dead", t("bandit.dead"), String(state.dead)),
      );
      policy.render();
      history.render();
      if (!state.last) {
        said.textContent = t("bandit.not_yet");
        fill(story);
        return;
      }
      const { drawn, advantages, gradient, before } = state.last;
      const r = state.last.rewards;
      const dead = math.allEqual(r);
      said.textContent = dead
        ? t("bandit.said_dead", { reward: fmt(r[0], 1) })
        : t("bandit.said", { mean: fmt(math.mean(r)), std: fmt(math.std(r)) });
      const now = math.softmax(state.logits);
      const draws = drawn.map((a, i) => [String(i + 1), NAMES[a], fmt(r[i], 1), signed(advantages[i])]);
      const moves = NAMES.map((name, j) => [name, fmt(before[j]), signed(gradient[j], 4), fmt(now[j]), signed(now[j] - before[j], 4)]);
      const heads = (names) => names.map((key) => t(`bandit.${key}`));
      fill(
        story,
        el(
          "div.panels.two", {},
          table({ id: "bandit-draws", caption: t("bandit.draws"), head: heads(["number", "answer", "reward", "advantage"]), rows: draws }),
          table({ id: "bandit-moves", caption: t("bandit.moves"), head: heads(["answer", "before", "gradient", "after", "change"]), rows: moves }),
        ),
      );
    };
    const afresh = (name) => (value) => {
      state[name] = value;
      reset();
      update();
    };
    const keep = (name) => (value) => (state[name] = value);
    const options = (names) => names.map((name) => [name, t(`bandit.${name}`)]);
    const judge = choice({ id: "bandit-judge", label: t("bandit.judge"), options: options(["graded", "right"]), value: state.judge, change: afresh("judge") });
    const scales = ["group", "none"].map((name) => [name, t(`bandit.scale_${name}`)]);
    const scale = choice({ id: "bandit-scale", label: t("bandit.scale"), options: scales, value: state.scale, change: keep("scale") });
    const size = slider({ id: "bandit-size", label: t("bandit.size"), min: 2, max: 16, value: state.size, change: keep("size") });
    const rate = slider({ id: "bandit-rate", label: t("bandit.rate"), min: 0.1, max: 3, step: 0.1, value: state.rate, show: (x) => fmt(x, 1), change: keep("rate") });
    const one = () => {
      clearInterval(timer);
      step();
      update();
    };
    /** Twenty steps, one at a time to look at; at once for those who want no motion. */
    const twenty = () => {
      clearInterval(timer);
      let left = 20;
      if (calm()) {
        while (left--) step();
        update();
        return;
      }
      timer = setInterval(() => {
        if (!root.contains(story) || !left--) return clearInterval(timer);
        step();
        return update();
      }, 120);
    };
    const again = () => {
      state.seed += 1;
      reset();
      update();
    };
    const buttons = el(
      "div.buttons", {}, button("bandit-step", t("bandit.step"), one, "button.main"), button("bandit-twenty", t("bandit.twenty"), twenty),
      button("bandit-reset", t("bandit.reset"), again),
    );
    root.append(
      el("div.controls.row", {}, judge, scale), el("div.controls.row", {}, size.node, rate.node), buttons, said, facts,
      el("div.panels.two", {}, el("div.panel", {}, policy.node), el("div.panel", {}, history.node)), story,
    );
    if (!state.logits) reset();
    update();
  },
);
