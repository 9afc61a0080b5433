// (4) Three estimators of a KL: what they average to, how much they swing, and where their gradients point.
"use strict";
section(
  "kl",
  { kind: "categorical", logits: [1.2, 0.4, -0.4, -1.2], ref: [0.2, 0.6, 0.1, -0.6], m: 0.8, s: 0.9, seed: 7 },
  (root, state) => {
    const DRAWS = 1000;
    const NAMES = ["A", "B", "C", "D"];
    const KINDS = { k1: "against", k2: "quiet thick", k3: "accent" };
    const gaussian = () => state.kind === "gaussian";
    const exact = () => (gaussian() ? math.gaussianKl(state.m, state.s, 0, 1) : math.categoricalKl(state.logits, state.ref));
    const points = () =>
      gaussian() ? math.gaussianPoints(state.m, state.s, 0, 1) : math.categoricalPoints(state.logits, state.ref);
    /** log-probs of DRAWS samples under both: the same random numbers for every setting, so a drag changes no luck. */
    const samples = () => {
      const uniform = math.uniforms(state.seed);
      if (!gaussian()) {
        const all = points();
        const probs = all.map((o) => o.p);
        return Array.from({ length: DRAWS }, () => all[math.draw(probs, uniform())]);
      }
      return Array.from({ length: DRAWS }, () => {
        const x = state.m + state.s * math.normal(uniform);
        return { logp: math.gaussianLogp(x, state.m, state.s), ref: math.gaussianLogp(x, 0, 1) };
      });
    };
    const running = (drawn, estimate) => {
      let total = 0;
      return drawn.map((o, i) => [i + 1, (total += estimate(o.logp, o.ref)) / (i + 1)]);
    };

    const shapes = chart("kl-shapes", {
      height: 210,
      label: () =>
        gaussian()
          ? t("kl.gaussian_chart", { m: fmt(state.m, 2), s: fmt(state.s, 2) })
          : t("kl.categorical_chart", { rows: points().map((o, i) => `${NAMES[i]} ${percent(o.p)} / ${percent(Math.exp(o.ref))}`).join(", ") }),
      draw: (pen) => {
        if (gaussian()) {
          const xs = Array.from({ length: 161 }, (_, i) => -4 + i / 20);
          const density = (m, s) => xs.map((x) => [x, Math.exp(math.gaussianLogp(x, m, s))]);
          const low = Math.max(0.45, Math.exp(math.gaussianLogp(state.m, state.m, state.s))) * 1.1;
          pen.left = 16;
          pen.frame({ xs: [-4, 4], ys: [0, low], xTicks: [-4, -2, 0, 2, 4], xWrite: (x) => fmt(x, 0), xName: t("kl.outcome"), yName: t("kl.density") });
          pen.line(density(0, 1), "quiet thick dashed");
          pen.area(density(state.m, state.s), 0, "accent");
          pen.line(density(state.m, state.s), "accent thick");
          return;
        }
        pen.frame({ xs: [0, 4], ys: [0, 1], yTicks: [0, 0.5, 1], yWrite: (y) => percent(y, 0), yName: t("kl.probability") });
        points().forEach((o, i) => {
          pen.bar(i + 0.12, i + 0.49, o.p, "accent");
          pen.bar(i + 0.51, i + 0.88, Math.exp(o.ref), "quiet");
          pen.add("text", { x: pen.x(i + 0.5), y: pen.height - 20, class: "name middle" }, t("kl.token", { name: NAMES[i] }));
        });
      },
      drag: (x, y, first) => {
        if (gaussian()) setters.m(x);
        else {
          if (first) held = { i: Math.min(3, Math.max(0, Math.floor(x))), which: x % 1 < 0.5 ? "logits" : "ref" };
          const wanted = Math.min(0.97, Math.max(0.005, y));
          const others = math.sum(state[held.which].map((v, j) => (j === held.i ? 0 : Math.exp(v))));
          setters[`${held.which}${held.i}`](Math.log((wanted / (1 - wanted)) * others));
        }
      },
    });
    let held = { i: 0, which: "logits" };
    const setters = {};
    /** A slider that the chart can move too. */
    const control = (id, label, low, high, step, get, put) => {
      setters[id] = (value) => {
        put(Math.min(high, Math.max(low, Math.round(value / step) * step)));
        made.set(get());
        update();
      };
      const made = slider({ id: `kl-${id}`, label, min: low, max: high, step, value: get(), show: (x) => fmt(x, 2), change: setters[id] });
      return made.node;
    };
    const logits = (which) =>
      NAMES.map((name, i) =>
        control(`${which}${i}`, t("kl.logit", { name }), -3, 3, 0.05, () => state[which][i], (v) => (state[which][i] = v)),
      );
    const controls = el("div");
    const build = () => {
      const set = (title, nodes) => el("fieldset.set", {}, el("legend", {}, title), el("div.controls.row", {}, nodes));
      fill(
        controls,
        gaussian()
          ? set(t("kl.policy"), [
              control("m", t("kl.mean"), -1.5, 1.5, 0.05, () => state.m, (v) => (state.m = v)),
              control("s", t("kl.std"), 0.9, 2, 0.05, () => state.s, (v) => (state.s = v)),
            ])
          : [set(t("kl.policy"), logits("logits")), set(t("kl.reference"), logits("ref"))],
      );
    };

    let drawn = [];
    const runs = chart("kl-runs", {
      height: 250,
      label: () => t("kl.runs_chart", { n: DRAWS, kl: fmt(exact(), 4), ...ends() }),
      draw: (pen) => {
        const lines = Object.entries(math.estimators).map(([name, estimate]) => [name, running(drawn, estimate)]);
        const settled = lines.flatMap(([, line]) => line.slice(15).map(([, y]) => y));
        const low = Math.min(0, ...settled);
        const high = Math.max(exact() * 1.5, ...settled) * 1.08 || 1;
        pen.frame({ xs: [1, DRAWS], ys: [low, high], xTicks: [1, 250, 500, 750, 1000], yTicks: ticks(low, high, 3), xName: t("kl.draws_axis"), yName: t("kl.nats_axis") });
        for (const [name, line] of lines) {
          pen.line(line.map(([x, y]) => [x, Math.min(high, Math.max(low, y))]), KINDS[name]);
        }
        pen.line([[1, exact()], [DRAWS, exact()]], "ink dashed");
      },
    });
    const ends = () => Object.fromEntries(Object.entries(math.estimators).map(([name, f]) => [name, fmt(running(drawn, f).at(-1)[1], 4)]));
    const numbers = el("div", { "aria-live": "polite" });
    const slopes = el("div");
    const gradients = () => {
      const wrap = (found) => Object.fromEntries(Object.entries(found).map(([name, x]) => [name, [x].flat()]));
      const [kl, mean] = gaussian()
        ? [math.klMeanGradients(state.m, state.s, 0, 1), math.expectedMeanGradients(state.m, state.s, 0, 1)]
        : [math.klLogitGradients(state.logits, state.ref), math.expectedLogitGradients(state.logits, state.ref)];
      const { forward, reverse } = wrap(kl);
      return { forward, ...wrap(mean), reverse };
    };
    const update = () => {
      drawn = samples();
      const kl = exact();
      const facts = math.estimatorFacts(points());
      const last = ends();
      const cell = (id, value) => el("span", { id }, value);
      const rows = Object.keys(KINDS).map((name) => [
        el("span", { html: t(`kl.${name}`) }), cell(`kl-mean-${name}`, signed(facts[name].mean, 4)),
        cell(`kl-bias-${name}`, signed(facts[name].mean - kl, 4)), cell(`kl-spread-${name}`, fmt(facts[name].spread, 4)), last[name],
      ]);
      const head = ["estimator", "average", "bias", "spread", "draws"].map((key) => t(`kl.${key}`));
      fill(
        numbers, el("div.facts", {}, fact("kl-exact", t("kl.exact"), fmt(kl, 4))),
        table({ id: "kl-table", caption: t("kl.table"), head, rows }),
      );
      const columns = gaussian() ? [t("kl.in_mean")] : NAMES.map((name) => t("kl.in_logit", { name }));
      const lines = Object.entries(gradients()).map(([name, values]) => [
        el("span", { html: t(`kl.gradient_${name}`) }), ...values.map((v, i) => el("span", { id: `kl-gradient-${name}-${i}` }, signed(v, 3))),
      ]);
      fill(slopes, table({ id: "kl-gradients", caption: t("kl.gradients"), head: [t("kl.gradient_of"), ...columns], rows: lines }));
      shapes.render();
      runs.render();
    };
    const kinds = ["categorical", "gaussian"].map((name) => [name, t(`kl.${name}`)]);
    const kind = choice({
      id: "kl-kind", label: t("kl.kind"), options: kinds, value: state.kind,
      change: (value) => {
        state.kind = value;
        build();
        update();
      },
    });
    const again = button("kl-again", t("kl.again"), () => {
      state.seed += 1;
      update();
    });
    build();
    root.append(
      kind, controls, shapes.node, legend([["accent", t("kl.policy")], ["quiet", t("kl.reference")]]), el("h3", {}, t("kl.runs_title")),
      runs.node, legend([["against", "k1"], ["quiet thick", "k2"], ["accent", "k3"], ["ink dashed", t("kl.exact")]]),
      el("div.buttons", {}, again), numbers, el("h3", {}, t("kl.gradients_title")), el("p", { html: t("kl.gradients_text") }), slopes,
    );
    update();
  },
);
