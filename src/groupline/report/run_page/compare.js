// 10. What the runs' settings are, and in which they differ.
"use strict";
const PLANNED = ["model", "device", "objective", "reference", "rewards", "held out"];
section("settings", { all: false }, (root, state) => {
  const runs = shown();
  const flat = runs.map((run) => run.config);
  const keys = [...new Set(flat.flatMap((c) => Object.keys(c)))];
  const text = (config, key) => (key in config ? JSON.stringify(config[key]) : "–");
  const differ = keys.filter((key) => new Set(flat.map((c) => text(c, key))).size > 1);
  const lead = document.getElementById("settings-lead");
  if (!keys.length) {
    lead.textContent = "No config.yaml was found beside the run.";
    fill(root);
    return;
  }
  lead.textContent = several()
    ? `${differ.length} of ${keys.length} settings differ between the runs shown.`
    : "Of this run. With several, groupline report RUN RUN, their curves are laid over one another and the differences stand here.";
  const told = several() ? PLANNED.filter((k) => new Set(runs.map((run) => run.plan[k])).size > 1) : [];
  const rows = several() && !state.all ? differ : keys;
  const made = pagedTable({
    id: "config", caption: several() && !state.all ? "Settings that differ" : "All settings", what: "settings", count: rows.length + told.length, size: 20,
    head: ["setting", ...runs.map((run) => plain(run.label))],
    row: (i) => (i < rows.length
      ? [rows[i], ...flat.map((c) => el("code.long", {}, text(c, rows[i])))]
      : [`plan: ${told[i - rows.length]}`, ...runs.map((run) => el("span.long", {}, run.plan[told[i - rows.length]] ?? "–"))]),
  });
  const more = several() ? button("config-all", state.all ? "Only those that differ" : "All settings", () => {
    state.all = !state.all;
    redraw("settings");
    document.getElementById("config-all").focus();
  }) : null;
  const plans = several() ? [] : PLANNED.filter((k) => runs[0].plan[k]).map((k) => pair(k, runs[0].plan[k]));
  fill(root, plans.length ? el("dl.plan", {}, plans) : null, made, more);
});
