// Charts as SVG, drawn at the width they are shown in, so that text keeps its size on a phone.
"use strict";
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A chart that redraws itself when its width changes. draw(pen) is called with a Pen; label() is its text for readers. */
function chart(id, { height = 240, label, draw, drag = null }) {
  const picture = svg("svg", { id, role: "img", height });
  const node = el("div.chart", {}, picture);
  let pen = null;
  const render = () => {
    const width = node.clientWidth;
    if (!width) return;
    picture.replaceChildren();
    picture.setAttribute("width", width);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("aria-label", label());
    pen = new Pen(picture, width, height);
    draw(pen);
  };
  new ResizeObserver(render).observe(node);
  if (drag) {
    picture.classList.add("draggable");
    const move = (event) => {
      const box = picture.getBoundingClientRect();
      drag(pen.xOf(event.clientX - box.left), pen.yOf(event.clientY - box.top), event.type === "pointerdown");
    };
    picture.addEventListener("pointerdown", (event) => {
      picture.setPointerCapture(event.pointerId);
      move(event);
    });
    picture.addEventListener("pointermove", (event) => {
      if (picture.hasPointerCapture(event.pointerId)) move(event);
    });
  }
  return { node, render };
}

const minus = (value) => String(value).replace("-", "−");

/** Draws in units of the data once `frame` has set the axes. */
class Pen {
  constructor(root, width, height) {
    Object.assign(this, { root, width, height, left: 44, right: 12, top: 30, bottom: 38 });
  }

  add(tag, attributes, ...children) {
    const made = svg(tag, attributes, ...children);
    this.root.append(made);
    return made;
  }

  x(value) {
    const [low, high] = this.xs;
    return this.left + ((value - low) / (high - low)) * (this.width - this.left - this.right);
  }

  y(value) {
    const [low, high] = this.ys;
    return this.height - this.bottom - ((value - low) / (high - low)) * (this.height - this.top - this.bottom);
  }

  xOf(pixel) {
    return this.xs[0] + ((pixel - this.left) / (this.width - this.left - this.right)) * (this.xs[1] - this.xs[0]);
  }

  yOf(pixel) {
    const span = this.height - this.top - this.bottom;
    return this.ys[0] + ((this.height - this.bottom - pixel) / span) * (this.ys[1] - this.ys[0]);
  }

  /** Axes. xs, ys: [low, high]; xTicks, yTicks: where; names of both axes; how to write a tick. */
  frame({ xs, ys, xTicks = [], yTicks = [], xName = "", yName = "", xWrite = minus, yWrite = minus, edges = {} }) {
    Object.assign(this, { xs, ys }, edges);
    for (const at of yTicks) {
      this.line([[xs[0], at], [xs[1], at]], at === 0 ? "axis" : "grid");
      this.add("text", { x: this.left - 6, y: this.y(at) + 4, class: "tick end" }, yWrite(at));
    }
    for (const at of xTicks) {
      const edge = at === xs[1] && this.right < 20 ? "tick end" : "tick middle";
      const x = edge === "tick end" ? this.x(at) + this.right - 2 : this.x(at);
      this.add("text", { x, y: this.height - this.bottom + 16, class: edge }, xWrite(at));
    }
    if (xName) this.add("text", { x: (this.left + this.width - this.right) / 2, y: this.height - 4, class: "name middle" }, xName);
    if (yName) this.add("text", { x: 2, y: 11, class: "name" }, yName);
  }

  line(points, kind) {
    const path = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("");
    return this.add("path", { d: path, class: `line ${kind}` });
  }

  area(points, base, kind) {
    const ends = [[points.at(-1)[0], base], [points[0][0], base]];
    const path = [...points, ...ends].map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`);
    return this.add("path", { d: `${path.join("")}Z`, class: `area ${kind}` });
  }

  /** A bar from y = base to y = value, between two x. */
  bar(x0, x1, value, kind, base = 0) {
    const [high, low] = [this.y(Math.max(value, base)), this.y(Math.min(value, base))];
    const [left, right] = [this.x(x0), this.x(x1)];
    return this.add("rect", {
      x: left, y: high, width: Math.max(right - left, 0), height: Math.max(low - high, 1), rx: 2, class: `bar ${kind}`,
    });
  }

  dot(x, y, kind = "", radius = 6) {
    return this.add("circle", { cx: this.x(x), cy: this.y(y), r: radius, class: `dot ${kind}` });
  }

  /** Pixels that a label takes in the reader's font. */
  widthOf(words) {
    const trial = this.add("text", { class: "label" }, words);
    const width = trial.getComputedTextLength();
    trial.remove();
    return width;
  }

  text(x, y, words, kind = "middle", dx = 0, dy = 0) {
    return this.add("text", { x: this.x(x) + dx, y: this.y(y) + dy, class: `label ${kind}` }, words);
  }
}

/** Names of a chart's lines. entries: [kind, words]. */
const legend = (entries) =>
  el("ul.legend", {}, entries.map(([kind, words]) => {
    const sample = svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, svg("path", { d: "M1,5H25", class: `line ${kind}` }));
    return el("li", {}, sample, el("span", { html: words }));
  }));

/** Round numbers that divide low..high into about `count` parts. */
function ticks(low, high, count = 4) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toFixed(10)) || 0);
  return found;
}
