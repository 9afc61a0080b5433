// 4. pass@k of held-out problems, before and after, and over the run.
"use strict";
section("passk", {}, (root) => {
  const runs = shown().filter((run) => run.evals.some((e) => Object.keys(e.pass).length));
  if (!runs.length) {
    const pairs = shown().map(pairsNote).filter(Boolean);
    fill(root, el("p.note", {}, "No held-out problems were sampled: eval_problems is 0, no evaluation has ended yet, or the run is of a kind that measures its loss alone."), pairs);
    return;
  }
  const ks = [...new Set(runs.flatMap((run) => run.evals.flatMap((e) => Object.keys(e.pass))))].map(Number).sort((a, b) => a - b);
  const lines = runs.flatMap((run) => {
    const [before, after] = [run.evals[0], run.evals.at(-1)];
    const row = (e, name, kind) => ({ name, kind, rows: Object.entries(e.pass).map(([k, v]) => [Number(k), ...v]).sort((a, b) => a[0] - b[0]) });
    const who = several() ? `${run.label}, ` : "";
    const last = row(after, `${who}${when(run, after)}`, several() ? colour(run) : "c0");
    return before === after ? [last] : [row(before, `${who}before (step ${before.step})`, several() ? `${colour(run)} dashed` : "quiet"), last];
  });
  const few = runs.every((run) => run.evals.length < 3);
  fill(root, grid(
    passChart(ks, lines),
    few ? null : panel({
      id: "evals", title: "Over the run", y: "share of held-out problems", write: share, ylim: [0, 1], without: "",
      series: (run) => [ks[0], ks.at(-1)].filter((k, i, all) => all.indexOf(k) === i).map((k, i) => ({
        name: `pass@${k}`, kind: `c${i}`, dots: true, points: evalCurve(run, (e) => e.pass[k]?.[0]),
        band: run.evals.filter((e) => e.pass[k]?.[1] !== null && e.pass[k]).map((e) => [e[AXES[view.axis].of], e.pass[k][1], e.pass[k][2]]),
      })),
    }),
  ), ...runs.map((run) => passTable(run)));
});

const when = (run, e) => (run.status === "going" ? `step ${e.step}` : `after (step ${e.step})`);

function passChart(ks, lines) {
  const at = (k) => Math.log2(k);
  const picture = chart("pass-chart", {
    height: 280,
    label: () => `pass@k over k. ${lines.map((l) => `${l.name}: ${l.rows.map(([k, v]) => `pass@${k} ${percent(v)}`).join(", ")}`).join("; ")}`,
    draw: (p) => {
      const span = ks.length > 1 ? [at(ks[0]) - 0.15, at(ks.at(-1)) + 0.15] : [-0.5, 0.5];
      p.frame({ xs: span, ys: [0, 1], xTicks: ks.map(at), xWrite: (x) => String(2 ** x), yTicks: [0, 0.25, 0.5, 0.75, 1], yWrite: (v) => percent(v, 0), xName: "k, answers to a problem", yName: "share of problems", edges: { left: 48, right: 16 } });
      for (const l of lines) {
        const banded = l.rows.filter(([, , low]) => low !== null && low !== undefined);
        if (banded.length) p.band(banded.map(([k, , low, high]) => [at(k), low, high]), l.kind);
      }
      for (const l of lines) {
        if (l.rows.length > 1) p.line(l.rows.map(([k, v]) => [at(k), v]), l.kind);
        l.rows.forEach(([k, v]) => p.dot(at(k), v, l.kind, 4.5));
      }
    },
  });
  return el("div.plot", {}, el("h3", {}, "pass@k"), legend(lines.map((l) => [l.kind, plain(l.name)])), picture.node);
}

function passTable(run) {
  const [before, after] = [run.evals[0], run.evals.at(-1)];
  const cell = (v) => (v ? `${percent(v[0])}${v[1] === null || v[1] === undefined ? "" : ` (${percent(v[1])} to ${percent(v[2])})`}` : "–");
  const both = before !== after;
  const rows = Object.keys(after.pass).map((k) => {
    const [a, b] = [before.pass[k], after.pass[k]];
    return [`pass@${k}`, ...(both ? [cell(a)] : []), cell(b), ...(both ? [a && b ? `${signed(100 * (b[0] - a[0]), 1)}` : "–"] : [])];
  });
  for (const [key, words, write] of [["reward", "reward", short], ["length", "tokens an answer", short], ["truncated", "cut at the limit", share]]) {
    if (after[key] === null || after[key] === undefined) continue;
    rows.push([words, ...(both ? [write(before[key])] : []), write(after[key]), ...(both ? [""] : [])]);
  }
  return table({
    id: `pass-${view.runs.indexOf(run)}`,
    caption: `${several() ? `${run.label}: ` : ""}${after.problems ?? "?"} problems, ${after.samples ?? "?"} answers each; 95% intervals (Wilson) in brackets`,
    head: ["", ...(both ? [`before (step ${before.step})`] : []), when(run, after), ...(both ? ["change, points"] : [])], rows,
  });
}

/** Held-out measures of runs that sample nothing are in their last and first rows alone. */
function pairsNote(run) {
  const key = ["rewards/accuracies", "accuracy"].find((k) => k in run.columns);
  return key && !RULED[run.kind] ? el("p.note", {}, `${several() ? `${run.label}: ` : ""}training pairs right: ${percent(mean(run, key, 0, 10))} in the first ten updates, ${percent(mean(run, key, -10))} in the last. Held-out measures of it are in results.json.`) : null;
}
