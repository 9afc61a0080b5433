// Small pieces that every section is made of: elements, numbers, sliders, choices, tables.
"use strict";
let language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";

/** The text of a key in the page's language, {names} replaced. */
function t(key, values = {}) {
  const text = STRINGS[language][key];
  if (text === undefined) throw new Error(`no text for ${key} in ${language}`);
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
}

/** A number for reading: fixed digits, a real minus sign, no negative zero. */
function fmt(value, digits = 3) {
  if (value === null || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const text = value.toFixed(digits);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}
const signed = (value, digits = 3) => (Number(value.toFixed(digits)) > 0 ? "+" : "") + fmt(value, digits);
const percent = (value, digits = 1) => `${fmt(100 * value, digits)}%`;

/** An element: el("p.note", {id: "x"}, child, "text"). Texts of the page's own strings may hold markup: {html: ...}. */
function el(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const made = document.createElement(tag || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "html") made.innerHTML = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** A labelled slider. `show` turns its value into words, read aloud too. Returns {node, set}. */
function slider({ id, label, min, max, step = 1, value, show = (x) => fmt(x, 0), change }) {
  const output = el("output", { id: `${id}-value`, for: id });
  const input = el("input", { type: "range", id, min, max, step });
  const set = (x) => {
    input.value = x;
    output.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  input.addEventListener("input", () => {
    set(input.value);
    change(Number(input.value));
  });
  set(value);
  const node = el("div.slider", {}, el("label", { for: id, html: label }), output, input);
  return { node, input, set };
}

/** One of several, as radio buttons in a group. options: [[value, words]]. */
function choice({ id, label, options, value, change }) {
  const buttons = options.map(([name, words]) => {
    const input = el("input", { type: "radio", name: id, id: `${id}-${name}`, value: name, checked: name === value });
    input.addEventListener("change", () => change(name));
    return el("label.option", { for: `${id}-${name}` }, input, el("span", { html: words }));
  });
  return el("fieldset.choice", { id }, el("legend", { html: label }), el("div.options", {}, buttons));
}

const button = (id, words, click, kind = "button.plain") => el(kind, { id, type: "button", onclick: click }, words);

/** A table with a caption, column heads and row heads. rows: [[head, cell, ...]]; a cell may be an element. What is too
    wide for a phone scrolls sideways under its row heads, by keyboard too. */
function table({ id, caption, head, rows }) {
  const cell = (value, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, value);
  const named = { "aria-labelledby": `${id}-caption` };
  const body = el(
    "table", { id, ...named },
    el("thead", {}, el("tr", {}, head.map((words) => el("th", { scope: "col", html: words })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))),
  );
  const scroll = el("div.scroll", { tabindex: 0, role: "region", ...named }, body);
  return el("div.table", {}, el("p.caption", { id: `${id}-caption` }, caption), scroll);
}

/** A figure's numbers as a table that opens on request: its alternative in text. */
function dataTable(id, head, rows) {
  const inner = table({ id: `${id}-data`, caption: t("ui.data"), head, rows });
  return el("details.data", {}, el("summary", {}, t("ui.as_table")), inner);
}

/** A number with its name, large. */
const fact = (id, label, value, note = "") =>
  el("div.fact", {}, el("span.name", { html: label }), el("strong", { id }, value), note ? el("span.note", { html: note }) : null);

/** Replaces what an element holds; a table of data that was open stays open. */
function fill(node, ...children) {
  const open = [...node.querySelectorAll("details[open] [id]")].map((x) => x.id);
  node.replaceChildren(...children.flat().filter(Boolean));
  for (const id of open) node.querySelector(`#${CSS.escape(id)}`)?.closest("details")?.setAttribute("open", "");
}

/** Numbers typed by hand: any separator; {values} or {bad}, the first piece that is no number. */
function readNumbers(text) {
  const pieces = text.replace(/[−–]/g, "-").split(/[\s,;，、；]+/).filter(Boolean);
  const bad = pieces.find((piece) => !Number.isFinite(Number(piece)));
  return bad === undefined ? { values: pieces.map(Number) } : { bad };
}

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** A section's figure. mount(root, state) builds it once a language; state outlives a change of language. */
const sections = [];
const section = (id, state, mount) => sections.push({ id, state, mount });
