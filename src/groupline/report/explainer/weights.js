// (2) What one token counts, under three rules, for two answers of unequal length.
"use strict";
section("weights", { lengths: [12, 60], budget: 96 }, (root, state) => {
  const rules = ["per_sequence", "per_token", "per_budget"];
  const weights = () => Object.fromEntries(rules.map((rule) => [rule, math.tokenWeights(state.lengths, rule, state.budget)]));
  const share = (w) => w.map((x, i) => x * state.lengths[i]);
  const numbers = el("div");
  const charts = rules.map((rule) =>
    chart(`weights-${rule}`, {
      height: 170,
      label: () => {
        const w = weights()[rule];
        const pulls = share(w);
        const values = { a: fmt(w[0], 5), b: fmt(w[1], 5), pa: fmt(pulls[0]), pb: fmt(pulls[1]) };
        return t("weights.chart", { rule: t(`weights.${rule}`), ...values });
      },
      draw: (pen) => {
        const all = weights();
        const top = Math.max(...Object.values(all).flat());
        const [a, b] = state.lengths;
        const gap = 8;
        pen.left = 54;
        pen.bottom = 40;
        pen.frame({
          xs: [0, Math.max(a + b + gap, state.budget)], ys: [0, top * 1.2], yTicks: [0, top],
          yWrite: (y) => (y ? fmt(y, 4) : "0"), yName: t("weights.weight"),
        });
        [[0, a, 0], [a + gap, a + gap + b, 1]].forEach(([from, to, i]) => {
          const value = all[rule][i];
          pen.bar(from, to, value, i ? "quiet" : "accent");
          pen.text((from + to) / 2, value, fmt(value, 4), i || a > 20 ? "middle" : "start", i || a > 20 ? 0 : -8, -5);
          const name = t(i ? "weights.long_name" : "weights.short_name", { n: state.lengths[i] });
          const narrow = !i && pen.x(to) - pen.x(from) < 60;
          pen.add("text", { x: narrow ? pen.x(from) : pen.x((from + to) / 2), y: pen.height - (i ? 24 : 8), class: narrow ? "name" : "name middle" }, name);
        });
      },
    }),
  );
  const update = () => {
    const all = weights();
    const rows = rules.map((rule) => {
      const pulls = share(all[rule]);
      const cell = (name, value) => el("span", { id: `${name}-${rule}` }, value);
      return [
        el("span", { html: t(`weights.${rule}`) }),
        cell("weight-1", fmt(all[rule][0], 5)), cell("weight-2", fmt(all[rule][1], 5)),
        cell("pull-1", fmt(pulls[0])), cell("pull-2", fmt(pulls[1])),
      ];
    });
    const head = ["rule", "token_1", "token_2", "answer_1", "answer_2"].map((key) => t(`weights.${key}`));
    fill(numbers, table({ id: "weights-table", caption: t("weights.table"), head, rows }));
    charts.forEach((c) => c.render());
  };
  const length = (i) =>
    slider({
      id: `length-${i + 1}`, label: t(`weights.length_${i + 1}`), min: 4, max: 96, value: state.lengths[i],
      change: (value) => {
        state.lengths[i] = value;
        update();
      },
    }).node;
  const budget = slider({
    id: "budget", label: t("weights.budget"), min: 96, max: 384, step: 8, value: state.budget,
    change: (value) => {
      state.budget = value;
      update();
    },
  });
  const panels = rules.map((rule, i) => el("div.panel", {}, el("h3", { html: t(`weights.${rule}`) }), el("p.formula", { html: t(`weights.${rule}_formula`) }), charts[i].node));
  root.append(el("div.controls.row", {}, length(0), length(1), budget.node), el("div.panels.three", {}, panels), numbers);
  update();
});
