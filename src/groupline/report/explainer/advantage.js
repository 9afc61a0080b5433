// (1) Rewards of a group become advantages; and how often a group carries no signal.
"use strict";
section(
  "advantage",
  { texts: ["1, 1, 0, 0", "1, 0, 0, 0"], baseline: "mean", scale: "group", ddof: "1", p: 0.3, size: 8 },
  (root, state) => {
    const presets = {
      half: "1, 1, 0, 0",
      parts: "1.5, 0.3, 0.5, 1.5, 0.3, 0, 0.3, 0.5",
      one: "1, 0, 0, 0",
      dead: "1, 1, 1, 1",
    };
    let groups = state.texts.map((text) => readNumbers(text).values);
    const inputs = [0, 1].map((i) => {
      const id = `rewards-${i + 1}`;
      const input = el("input", { type: "text", id, inputmode: "text", autocomplete: "off", spellcheck: "false" });
      input.value = state.texts[i];
      const problem = el("p.problem", { id: `${id}-problem`, role: "alert" });
      const read = () => {
        const { values, bad } = readNumbers(input.value);
        const wrong = bad !== undefined ? t("advantage.bad_number", { bad }) : t("advantage.bad_count", { n: values?.length });
        const usable = bad === undefined && values.length >= 2 && values.length <= 16;
        problem.textContent = usable ? "" : wrong;
        input.setAttribute("aria-invalid", String(!usable));
        if (!usable) return;
        state.texts[i] = input.value;
        groups[i] = values;
        update();
      };
      input.addEventListener("input", read);
      input.setAttribute("aria-describedby", problem.id);
      const node = el("div.field", {}, el("label", { for: id }, t("advantage.rewards_of", { n: i + 1 })), input, problem);
      return { node, input, read };
    });
    const tries = Object.entries(presets).map(([name, text]) =>
      button(`preset-${name}`, t(`advantage.preset_${name}`), () => {
        inputs[0].input.value = text;
        inputs[0].read();
      }),
    );
    const pick = (name) => (value) => {
      state[name] = value;
      update();
    };
    const options = (name, values) => values.map((v) => [v, t(`advantage.${name}_${v}`)]);
    const choose = (name, values) =>
      choice({ id: name, label: t(`advantage.${name}`), options: options(name, values), value: state[name], change: pick(name) });

    const places = () => {
      let at = 0;
      return groups.map((g, i) => g.map(() => at++ + i)); // one place free between the groups
    };
    const advantages = () => math.groupAdvantages(groups, { ...state, ddof: Number(state.ddof) });
    const frame = (pen, values, name) => {
      const all = values.flat();
      const low = Math.min(0, ...all);
      const high = Math.max(0, ...all);
      const pad = (high - low || 1) * 0.16;
      const ys = [low < 0 ? low - pad : 0, high + pad];
      pen.bottom = 24;
      pen.frame({ xs: [-0.2, all.length + 1.2], ys, yTicks: ticks(ys[0], ys[1], 5), yName: name });
    };
    const bars = (pen, values, kinds) => {
      const room = pen.x(1) - pen.x(0) - 4;
      const digits = [2, 1].find((d) => values.flat().every((v) => pen.widthOf(fmt(v, d)) < room)); // none if none fits
      places().forEach((xs, g) =>
        xs.forEach((x, i) => {
          const value = values[g][i];
          pen.bar(x + 0.14, x + 0.86, value, kinds(g, value));
          if (digits) pen.text(x + 0.5, value, fmt(value, digits), "middle", 0, value < 0 ? 14 : -5);
        }),
      );
    };
    const groupNames = (pen) =>
      places().forEach((xs, g) => {
        const middle = (xs[0] + xs.at(-1) + 1) / 2;
        const words = t(math.allEqual(groups[g]) ? "advantage.dead_group" : "advantage.group", { n: g + 1 });
        pen.add("text", { x: pen.x(middle), y: pen.height - 6, class: "name middle" }, words);
      });
    const rewardChart = chart("reward-chart", {
      height: 185,
      label: () => t("advantage.reward_chart", { rewards: groups.map((g) => g.map((r) => fmt(r, 2)).join(", ")).join("; ") }),
      draw: (pen) => {
        frame(pen, groups, t("advantage.reward"));
        bars(pen, groups, (g) => (math.allEqual(groups[g]) ? "dead" : "quiet"));
        places().forEach((xs, g) => {
          const middle = math.mean(groups[g]);
          pen.line([[xs[0], middle], [xs.at(-1) + 1, middle]], "accent dashed");
        });
        groupNames(pen);
      },
    });
    const advantageChart = chart("advantage-chart", {
      height: 225,
      label: () => t("advantage.advantage_chart", { advantages: advantages().map((g) => g.map((a) => signed(a, 2)).join(", ")).join("; ") }),
      draw: (pen) => {
        const values = advantages();
        frame(pen, values, t("advantage.advantage"));
        bars(pen, values, (g, a) => (math.allEqual(groups[g]) ? "dead" : a < 0 ? "against" : "accent"));
        groupNames(pen);
      },
    });
    const facts = el("div.facts", { "aria-live": "polite" });
    const numbers = el("div");
    const update = () => {
      const ddof = Number(state.ddof);
      const found = groups.flatMap((g, i) => [
        fact(`mean-${i + 1}`, t("advantage.mean_of", { n: i + 1 }), fmt(math.mean(g))),
        fact(`std-${i + 1}`, t("advantage.std_of", { n: i + 1 }), fmt(math.std(g, ddof)), math.allEqual(g) ? t("advantage.no_signal") : ""),
      ]);
      fill(facts, found, fact("std-batch", t("advantage.std_batch"), fmt(math.std(groups.flat(), ddof))));
      const values = advantages();
      const rows = groups.flatMap((g, i) => g.map((r, j) => [`${i + 1}.${j + 1}`, fmt(r), signed(values[i][j], 4)]));
      fill(numbers, dataTable("advantages", [t("advantage.answer"), t("advantage.reward"), t("advantage.advantage")], rows));
      rewardChart.render();
      advantageChart.render();
    };

    const chance = el("div.facts", { "aria-live": "polite" });
    const curve = () => Array.from({ length: 101 }, (_, i) => [i / 100, math.pNoSignal(i / 100, state.size)]);
    const signalChart = chart("signal-chart", {
      height: 200,
      label: () => t("advantage.signal_chart", { p: fmt(state.p, 2), size: state.size, value: percent(math.pNoSignal(state.p, state.size)) }),
      draw: (pen) => {
        pen.frame({
          xs: [0, 1], ys: [0, 1], xTicks: [0, 0.25, 0.5, 0.75, 1], yTicks: [0, 0.5, 1], yWrite: (y) => percent(y, 0),
          xName: t("advantage.p_axis"), yName: t("advantage.signal_axis"),
        });
        pen.area(curve(), 0, "accent");
        pen.line(curve(), "accent");
        pen.dot(state.p, math.pNoSignal(state.p, state.size), "accent");
      },
      drag: (x) => setP(Math.min(1, Math.max(0, x))),
    });
    const signal = () => {
      const value = math.pNoSignal(state.p, state.size);
      fill(chance, fact("no-signal", t("advantage.p_formula"), percent(value)));
      signalChart.render();
    };
    const setP = (value) => {
      state.p = Math.round(value * 100) / 100;
      p.set(state.p);
      signal();
    };
    const p = slider({ id: "p-right", label: t("advantage.p"), min: 0, max: 1, step: 0.01, value: state.p, show: (x) => fmt(x, 2), change: setP });
    const size = slider({
      id: "group-size", label: t("advantage.size"), min: 2, max: 32, value: state.size,
      change: (value) => {
        state.size = value;
        signal();
      },
    });
    root.append(
      el("div.controls", {}, inputs.map((i) => i.node), el("div.buttons", { role: "group", "aria-label": t("advantage.presets") }, tries)),
      el("div.controls.row", {}, choose("baseline", ["mean", "leave_one_out"]), choose("scale", ["group", "batch", "none"]), choose("ddof", ["1", "0"])),
      facts, rewardChart.node, advantageChart.node, numbers,
      el("h3", {}, t("advantage.signal_title")), el("p", { html: t("advantage.signal_text") }),
      el("div.controls.row", {}, p.node, size.node), chance, signalChart.node,
    );
    update();
    signal();
  },
);
