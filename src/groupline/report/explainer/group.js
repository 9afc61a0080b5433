// (7) A recorded group of the quickstart; every number opens its formula.
"use strict";
section("group", { answer: 2, token: 1, colour: "advantage", open: "advantage-0" }, (root, state) => {
  const { answers, objective, reward_weights: parts } = GROUP;
  const rewards = answers.map((a) => a.reward);
  const { clip_low: low, clip_high: high, eps, ddof } = objective;
  const [mean, std] = [math.mean(rewards), math.std(rewards, ddof)];
  const [advantages] = math.groupAdvantages([rewards], objective);
  const lengths = answers.map((a) => a.tokens.length);
  const weights = math.tokenWeights(lengths, objective.token_weight, GROUP.budget, { sequences: GROUP.step_answers, tokens: GROUP.step_tokens });
  const ratioOf = (i, j) => Math.exp(answers[i].logp_after[j] - answers[i].logp[j]);
  const clip = (i, j) => math.clipped(ratioOf(i, j), advantages[i], low, high);

  const panel = el("aside.formula-panel", { id: "formula", role: "status" });
  /** The formula of a number: {name, words, lines}. Kept by its key, so that it survives a change of language. */
  const formulas = {};
  const open = (key) => {
    state.open = key;
    const found = formulas[key]?.();
    for (const made of root.querySelectorAll(".number")) made.classList.toggle("open", made.dataset.key === key);
    if (!found) return fill(panel, el("p", { html: t("group.choose") }));
    const lines = found.lines.map((line) => el("code", { html: line }));
    return fill(panel, el("h3", { html: found.name }), el("p", { html: found.words }), el("div.lines", {}, lines));
  };
  /** A number as a button that opens its formula. */
  const number = (key, text, name, formula) => {
    formulas[key] = () => ({ name, words: t(`group.why_${key.split("-")[0]}`, formula.values ?? {}), lines: formula.lines });
    return el("button.number", { type: "button", "data-key": key, "aria-label": `${name}: ${text}`, onclick: () => open(key) }, text);
  };
  const list = (values, digits = 1) => values.map((x) => fmt(x, digits)).join(" + ");

  const prompt = GROUP.prompt.at(-1).content;
  const question = el(
    "div.prompt", {}, el("span.name", {}, t("group.prompt")), el("p", { lang: "th" }, prompt),
    el("p.gloss", {}, t("group.gloss")), el("p", { html: t("group.gold", { gold: GROUP.gold }) }),
  );
  const n = rewards.length;
  const meanNumber = number("mean", fmt(mean, 4), t("group.mean"), { lines: [`(${list(rewards)}) / ${n}`, `= ${fmt(mean, 4)}`] });
  const squares = rewards.map((r) => `(${fmt(r, 1)} − ${fmt(mean, 4)})²`).join(" + ");
  const stdNumber = number("std", fmt(std, 4), t("group.std"), { lines: [`√( (${squares}) / (${n} − ${ddof}) )`, `= ${fmt(std, 4)}`] });
  const pair = (words, value) => el("div.pair", {}, el("dt", { html: words }), el("dd", {}, value));
  const summary = el("dl.numbers", {}, pair(t("group.mean"), meanNumber), pair(t("group.std"), stdNumber));

  const card = (answer, i) => {
    const own = (kind, text, name, formula) => number(`${kind}-${i}`, text, t("group.of_answer", { name, n: i + 1 }), formula);
    const scores = Object.entries(answer.rewards).map(([judge, score]) =>
      pair(`<code>${judge}</code>`, own(judge, fmt(score, 1), judge, { lines: [`${judge} = ${fmt(score, 1)}`], values: { gold: GROUP.gold } })),
    );
    const terms = Object.entries(parts).map(([judge, weight]) => `${fmt(weight, 1)} × ${fmt(answer.rewards[judge], 1)}`);
    const total = own("reward", fmt(answer.reward, 2), t("group.reward"), { lines: [Object.entries(parts).map(([judge, w]) => `${fmt(w, 1)} × ${judge}`).join(" + "), `= ${terms.join(" + ")}`, `= ${fmt(answer.reward, 2)}`] });
    const advantage = own("advantage", signed(advantages[i]), t("group.advantage"), {
      lines: ["(r − mean) / (std + ε)", `= (${fmt(answer.reward, 2)} − ${fmt(mean, 4)}) / (${fmt(std, 4)} + ${eps})`, `= ${signed(advantages[i], 4)}`],
    });
    const length = own("length", String(lengths[i]), t("group.length"), { lines: [`${lengths[i]}`] });
    const weight = own("weight", fmt(weights[i], 6), t("group.weight"), {
      lines: ["1 / (S × len)", `= 1 / (${GROUP.step_answers} × ${lengths[i]})`, `= ${fmt(weights[i], 6)}`], values: { answers: GROUP.step_answers },
    });
    const choose = button(`answer-${i}`, t("group.show_tokens"), () => pickAnswer(i));
    return el(
      `article.answer.${advantages[i] < 0 ? "worse" : "better"}`, { "aria-label": t("group.answer", { n: i + 1 }) },
      el("header", {}, el("strong", {}, t("group.answer", { n: i + 1 })), choose),
      el("p.text", { lang: "th" }, answer.text),
      el("dl.numbers", {}, scores, pair(t("group.reward"), total), pair(t("group.advantage"), advantage), pair(t("group.length"), length), pair(t("group.weight"), weight)),
    );
  };

  const strip = el("div.tokens", { id: "tokens", role: "group" });
  const detail = el("dl.numbers", { id: "token-numbers" });
  const title = el("h3", { id: "tokens-title" });
  /** How a token is coloured: from −1 (against) to 1 (for). */
  const shade = {
    advantage: (i, j) => (weights[i] * clip(i, j).gradient) / Math.max(...answers.map((_, a) => Math.abs(weights[a] * advantages[a]))),
    logp: (i, j) => Math.max(-1, answers[i].logp[j] / 3),
    ratio: (i, j) => Math.max(-1, Math.min(1, Math.log(ratioOf(i, j)) / 0.3)),
  };
  const visible = (token) => token.replace(/\n/g, "⏎").replace(/^ $/, "␣");
  const tokens = () => {
    const i = state.answer;
    title.textContent = t("group.tokens_of", { n: i + 1 });
    strip.setAttribute("aria-label", t("group.tokens_label", { n: i + 1 }));
    fill(strip, answers[i].tokens.map((token, j) => {
      const value = shade[state.colour](i, j);
      const made = el("button.token", {
        type: "button", lang: "th", id: `token-${j}`, tabindex: j === state.token ? 0 : -1, "aria-pressed": String(j === state.token),
        style: `--shade: ${Math.sqrt(Math.min(1, Math.abs(value))).toFixed(3)}`, onclick: () => pickToken(j),
      }, visible(token));
      made.classList.add(value < 0 ? "minus" : "plus");
      if (clip(i, j).stopped) made.classList.add("stopped");
      return made;
    }));
    for (const made of root.querySelectorAll(".answer button.plain")) made.setAttribute("aria-pressed", String(made.id === `answer-${i}`));
    numbers();
  };
  const numbers = () => {
    const [i, j] = [state.answer, state.token];
    const { logp, logp_after: after, tokens: pieces } = answers[i];
    const now = clip(i, j);
    const own = (kind, text, formula) => pair(t(`group.${kind}`), number(`${kind}-${i}-${j}`, text, t(`group.${kind}`), formula));
    const [first, second] = [weights[i] * advantages[i], weights[i] * now.gradient];
    const [r, A] = [fmt(ratioOf(i, j), 4), signed(advantages[i], 4)];
    fill(
      detail, pair(t("group.token"), el("span.text", { lang: "th" }, visible(pieces[j]))),
      own("logp", fmt(logp[j], 4), { lines: [`log p = ${fmt(logp[j], 4)}`, `p = e^${fmt(logp[j], 4)} = ${percent(Math.exp(logp[j]), 2)}`] }),
      own("after", fmt(after[j], 4), { lines: [`log p = ${fmt(after[j], 4)}`, `p = e^${fmt(after[j], 4)} = ${percent(Math.exp(after[j]), 2)}`] }),
      own("first", signed(first, 5), { lines: ["w × A", `= ${fmt(weights[i], 6)} × ${A}`, `= ${signed(first, 6)}`] }),
      own("ratio", r, { lines: [`e^(${fmt(after[j], 4)} − ${fmt(logp[j], 4)})`, `= ${r}`] }),
      own("objective", signed(now.value, 4), {
        lines: [`min(r A, clip(r, ${fmt(1 - low, 1)}, ${fmt(1 + high, 1)}) A)`, `= min(${signed(now.plain, 4)}, ${signed(now.bounded, 4)})`, `= ${signed(now.value, 4)}`],
      }),
      own("second", signed(second, 5), {
        lines: now.stopped ? [`r = ${r}, A = ${A}`, `→ ${t("clipping.stopped")}: 0`] : ["w × r × A", `= ${fmt(weights[i], 6)} × ${r} × ${A}`, `= ${signed(second, 6)}`],
      }),
    );
    open(state.open);
  };
  const pickToken = (j) => {
    state.token = j;
    for (const [at, made] of [...strip.children].entries()) {
      made.tabIndex = at === j ? 0 : -1;
      made.setAttribute("aria-pressed", String(at === j));
    }
    numbers();
  };
  const pickAnswer = (i) => {
    Object.assign(state, { answer: i, token: 0 });
    tokens();
  };
  strip.addEventListener("keydown", (event) => {
    const last = strip.children.length - 1;
    const to = { ArrowRight: state.token + 1, ArrowLeft: state.token - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    pickToken(Math.min(last, Math.max(0, to)));
    strip.children[state.token].focus();
  });
  const colours = Object.keys(shade).map((name) => [name, t(`group.colour_${name}`)]);
  const colour = choice({
    id: "token-colour", label: t("group.colour"), options: colours, value: state.colour,
    change: (value) => {
      state.colour = value;
      tokens();
    },
  });
  root.append(
    question, summary, el("div.answers", {}, answers.map(card)), title, colour, strip, el("p.note", { html: t("group.strip_note") }), detail, panel,
    el("p.note", { html: t("group.made_by", { command: `<code>${GROUP.made_by}</code>`, step: GROUP.step }) }),
  );
  tokens();
});
