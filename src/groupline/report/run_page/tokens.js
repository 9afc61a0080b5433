// 9. An answer token by token, coloured by what sampler and trainer knew of each.
"use strict";
const MOST = 600; // tokens at once
const TINTS = {
  // name: [words, the value of token k of answer i, how far it shades from 0 to 1, whether it is against, how to write it]
  advantage: ["advantage", (g, i, k) => g.tokens?.[i]?.advantages?.[k] ?? g.advantage[i], (v) => Math.min(1, Math.abs(v) / 2), (v) => v < 0, (v) => signed(v, 3)],
  logprob: ["log-prob", (g, i, k) => g.logprobs[i][k] ?? null, (v) => Math.min(1, -v / 2), () => true, (v) => `${fmt(v, 4)} (p = ${short(Math.exp(v))})`],
  ratio: ["ratio", (g, i, k) => g.tokens?.[i]?.ratio?.[k] ?? null, (v) => Math.min(1, Math.abs(Math.log(v)) / 0.4), (v) => v < 1, (v) => fmt(v, 4)],
  entropy: ["entropy", (g, i, k) => g.tokens?.[i]?.entropy?.[k] ?? null, (v) => Math.min(1, v), () => false, (v) => `${fmt(v, 4)} nats`],
  clipped: ["clipped or masked", clipState, (v) => (v === "trained" ? 0 : 1), (v) => v !== "high", (v) => ({ trained: "no", low: "at the lower bound", high: "at the upper bound", masked: "masked, not in the loss" })[v]],
};

function clipState(g, i, k) {
  const told = g.tokens?.[i];
  if (!told) return null;
  if (!told.trained || told.kept?.[k] === 0) return "masked";
  return ["low", "trained", "high"][(told.clipped?.[k] ?? 0) + 1];
}

/** [text of each token], the bytes of a character given to the token that ends it. */
function pieces(run, ids) {
  const decoder = new TextDecoder();
  const coder = new TextEncoder();
  const known = ids.some((id) => run.vocabulary[id] !== undefined);
  return ids.map((id) => {
    const piece = run.vocabulary[id];
    if (piece === undefined) return known ? "�" : `#${id}`;
    return decoder.decode(typeof piece === "string" ? coder.encode(piece) : new Uint8Array(piece), { stream: true });
  });
}

function showTokens(run, g, i, focus) {
  const root = document.getElementById("tokens");
  const texts = pieces(run, g.ids[i]);
  const has = (name) => g.ids[i].some((_, k) => TINTS[name][1](g, i, k) !== null);
  const lacking = Object.keys(TINTS).filter((name) => !has(name));
  const tint = () => (has(samples.tint) ? samples.tint : Object.keys(TINTS).find(has) ?? "logprob");
  const said = el("p.said", { id: "token-said", "aria-live": "polite" });
  const strip = el("div.strip", { role: "listbox", "aria-label": `Tokens of answer ${i}`, "aria-describedby": "token-help", dir: "auto" });
  let at = 0;
  const tell = (k) => {
    const shownText = texts[k] === "" ? "part of a character" : JSON.stringify(texts[k]);
    const facts = Object.keys(TINTS).filter(has).map((name) => [TINTS[name][0], TINTS[name][1](g, i, k), TINTS[name][4]]);
    said.replaceChildren(el("strong", {}, `Token ${k} `), el("bdi", {}, shownText), ` (id ${g.ids[i][k]}): ${facts.map(([words, v, write]) => `${words} ${v === null ? "–" : write(v)}`).join(" · ")}`);
  };
  const choose = (k, move) => {
    const all = strip.querySelectorAll(".tok");
    strip.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
    strip.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
    at = k;
    const node = all[k % MOST];
    node.setAttribute("aria-selected", "true");
    node.setAttribute("tabindex", 0);
    if (move) node.focus();
    tell(k);
  };
  const pages = pager({
    id: "token-pages", what: "tokens", size: MOST,
    show: (from, to) => {
      const [, value, shade, against, write] = TINTS[tint()];
      const made = [];
      for (let k = from; k < to; k++) {
        const v = value(g, i, k);
        const text = texts[k];
        const node = el(`span.tok${v === null ? ".none" : against(v) ? ".minus" : ""}`, {
          role: "option", tabindex: -1, "aria-selected": "false", title: v === null ? null : `${TINTS[tint()][0]} ${write(v)}`,
          "data-k": k,
        }, text === "" ? "·" : text.replace(/\n/g, "↵\n"));
        if (v !== null) node.style.setProperty("--shade", shade(v).toFixed(3)); // no style attribute: policies forbid it
        made.push(node);
      }
      strip.replaceChildren(...made);
      if (to > from) choose(Math.min(Math.max(at, from), to - 1), false);
    },
  });
  const colours = choice({
    id: "tint", label: "Colour by", value: tint(), options: Object.keys(TINTS).filter(has).map((name) => [name, TINTS[name][0]]),
    change: (name) => {
      samples.tint = name;
      pages.to(Math.floor(at / MOST));
    },
  });
  const place = (event) => event.target.closest(".tok")?.dataset.k;
  strip.addEventListener("click", (event) => place(event) !== undefined && choose(Number(place(event)), true));
  strip.addEventListener("mouseover", (event) => place(event) !== undefined && tell(Number(place(event))));
  strip.addEventListener("mouseleave", () => tell(at));
  strip.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - 10, ArrowDown: at + 10, Home: 0, End: texts.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const k = Math.min(Math.max(to, 0), texts.length - 1);
    if (Math.floor(k / MOST) !== Math.floor(at / MOST)) pages.showing(k);
    choose(k, true);
  });
  const notes = [];
  if (g.source === "held_out") notes.push("A held-out answer is not trained on: it has no advantage, ratio or entropy.");
  else if (lacking.length) notes.push(`Not logged for this answer: ${lacking.map((name) => TINTS[name][0]).join(", ")}. The setting log_tokens writes what the trainer knew of each token, for so many groups a step.`);
  if (g.tokens?.[i]?.trained === false) notes.push("This answer was not trained on in its step: its advantage was 0, or it was masked.");
  if (!Object.keys(run.vocabulary).length) notes.push("No tokenizer.json was found beside the run, so tokens are shown by their numbers.");
  const head = el("h4", { id: "tokens-title", tabindex: -1 }, `Answer ${i}, token by token`);
  pages.set(texts.length);
  fill(root, el("div.token-view", {}, head, colours, el("p.note", { id: "token-help" }, "Log-prob: as sampled, in nats. Ratio: the trained weights’ probability to the old ones’. Stronger colour: further from 0, or from 1 (ratio); orange is pulled down, or unlikely. Arrow keys walk through the tokens."), said, strip, pages.node, notes.map((note) => el("p.note", {}, note))));
  if (focus) head.focus();
}
