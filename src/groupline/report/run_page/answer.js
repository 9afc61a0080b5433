// One group: its prompt, its answers side by side, and the same prompt at other steps.
"use strict";
const LONG = 700; // characters of an answer shown at once
const ORDERS = {
  number: ["as sampled", () => 0],
  best: ["highest reward", (g) => (a, b) => (g.reward[b] ?? -Infinity) - (g.reward[a] ?? -Infinity)],
  worst: ["lowest reward", (g) => (a, b) => (g.reward[a] ?? Infinity) - (g.reward[b] ?? Infinity)],
  long: ["longest", (g) => (a, b) => g.ids[b].length - g.ids[a].length],
};

function showGroup(run) {
  const root = document.getElementById("group");
  const g = run.groups.list.find((one) => keyOf(one) === samples.open);
  if (!g) {
    fill(root, el("p.note", {}, "No group fits. Take a filter away."));
    return;
  }
  const problem = run.problems[g.problem];
  const known = g.reward.filter((r) => r !== null);
  const m = average(g.reward);
  const std = known.length > 1 ? Math.sqrt(known.reduce((sum, r) => sum + (r - m) ** 2, 0) / (known.length - 1)) : null;
  const order = el("select", { id: "order" }, Object.entries(ORDERS).map(([name, [words]]) => el("option", { value: name, selected: name === samples.order }, words)));
  const answers = el("div.answers", { role: "list", "aria-label": "Answers" });
  const draw = () => {
    const places = g.texts.map((_, i) => i).sort(samples.order === "number" ? undefined : ORDERS[samples.order][1](g));
    answers.replaceChildren(...places.map((i) => answerCard(run, g, i)));
  };
  order.addEventListener("change", () => {
    samples.order = order.value;
    draw();
  });
  draw();
  const at = samples.found.indexOf(g);
  const turn = (id, words, by) => el("button.plain", { id, type: "button", disabled: !samples.found[at + by] || at < 0, onclick: () => turnGroup(run, by) }, words);
  fill(
    root,
    el("div.group-head", {},
      el("h3", { id: "group-title", tabindex: -1 }, `${g.source === "train" ? "Training" : "Held out"}, step ${g.step}, group ${g.group}`),
      el("div.buttons", {}, turn("group-back", "← Previous (p)", -1), turn("group-next", "Next (n) →", 1), el("a.permalink", { href: link(run, g), id: "permalink" }, "Link to this group"))),
    promptBox(problem),
    el("dl.numbers", {},
      pair("gold answer", el("bdi", {}, problem.gold === "" ? "–" : cut(problem.gold, 120))), pair("problem", el("bdi", {}, problem.id || "–")),
      pair("right", `${g.right.filter(Boolean).length} of ${g.right.length}`), pair("mean reward", short(m)), pair("standard deviation", short(std)),
      g.version === null ? null : pair("drawn by weights", `version ${g.version}`)),
    PICKS.dead[1](g) && g.source === "train" ? el("p.note", {}, "All rewards are equal, so every advantage is 0 and the group teaches nothing.") : null,
    elsewhere(run, g),
    el("label.select", { for: "order" }, "Order of the answers ", order),
    answers, el("div", { id: "tokens" }),
  );
  if (samples.answer !== null && g.texts[samples.answer] !== undefined) showTokens(run, g, samples.answer, false);
}

const pair = (name, value) => el("div.pair", {}, el("dt", {}, name), el("dd", {}, value));

function promptBox(problem) {
  const messages = typeof problem.prompt === "string" ? [{ role: "prompt", content: problem.prompt }] : problem.prompt;
  return el("div.prompt", {}, messages.map((m) => el("div.message", {}, el("span.name", {}, m.role ?? "message"), longText(String(m.content ?? "")))));
}

/** A text as it was written, in its own direction, its rest behind a button. */
function longText(text) {
  const node = el("div.text", { dir: "auto" }, cut(text, LONG));
  const more = [...text].length - LONG;
  if (more <= 0) return node;
  const whole = el("button.plain", { type: "button" }, `All of it: ${more.toLocaleString("en")} more characters`);
  whole.addEventListener("click", () => {
    node.textContent = text;
    whole.remove();
    node.tabIndex = -1;
    node.focus();
  });
  return el("div", {}, node, whole);
}

function answerCard(run, g, i) {
  const right = g.right[i];
  const advantage = g.advantage[i];
  const told = g.extras?.[i] && Object.keys(g.extras[i]).length ? Object.entries(g.extras[i]).map(([k, v]) => pair(k, el("bdi", {}, cut(typeof v === "string" ? v : JSON.stringify(v), 80)))) : [];
  const open = samples.answer === i;
  return el(
    `article.answer${right ? "" : ".worse"}`, { role: "listitem", "aria-label": `Answer ${i}, ${right ? "right" : "wrong"}` },
    el("header", {}, el("strong", {}, `Answer ${i}`), el(`span.mark${right ? "" : ".no"}`, {}, right ? "✓ right" : "✕ wrong")),
    longText(g.texts[i] === "" ? "(empty)" : g.texts[i]),
    el("dl.numbers", {},
      pair("reward", short(g.reward[i], 4)), run.reward_names.map((name, k) => pair(name, short(g.rewards[i][k]))),
      pair("advantage", advantage === null ? "–" : el(`span.${advantage < 0 ? "down" : "up"}`, {}, signed(advantage, 2))),
      pair("tokens", g.ids[i].length), pair("ended", { stop: "by itself", length: "cut at the limit" }[g.stop[i]] ?? g.stop[i] ?? "–"), told),
    g.ids[i].length ? el("button.plain", { type: "button", id: `open-${i}`, "aria-expanded": String(open), "aria-controls": "tokens", onclick: () => {
      const close = samples.answer === i;
      samples.answer = close ? null : i;
      history.replaceState(null, "", link(run, g, samples.answer));
      for (const node of document.querySelectorAll("#group [aria-controls=tokens]")) node.setAttribute("aria-expanded", String(node.id === `open-${samples.answer}`));
      if (close) fill(document.getElementById("tokens"));
      else showTokens(run, g, i, true);
    } }, "Token by token") : null,
  );
}

/** Buttons to the same prompt at other steps, of this run and of others shown. */
function elsewhere(run, g) {
  const id = run.problems[g.problem].id;
  const words = promptText(run.problems[g.problem].prompt);
  const found = shown().flatMap((r) => r.groups.list.filter((other) => other.source === g.source && r.problems[other.problem].id === id && promptText(r.problems[other.problem].prompt) === words).map((other) => [r, other]));
  if (found.length < 2) return el("p.note", {}, "The page holds this prompt at no other step.");
  return el("div.elsewhere", { role: "group", "aria-label": "The same prompt at another step" }, el("span.name", {}, "The same prompt at"), found.map(([r, other]) => el(
    "button.plain", { type: "button", "aria-pressed": String(r === run && other === g), onclick: () => {
      if (r !== run) {
        Object.assign(samples, { run: r.id, open: keyOf(other), answer: null });
        redraw("samples");
      }
      openGroup(r, other, true);
    } }, `${several() ? `${r.label}, ` : ""}step ${other.step}: ${other.right.filter(Boolean).length} of ${other.right.length} right`,
  )));
}

document.addEventListener("keydown", (event) => {
  const inside = document.activeElement?.closest("#samples") && !document.activeElement.matches("input, select, textarea");
  if (!inside || event.ctrlKey || event.metaKey || event.altKey || !["n", "p"].includes(event.key)) return;
  event.preventDefault();
  turnGroup(sampleRun(), event.key === "n" ? 1 : -1);
});
