// 8. The groups whose answers the page holds: filter, search, sort, turn pages, open one.
"use strict";
const PICKS = {
  all: ["all groups", () => true],
  mixed: ["some right, some wrong", (g) => g.right.some(Boolean) && !g.right.every(Boolean)],
  right: ["all right", (g) => g.right.every(Boolean)],
  wrong: ["all wrong", (g) => !g.right.some(Boolean)],
  dead: ["equal rewards: nothing to learn", (g) => new Set(g.reward.filter((r) => r !== null)).size < 2],
  cut: ["an answer cut at the limit", (g) => g.stop.includes("length")],
};
const average = (values) => {
  const known = values.filter((v) => v !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
const tokensOf = (g) => average(g.ids.map((ids) => ids.length));
const rightOf = (g) => g.right.filter(Boolean).length / g.right.length;
const widthOf = (g) => {
  const known = g.reward.filter((r) => r !== null);
  return known.length ? Math.max(...known) - Math.min(...known) : -1;
};
const SORTS = {
  step: ["step", (a, b) => a.step - b.step || a.group - b.group],
  late: ["step, latest first", (a, b) => b.step - a.step || a.group - b.group],
  low: ["lowest mean reward", (a, b) => (average(a.reward) ?? -Infinity) - (average(b.reward) ?? -Infinity)],
  high: ["highest mean reward", (a, b) => (average(b.reward) ?? -Infinity) - (average(a.reward) ?? -Infinity)],
  spread: ["widest rewards", (a, b) => widthOf(b) - widthOf(a)],
  long: ["longest answers", (a, b) => tokensOf(b) - tokensOf(a)],
};
const SOURCES = { train: "training", held_out: "held out" };
const samples = { run: null, source: "all", pick: "all", sort: "step", words: "", open: null, answer: null, order: "number", tint: "logprob", found: [], pages: null };

const many = (count) => count.toLocaleString("en");
const promptText = (prompt) => (typeof prompt === "string" ? prompt : prompt.map((m) => m.content).join("\n"));
const keyOf = (g) => `${g.source}/${g.step}/${g.group}`;
const link = (run, g, answer = null) => `#at/${encodeURIComponent(run.label)}/${keyOf(g)}${answer === null ? "" : `/${answer}`}`;

/** Lower-case text of a group, made once, that a search looks through. */
function hay(run, g) {
  if (!g.hay) {
    const problem = run.problems[g.problem];
    g.hay = [problem.id, promptText(problem.prompt), problem.gold, ...g.texts].join("\n").toLowerCase();
  }
  return g.hay;
}

function lookUp(run) {
  const words = samples.words.toLowerCase().trim();
  samples.found = run.groups.list
    .filter((g) => (samples.source === "all" || g.source === samples.source) && PICKS[samples.pick][1](g) && (!words || hay(run, g).includes(words)))
    .sort(SORTS[samples.sort][1]);
}

const sampleRun = () => {
  const having = shown().filter((run) => run.groups.list.length);
  return having.find((run) => run.id === samples.run) ?? having[0];
};

section("samples", samples, (root) => {
  const run = sampleRun();
  if (!run) {
    const told = shown().some((r) => r.groups.answers);
    fill(root, el("p.note", {}, told
      ? "The page was made without answers (--rollouts 0, or a limit below one group); the run has them in rollouts.jsonl."
      : "No answers are written: the run samples none, it has made no step yet, or log_rollouts is false."));
    return;
  }
  samples.run = run.id;
  const select = (id, words, options, value, change) => {
    const node = el("select", { id }, Object.entries(options).map(([name, [text]]) => el("option", { value: name, selected: name === value }, text)));
    node.addEventListener("change", () => change(node.value));
    return el("label.select", { for: id }, words, node);
  };
  const having = shown().filter((r) => r.groups.list.length);
  const set = (name) => (value) => {
    samples[name] = value;
    list();
  };
  const search = el("input", { type: "search", id: "search", value: samples.words, placeholder: "in prompts and answers", autocomplete: "off", spellcheck: "false" });
  search.addEventListener("input", () => set("words")(search.value));
  const found = el("p.note", { id: "found", role: "status" });
  const hold = el("div");
  const pages = pager({ id: "groups", what: "groups", size: 8, show: (from, to) => fill(hold, groupTable(run, samples.found.slice(from, to))) });
  samples.pages = pages;
  const list = () => {
    lookUp(run);
    found.textContent = `${many(samples.found.length)} of the ${many(run.groups.list.length)} groups in the page.`;
    pages.set(samples.found.length);
  };
  const sources = { all: ["training and held out"], train: ["training"], held_out: ["held out"] };
  const { answers, groups, shown_answers: here } = run.groups;
  fill(
    root,
    el("p.note", { id: "left-out" }, here < answers
      ? [`The page holds ${many(run.groups.list.length)} of the run’s ${many(groups)} groups: ${many(here)} of ${many(answers)} answers, spread over its steps; ${many(answers - here)} are left out. `,
        el("code", {}, "--rollouts N"), ` takes more: the limit was ${many(run.groups.limit)} answers, and a kilobyte of page for each. All are in rollouts.jsonl and held_out.jsonl.`]
      : `The page holds all ${many(here)} answers of the run.`),
    el("div.find", {},
      having.length > 1 ? select("sample-run", "Run ", Object.fromEntries(having.map((r) => [r.id, [r.label]])), run.id, (id) => {
        samples.run = id;
        samples.open = samples.answer = null;
        redraw("samples");
        document.getElementById("sample-run").focus();
      }) : null,
      el("label.select", { for: "search" }, "Search ", search),
      select("source", "From ", sources, samples.source, set("source")),
      select("pick", "Show ", PICKS, samples.pick, set("pick")),
      select("sort", "Sort by ", SORTS, samples.sort, set("sort"))),
    found, hold, pages.node, el("div", { id: "group" }),
  );
  list();
  if (!samples.open || !run.groups.list.some((g) => keyOf(g) === samples.open)) samples.open = samples.found[0] ? keyOf(samples.found[0]) : null;
  showGroup(run);
});

function groupTable(run, groups) {
  return table({
    id: "group-list", caption: "Groups", head: ["prompt", "step", "from", "right", "mean reward", "lowest to highest", "tokens", "cut"],
    rows: groups.map((g) => {
      const known = g.reward.filter((r) => r !== null);
      const words = promptText(run.problems[g.problem].prompt).replace(/\s+/g, " ").trim();
      const tail = typeof run.problems[g.problem].prompt === "string" ? words : (run.problems[g.problem].prompt.at(-1)?.content ?? "").replace(/\s+/g, " ");
      const open = el("button.row-open", { type: "button", dir: "auto", "aria-current": keyOf(g) === samples.open ? "true" : null, "data-key": keyOf(g), onclick: () => openGroup(run, g, true) }, cut(tail || "(empty prompt)", 70));
      return [open, g.step, SOURCES[g.source], `${g.right.filter(Boolean).length} of ${g.right.length}`, short(average(g.reward)), known.length ? `${short(Math.min(...known))} to ${short(Math.max(...known))}` : "–", short(tokensOf(g)), g.stop.filter((s) => s === "length").length || "–"];
    }),
  });
}

/** The beginning of a text, whole characters. */
function cut(text, length) {
  const letters = [...text];
  return letters.length > length ? `${letters.slice(0, length - 1).join("")}…` : text;
}

/** Open a group; the address names it. */
function openGroup(run, g, focus, answer = null) {
  samples.open = keyOf(g);
  samples.answer = answer;
  history.replaceState(null, "", link(run, g, answer));
  for (const node of document.querySelectorAll(".row-open")) node.toggleAttribute("aria-current", node.dataset.key === samples.open);
  showGroup(run);
  if (focus) document.getElementById("group-title")?.focus();
}

/** The group before or after in the list as it is filtered and sorted. */
function turnGroup(run, by) {
  const at = samples.found.findIndex((g) => keyOf(g) === samples.open);
  const to = at < 0 ? 0 : at + by;
  if (!samples.found[to]) return;
  samples.pages.showing(to);
  openGroup(run, samples.found[to], true);
}

/** Goes where the address says: #at/run/source/step/group[/answer]. Returns whether it names a group here. */
function followAddress() {
  const [at, label, source, step, group, answer] = location.hash.slice(1).split("/");
  if (at !== "at") return false;
  const run = shown().find((r) => r.label === decodeURIComponent(label ?? ""));
  const g = run?.groups.list.find((one) => keyOf(one) === `${source}/${step}/${group}`);
  if (!g) return false;
  if (keyOf(g) === samples.open && run.id === samples.run && (answer ?? null) === (samples.answer === null ? null : String(samples.answer))) return true;
  Object.assign(samples, { run: run.id, open: keyOf(g), answer: answer === undefined ? null : Number(answer) });
  if (!samples.found.includes(g)) Object.assign(samples, { source: "all", pick: "all", words: "" });
  redraw("samples");
  samples.pages.showing(samples.found.indexOf(g));
  document.getElementById("group").scrollIntoView();
  return true;
}
