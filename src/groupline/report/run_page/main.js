// Puts the page together, and keeps it up to date where a server gives it its data.
"use strict";
const titleOf = () => view.runs.map((run) => run.label).join(" · ") || "No run yet";

/** Draw a section anew; what was typed and opened in it stays in its state. */
function redraw(id) {
  const { mount, state } = sections.find((s) => s.id === id);
  mount(document.querySelector(`#${id} .body`), state);
}

function everything(but = []) {
  document.title = `${titleOf()} – groupline`;
  document.getElementById("title").textContent = titleOf();
  const going = view.runs.some((run) => run.status === "going");
  const last = Math.max(...view.runs.map((run) => run.written));
  document.getElementById("what").textContent = view.runs.length
    ? `${view.runs.map((run) => run.kind.replace("_", " ")).filter((k, i, all) => all.indexOf(k) === i).join(", ")} · last row written ${new Date(last * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}${going && !LIVE ? " · as it stood when this page was made" : ""}`
    : "The page fills when the first run writes its files.";
  document.getElementById("foot").textContent = averages();
  bar();
  for (const { id } of sections) if (!but.includes(id)) redraw(id);
}

function averages() {
  const thinned = view.runs.filter((run) => run.averaged > 1);
  const words = thinned.map((run) => `${run.label}: every point of a curve is the mean of ${run.averaged} steps.`).join(" ");
  return `${words} Made by groupline from the run’s files. Nothing leaves this page.`.trim();
}

function bar() {
  const axis = choice({
    id: "axis", label: "Curves over", value: view.axis, options: [["step", "steps"], ["tokens", "tokens"], ["seconds", "time"]],
    change: (name) => {
      view.axis = name;
      for (const { id } of sections) if (!["samples", "settings", "verdict"].includes(id)) redraw(id);
    },
  });
  const boxes = view.runs.length > 1 ? el("fieldset.choice", { id: "runs" }, el("legend", {}, "Runs"), el("div.options", {}, view.runs.map((run, i) => {
    const input = el("input", { type: "checkbox", id: `run-${i}`, checked: !view.hidden.has(run.id) });
    input.addEventListener("change", () => {
      if (input.checked) view.hidden.delete(run.id);
      else if (shown().length > 1) view.hidden.add(run.id);
      else input.checked = true; // one stays
      for (const { id } of sections) redraw(id);
    });
    const sample = svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, svg("path", { d: "M1,6H21", class: `line thick ${colour(run)}` }));
    return el("label.run-box", { for: `run-${i}` }, input, sample, el("span", {}, run.label));
  }))) : null;
  fill(document.getElementById("bar"), axis, boxes);
}

document.getElementById("contents").append(...[...document.querySelectorAll("main section")].map((part, i) => el(
  "li", {}, el("a", { href: `#${part.id}` }, el("span.count", { "aria-hidden": "true" }, i + 1), el("span", {}, part.querySelector("h2").textContent)),
)));
window.addEventListener("hashchange", followAddress);

async function answer(address) {
  const reply = await fetch(address, { cache: "no-store" });
  if (!reply.ok) throw new Error(`${address}: ${reply.status}`);
  return reply.json();
}

/** Ask for what changed, for ever. What is focused or typed is not taken away: a search or an open token view waits. */
async function follow() {
  const seen = new Map();
  let began = false;
  for (;;) {
    try {
      const { runs } = await answer("runs.json");
      const fresh = runs.filter((run) => !view.hidden.has(run.id) && seen.get(run.id) !== run.changed);
      for (const { id, label, changed } of fresh) {
        const data = { ...await answer(`data.json?run=${encodeURIComponent(id)}`), id, label };
        const at = view.runs.findIndex((run) => run.id === id);
        if (at < 0) view.runs.push(data);
        else view.runs[at] = data;
        seen.set(id, changed);
      }
      document.getElementById("away").textContent = "";
      if (fresh.length || !began) renew();
      else if (stale && !document.activeElement?.closest("#samples")) {
        stale = false;
        redraw("samples");
      }
      if (!began) followAddress();
      began = true;
    } catch (error) {
      document.getElementById("away").textContent = `The server does not answer (${error.message}). What is here is what it last said.`;
    }
    await new Promise((done) => setTimeout(done, LIVE.every * 1000));
  }
}

let stale = false;
/** Everything anew, the focus and an open drawer where they were. */
function renew() {
  const focused = document.activeElement?.id;
  const open = [...document.querySelectorAll("details[open]")].map((node) => node.parentElement.id).filter(Boolean);
  const at = window.scrollY;
  const reading = document.activeElement?.closest("#samples") !== null && samples.run !== null; // who reads is not disturbed
  stale = reading;
  everything(reading ? ["samples"] : []);
  for (const id of open) document.getElementById(id)?.querySelector("details")?.setAttribute("open", "");
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  window.scrollTo({ top: at, behavior: "instant" });
}

if (LIVE) follow();
else {
  view.runs = JSON.parse(document.getElementById("data").textContent);
  everything();
  followAddress();
}
