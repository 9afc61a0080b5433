// (3) The clipped objective of one token, for both signs of the advantage.
"use strict";
section("clipping", { ratio: 1.35, low: 0.2, high: 0.2 }, (root, state) => {
  const SPAN = [0, 2];
  const at = (advantage, ratio = state.ratio) => math.clipped(ratio, advantage, state.low, state.high);
  const verdict = (advantage) => t(at(advantage).stopped ? "clipping.stopped" : advantage > 0 ? "clipping.up" : "clipping.down");
  const curve = (advantage, name) =>
    [SPAN[0], 1 - state.low, 1 + state.high, SPAN[1]].map((r) => [r, at(advantage, r)[name]]).filter(([r]) => r <= SPAN[1]);
  const panel = (advantage) => {
    const id = advantage > 0 ? "clip-up" : "clip-down";
    return chart(id, {
      height: 250,
      label: () => t("clipping.chart", { a: signed(advantage, 0), r: fmt(state.ratio, 2), value: signed(at(advantage).value), verdict: verdict(advantage) }),
      draw: (pen) => {
        const ys = advantage > 0 ? [-0.15, 2.1] : [-2.1, 0.15];
        pen.frame({
          xs: SPAN, ys, xTicks: [0, 0.5, 1, 1.5, 2], yTicks: [-2, -1, 0, 1, 2].filter((y) => y >= ys[0] && y <= ys[1]),
          xName: t("clipping.ratio_axis"), yName: t("clipping.objective_axis"), yWrite: (y) => fmt(y, 0),
        });
        for (const edge of [1 - state.low, 1 + state.high]) pen.line([[edge, ys[0]], [edge, ys[1]]], "edge");
        pen.line([[0, 0], [2, 2 * advantage]], "quiet dashed");
        pen.line(curve(advantage, "value"), advantage > 0 ? "accent thick" : "against thick");
        const now = at(advantage);
        pen.line([[state.ratio, ys[0]], [state.ratio, ys[1]]], "cursor");
        pen.dot(state.ratio, now.value, now.stopped ? "hollow" : advantage > 0 ? "accent" : "against", 8);
      },
      drag: (x) => setRatio(Math.min(SPAN[1], Math.max(SPAN[0], x))),
    });
  };
  const charts = [panel(1), panel(-1)];
  const numbers = el("div", { "aria-live": "polite" });
  const update = () => {
    const ids = { 1: "up", [-1]: "down" };
    const row = (name, write) => [
      el("span", { html: t(`clipping.${name}`) }), ...[1, -1].map((a) => el("span", { id: `${name}-${ids[a]}` }, write(a))),
    ];
    const rows = [
      ...["plain", "bounded", "value", "gradient"].map((name) => row(name, (a) => signed(at(a)[name]))), row("verdict", verdict),
    ];
    const head = [t("clipping.case"), "A = +1", "A = −1"];
    fill(numbers, table({ id: "clipping-table", caption: t("clipping.table", { r: fmt(state.ratio, 2) }), head, rows }));
    charts.forEach((c) => c.render());
  };
  const setRatio = (value) => {
    state.ratio = Math.round(value * 100) / 100;
    ratio.set(state.ratio);
    update();
  };
  const digits = (x) => fmt(x, 2);
  const ratio = slider({ id: "ratio", label: t("clipping.ratio"), min: SPAN[0], max: SPAN[1], step: 0.01, value: state.ratio, show: digits, change: setRatio });
  const bound = (name) =>
    slider({
      id: `clip-${name}`, label: t(`clipping.${name}`), min: 0.05, max: 0.8, step: 0.01, value: state[name], show: digits,
      change: (value) => {
        state[name] = value;
        update();
      },
    }).node;
  const panels = [1, -1].map((a, i) => el("div.panel", {}, el("h3", { html: t(a > 0 ? "clipping.better" : "clipping.worse") }), charts[i].node));
  const lines = legend([["quiet dashed", t("clipping.line_plain")], ["accent thick", t("clipping.line_value_up")], ["against thick", t("clipping.line_value_down")], ["edge", t("clipping.line_edges")]]);
  root.append(el("div.controls.row", {}, ratio.node, bound("low"), bound("high")), el("div.panels.two", {}, panels), lines, numbers);
  update();
});
