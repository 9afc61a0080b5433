// What is shown: the runs, which of them, and over which axis.
"use strict";
const view = { runs: [], hidden: new Set(), axis: "step" };
const KINDS = 6; // colours for runs

const shown = () => view.runs.filter((run) => !view.hidden.has(run.id));
const several = () => shown().length > 1;
const colour = (run) => `c${view.runs.indexOf(run) % KINDS}${view.runs.indexOf(run) >= KINDS ? " dashed" : ""}`;

const column = (run, key) => run.columns[key] ?? null;
const xs = (run) => run.columns[AXES[view.axis].of] ?? null;

/** [[x, y]] of a logged series over the chosen axis; none where the run lacks one of the two. */
function curve(run, key, of = (v) => v) {
  const [x, y] = [xs(run), column(run, key)];
  return x && y ? x.map((at, i) => [at, y[i] === null ? null : of(y[i], i)]) : [];
}

/** [[x, y]] of the evaluations. */
const evalCurve = (run, of) => run.evals.map((one) => [one[AXES[view.axis].of], of(one) ?? null]).filter(([x]) => x !== null && x !== undefined);

/** Mean of a logged series over its first or last steps. */
function mean(run, key, from, to) {
  const known = (column(run, key) ?? []).slice(from, to).filter((v) => v !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

/**
 * A panel of curves. series(run): [{name, kind, points, band, dots}]. With one run all are drawn, stacked if asked; with
 * several one of them, which is chosen, a colour a run. without: what to say where no run has any of it.
 */
const picked = {};
function panel({ id, title, y, series, without, ylim, write, stacked = false, height }) {
  const runs = shown().map((run) => [run, series(run).filter((s) => s.points.some(([, v]) => v !== null))]).filter(([, own]) => own.length);
  if (!runs.length) return missing(title, without);
  const options = { id, title, y, axis: view.axis, ylim, write, height };
  if (!several()) return plot({ ...options, series: runs[0][1], stacked });
  const names = [...new Set(runs.flatMap(([, own]) => own.map((s) => s.name)))];
  const name = names.includes(picked[id]) ? picked[id] : names[0];
  const lines = runs.flatMap(([run, own]) => own.filter((s) => s.name === name).map((s) => ({ ...s, band: null, name: run.label, kind: colour(run) })));
  const made = plot({ ...options, title: names.length > 1 ? `${title}: ${name}` : title, series: lines });
  if (names.length === 1) return made;
  const select = el("select", { id: `${id}-series` }, names.map((n) => el("option", { selected: n === name }, n)));
  select.addEventListener("change", () => {
    picked[id] = select.value;
    const fresh = panel({ id, title, y, series, without, ylim, write, stacked, height });
    hold.replaceWith(fresh);
    fresh.querySelector("select").focus();
  });
  const hold = el("div", {}, el("label.select", { for: `${id}-series` }, `${title}: which series `, select), made);
  return hold;
}

const missing = (title, why) => el("div.missing", {}, el("h3", {}, title), el("p.note", {}, why));
