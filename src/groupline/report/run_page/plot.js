// Curves over steps: axes with units, a legend that shows the values at the cursor, and the numbers as a table.
"use strict";
const SI = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number of any size, short: 1.25M, 0.0123, 3e−7. */
function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const [unit, letter] = SI.find(([least]) => size >= least * 10) ?? [1, ""];
  if (unit > 1) return minus(Number((value / unit).toPrecision(digits))) + letter;
  if (size && size < 1e-4) return minus(Number(value.toPrecision(2)).toExponential());
  return minus(Number(value.toPrecision(digits)));
}
const wholes = (value) => percent(value, 0);
const share = (value) => (value === null || value === undefined ? "–" : percent(value));

const AXES = {
  step: { name: "step", of: "step", write: (x) => short(x, 6) },
  tokens: { name: "tokens (prompts and answers)", of: "tokens", write: (x) => short(x) },
  seconds: { name: "time in training", of: "seconds", write: duration },
};

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${short(seconds)} s`;
  if (seconds < 7200) return `${short(seconds / 60)} min`;
  return `${short(seconds / 3600)} h`;
}

/** Round ticks of time: in the unit that it is written in. */
function axisTicks(axis, low, high, count) {
  if (axis !== "seconds" || high - low < 120) return ticks(low, high, count);
  const unit = high - low < 7200 ? 60 : 3600;
  return ticks(low / unit, high / unit, count).map((x) => x * unit);
}

/**
 * A chart of curves. series: [{name, kind, points: [[x, y]], band: [[x, low, high]], dots, write}]; a null y is a gap.
 * stacked: areas on one another, for series with the same x. y: the axis' name with its unit; ylim: what it must hold.
 */
function plot({ id, title, y, series, axis = "step", ylim = [], write = short, stacked = false, height = 260 }) {
  const drawn = series.filter((s) => s.points.some(([x, v]) => x !== null && v !== null));
  if (!drawn.length) return null;
  for (const s of drawn) s.points = s.points.filter(([x]) => x !== null);
  const tops = stacked ? stack(drawn) : drawn.map((s) => s.points);
  const xs = [...new Set(drawn.flatMap((s) => s.points.map(([x]) => x)))].sort((a, b) => a - b);
  const values = tops.flatMap((points) => points.map(([, v]) => v)).concat(drawn.flatMap((s) => (s.band ?? []).flatMap(([, a, b]) => [a, b])));
  const range = nice(values.filter((v) => v !== null && v !== undefined), stacked ? [0, ...ylim] : ylim);
  const span = xs.length > 1 ? [Math.min(xs[0], axis === "step" ? xs[0] : 0), xs.at(-1)] : [xs[0] - 1, xs[0] + 1];
  const { name: xName, write: xWrite } = AXES[axis];
  const tick = write === share && range[1] - range[0] >= 0.08 ? wholes : write;
  let at = xs.length - 1;
  let pen = null;
  const nearest = ({ points, dots }, x) => {
    if (x < points[0][0] || (x > points.at(-1)[0] && !dots)) return null; // the run had not begun, or had ended
    let [low, high] = [0, points.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle;
      else high = middle;
    }
    if (points[high][0] === x || (!dots && points[high][0] - x < x - points[low][0])) return points[high];
    return points[points[high][0] < x ? high : low]; // of single points, the one before
  };
  const said = drawn.map((s) => el("span.value"));
  const where = el("span.where");
  const words = () => `${axis === "step" ? "step " : ""}${xWrite(xs[at])}`;
  const picture = chart(id, {
    height,
    label: () => `${title}. ${y}, over ${xName}. ${drawn.map((s) => trend(s, s.write ?? write)).join("; ")}`,
    draw: (p) => {
      pen = p;
      const edge = Math.max(...ticks(...range).map((v) => p.widthOf(tick(v)))) + 12;
      p.frame({
        xs: span, ys: range, xTicks: axisTicks(axis, ...span, p.width < 420 ? 3 : 6), yTicks: ticks(...range), xName, yName: y,
        xWrite, yWrite: tick, edges: { left: Math.max(44, edge), right: 16 },
      });
      drawn.forEach((s, i) => {
        const kind = s.kind;
        if (s.band) for (const part of runsOf(s.band, (b) => b[1] !== null)) p.band(part, kind);
        if (stacked) {
          const base = i ? tops[i - 1] : tops[0].map(([x]) => [x, 0]);
          p.band(tops[i].map(([x, v], j) => [x, base[j][1], v]), `${kind} full`);
          return;
        }
        for (const part of runsOf(s.points, (q) => q[1] !== null)) {
          if (part.length > 1) p.line(part, kind);
          if (s.dots || part.length === 1) part.forEach(([x, v]) => p.dot(x, v, kind, s.dots ? 4.5 : 3));
        }
      });
      cursor();
    },
  });
  let mark = null;
  const cursor = () => {
    mark?.remove();
    if (pen && picture.node.isConnected) mark = pen.line([[xs[at], range[0]], [xs[at], range[1]]], "cursor");
    where.textContent = words();
    drawn.forEach((s, i) => (said[i].textContent = (s.write ?? write)(nearest(s, xs[at])?.[1] ?? null)));
    const root = picture.node.firstChild;
    root.setAttribute("aria-valuenow", at);
    root.setAttribute("aria-valuetext", `${words()}: ${drawn.map((s, i) => `${s.name} ${said[i].textContent}`).join(", ")}`);
  };
  const root = picture.node.firstChild;
  root.setAttribute("role", "slider");
  root.setAttribute("aria-roledescription", "chart");
  root.setAttribute("aria-valuemin", 0);
  root.setAttribute("aria-valuemax", xs.length - 1);
  root.setAttribute("tabindex", 0);
  const move = (to) => {
    at = Math.min(Math.max(to, 0), xs.length - 1);
    cursor();
  };
  root.addEventListener("pointermove", (event) => {
    if (!pen) return;
    const x = pen.xOf(event.clientX - root.getBoundingClientRect().left);
    move(xs.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best), 0));
  });
  root.addEventListener("pointerleave", () => document.activeElement !== root && move(xs.length - 1));
  root.addEventListener("blur", () => move(xs.length - 1));
  root.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(xs.length / 10));
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - far, PageUp: at + far, Home: 0, End: xs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
  const names = drawn.map((s, i) => {
    const sample = svg("svg", { width: 22, height: 12, "aria-hidden": "true" });
    sample.append(stacked ? svg("rect", { x: 1, y: 1, width: 20, height: 10, class: `area ${s.kind} full` }) : svg("path", { d: "M1,6H21", class: `line ${s.kind}` }));
    return el("li", {}, sample, el("span", {}, s.name), said[i]);
  });
  cursor();
  return el(
    "div.plot", { id: `${id}-plot` },
    el("h3", {}, title),
    el("ul.legend.values", {}, el("li", {}, where), names),
    picture.node,
    lazyTable(id, title, [xName, ...drawn.map((s) => s.name)], xs.length, (i) => [
      xWrite(xs[i]), ...drawn.map((s) => (s.write ?? write)(s.points.find(([x]) => x === xs[i])?.[1] ?? null)),
    ]),
  );
}

/** Cumulated values of series with the same x. */
function stack(series) {
  const sums = series[0].points.map(() => 0);
  return series.map((s) => s.points.map(([x, v], i) => [x, (sums[i] += v ?? 0)]));
}

/** Unbroken runs of points. */
function runsOf(points, whole) {
  const found = [[]];
  for (const point of points) {
    if (whole(point)) found.at(-1).push(point);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter((part) => part.length);
}

/** A range that holds all values and `also`, with a little air where nothing bounds it. */
function nice(values, also) {
  let [low, high] = [Infinity, -Infinity];
  for (const v of [...values, ...also]) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low === high) {
    const air = Math.abs(low) * 0.1 || 1;
    return also.includes(low) ? [low, low + air] : [low - air, high + air];
  }
  const air = (high - low) * 0.06;
  return [also.includes(low) || low === 0 ? low : low - air, also.includes(high) ? high : high + air];
}

/** First and last value in words, for readers. */
function trend(s, write) {
  const known = s.points.filter(([, v]) => v !== null);
  return `${s.name}: ${write(known[0][1])} first, ${write(known.at(-1)[1])} last`;
}
Pen.prototype.band = function (rows, kind) {
  const path = [...rows.map(([x, , high]) => [x, high]), ...rows.map(([x, low]) => [x, low]).reverse()];
  const at = path.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`);
  return this.add("path", { d: `${at.join("")}Z`, class: `area ${kind}` });
};
