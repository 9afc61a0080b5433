// (5) pass@k: the unbiased formula beside the naive one, and a policy whose pass@1 rises while its pass@8 falls.
"use strict";
section("passk", { n: 8, c: 2, k: 4, progress: 0.6 }, (root, state) => {
  const START = [0.35, 0.25]; // chances of a right answer for two kinds of problems, half of the problems each
  const END = [0.95, 0.02];
  const SHARES = [0.5, 0.5];
  const KS = [1, 2, 4, 8, 16, 32, 64];
  const facts = el("div.facts", { "aria-live": "polite" });
  const numbers = el("div");
  const each = (f) => Array.from({ length: state.n }, (_, i) => [i + 1, f(state.n, state.c, i + 1)]);
  const curve = chart("pass-chart", {
    height: 230,
    label: () => t("passk.chart", { ...state, unbiased: fmt(math.passAtK(state.n, state.c, state.k), 4), naive: fmt(math.passAtKNaive(state.n, state.c, state.k), 4) }),
    draw: (pen) => {
      const last = Math.max(state.n, 2);
      pen.frame({
        xs: [1, last], ys: [0, 1], xTicks: [...new Set([1, ...ticks(1, last, 5).filter((k) => Number.isInteger(k) && k < last), last])],
        yTicks: [0, 0.5, 1], yWrite: (y) => percent(y, 0), xName: "k", yName: "pass@k",
      });
      pen.line(each(math.passAtKNaive), "against dashed");
      pen.line(each(math.passAtK), "accent thick");
      pen.dot(state.k, math.passAtKNaive(state.n, state.c, state.k), "against", 5);
      pen.dot(state.k, math.passAtK(state.n, state.c, state.k), "accent", 6);
    },
  });
  const update = () => {
    const { n, c, k } = state;
    const [right, naive] = [math.passAtK(n, c, k), math.passAtKNaive(n, c, k)];
    fill(
      facts, fact("pass-unbiased", t("passk.unbiased"), fmt(right, 4)), fact("pass-naive", t("passk.naive"), fmt(naive, 4)),
      fact("pass-gap", t("passk.gap"), signed(naive - right, 4)),
    );
    const rows = each(math.passAtK).map(([i, value]) => [String(i), fmt(value, 4), fmt(math.passAtKNaive(n, c, i), 4)]);
    fill(numbers, dataTable("pass-values", ["k", t("passk.unbiased_short"), t("passk.naive_short")], rows));
    curve.render();
  };
  const whole = (name, low, high) =>
    slider({
      id: `pass-${name}`, label: t(`passk.${name}`), min: low, max: high, value: state[name],
      change: (value) => {
        state[name] = value;
        if (name === "n") {
          for (const [other, made] of [["c", c], ["k", k]]) {
            state[other] = Math.min(state[other], state.n);
            made.input.max = state.n;
            made.set(state[other]);
          }
        }
        update();
      },
    });
  const [n, c, k] = [whole("n", 1, 64), whole("c", 0, state.n), whole("k", 1, state.n)];

  const chances = (progress) => START.map((p, i) => p + progress * (END[i] - p));
  const of = (progress, at) => math.passAtKOfChances(chances(progress), SHARES, at);
  const change = (at) => `${percent(of(0, at))} → ${percent(of(state.progress, at))}`;
  const mixed = el("div.facts", { "aria-live": "polite" });
  const mixedNumbers = el("div");
  const mixture = chart("mixture-chart", {
    height: 240,
    label: () => t("passk.mixture_chart", { one: change(1), eight: change(8) }),
    draw: (pen) => {
      const line = (progress) => Array.from({ length: 61 }, (_, i) => [i / 10, of(progress, 2 ** (i / 10))]);
      pen.frame({
        xs: [0, 6], ys: [0, 1], xTicks: KS.map((_, i) => i), xWrite: (i) => String(KS[i]), yTicks: [0, 0.5, 1],
        yWrite: (y) => percent(y, 0), xName: t("passk.k_axis"), yName: "pass@k",
      });
      pen.line(line(0), "quiet thick dashed");
      pen.line(line(state.progress), "accent thick");
      for (const i of [0, 3]) {
        pen.dot(i, of(0, KS[i]), "quiet", 5);
        pen.dot(i, of(state.progress, KS[i]), "accent", 6);
      }
    },
  });
  const sharpen = () => {
    const [liked, left] = chances(state.progress);
    fill(
      mixed, fact("mix-1", "pass@1", change(1)), fact("mix-8", "pass@8", change(8)),
      fact("mix-kinds", t("passk.kinds"), `${percent(liked, 0)} · ${percent(left, 0)}`),
    );
    const rows = KS.map((at) => [String(at), percent(of(0, at)), percent(of(state.progress, at))]);
    fill(mixedNumbers, dataTable("mixture-values", ["k", t("passk.before"), t("passk.now")], rows));
    mixture.render();
  };
  const progress = slider({
    id: "progress", label: t("passk.progress"), min: 0, max: 1, step: 0.05, value: state.progress, show: (x) => percent(x, 0),
    change: (value) => {
      state.progress = value;
      sharpen();
    },
  });
  root.append(
    el("div.controls.row", {}, n.node, c.node, k.node), facts, curve.node,
    legend([["accent thick", t("passk.unbiased_short")], ["against dashed", t("passk.naive_short")]]), numbers,
    el("h3", {}, t("passk.mixture_title")), el("p", { html: t("passk.mixture_text") }), el("div.controls.row", {}, progress.node), mixed,
    mixture.node, legend([["quiet thick dashed", t("passk.before")], ["accent thick", t("passk.now")]]), mixedNumbers,
  );
  update();
  sharpen();
});
