// 1. The verdict of each run: how it stands, the first bad step, what to do; and the few numbers to look at first.
"use strict";
const SAID = { healthy: "healthy", watch: "to be watched", broken: "broken" };
const SIGN = { healthy: "✓", watch: "!", broken: "✕" };
const STATUS = {
  finished: "finished", interrupted: "interrupted, its model saved", failed: "stopped by an error", going: "no end written yet: it is running, or was killed",
};
const RULED = { grpo: true, ppo: true };

section("verdict", {}, (root) => {
  fill(root, el("div.runs", {}, shown().map(card)));
});

function card(run) {
  const first = run.alarms[0];
  const why = {
    healthy: RULED[run.kind]
      ? `No alarm was raised in ${run.steps} steps.`
      : `Nothing was raised in ${run.steps} updates. In this kind of run the alarms can tell only a loss that is not finite.`,
  }[run.verdict] ?? reasons(run);
  const box = el(
    `article.run.${run.verdict}`, { "aria-label": run.label },
    el("header", {}, el("span.badge", {}, el("span", { "aria-hidden": "true" }, `${SIGN[run.verdict]} `), SAID[run.verdict]),
      el("h3", {}, several() ? svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, svg("path", { d: "M1,6H21", class: `line thick ${colour(run)}` })) : null, run.label)),
    el("p.why", {}, run.steps ? why : "No step is written yet."),
    first ? el("p", {}, `First at step ${first.step}. What to do: ${first.advice}`) : null,
    el("p.note", {}, `${progress(run)}; ${STATUS[run.status]}${run.error ? `: ${run.error}` : ""}.`),
    el("div.facts", {}, firstLook(run).map(([name, value, note]) => fact(null, plain(name), value, note))),
    run.alarms.length ? alarms(run) : null,
  );
  return box;
}

const progress = (run) => `${run.steps}${run.steps_planned ? ` of ${run.steps_planned}` : ""} steps${duration2(run)}`;
const duration2 = (run) => {
  const seconds = (run.columns.seconds ?? []).at(-1);
  return seconds ? ` in ${duration(seconds)} of training` : "";
};

function reasons(run) {
  const names = [...new Set(run.alarms.map((a) => a.name))];
  const worst = run.alarms.find((a) => a.level === run.verdict);
  const others = names.filter((name) => name !== worst.name);
  return `${worst.name}, from step ${worst.step}: ${worst.evidence}.${others.length ? ` Also: ${others.join("; ")}.` : ""}`;
}

/** [name, value]: of what the run has. */
function firstLook(run) {
  const found = [];
  const n = Math.max(1, Math.min(10, Math.floor((run.columns.step ?? []).length / 2)));
  const change = (name, key, write) => {
    const [a, b] = [mean(run, key, 0, n), mean(run, key, -n)];
    if (a !== null && b !== null) found.push([name, `${write(a)} → ${write(b)}`]);
  };
  const [before, after] = [run.evals[0], run.evals.at(-1)];
  for (const k of after ? Object.keys(after.pass).filter((k, i, all) => i === 0 || i === all.length - 1) : []) {
    const was = before !== after && before.pass[k] ? `${percent(before.pass[k][0])} → ` : "";
    found.push([`held-out pass@${k}`, was + percent(after.pass[k][0])]);
  }
  change("groups with signal", "frac_groups_with_signal", (v) => percent(v, 0));
  change("reward", "reward", short);
  change("right in training", "accuracy", (v) => percent(v, 0));
  change("tokens an answer", "completions/mean_length", (v) => short(v, 3));
  change("cut at the limit", "completions/clipped_ratio", (v) => percent(v, 0));
  if (!RULED[run.kind]) {
    change("loss", "loss", short);
    for (const key of ["rewards/accuracies", "accuracy"]) if (key in run.columns) change("pairs right", key, (v) => percent(v, 0));
  }
  return found;
}

function alarms(run) {
  const seen = (a) => run.groups.list.find((g) => g.source === "train" && g.step === a.step);
  return pagedTable({
    id: `alarms-${view.runs.indexOf(run)}`, caption: "Alarms, in order", what: "alarms", size: 10, count: run.alarms.length,
    head: ["alarm", "step", "level", "evidence", "what to do", "answers"],
    row: (i) => {
      const a = run.alarms[i];
      const group = seen(a);
      return [a.name, a.step, a.level, el("span.long", {}, a.evidence), el("span.long", {}, a.advice), group ? el("a", { href: link(run, group) }, "look") : "–"];
    },
  });
}
