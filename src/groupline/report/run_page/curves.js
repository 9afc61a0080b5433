// 2, 3, 6, 7 and the loss: what is logged at every step.
"use strict";
const line = (run, key, name, kind, extra = {}) => ({ name, kind, points: curve(run, key), ...extra });
const parts = (run) => Object.keys(run.columns).filter((k) => /^rewards\/.*\/mean$/.test(k)).map((k) => k.slice(8, -5));

section("rewards", {}, (root) => {
  const spread = (run) => {
    const std = column(run, "reward_std");
    return std ? curve(run, "reward").map(([x, v], i) => [x, v === null || std[i] === null ? null : v - std[i], v === null || std[i] === null ? null : v + std[i]]) : null;
  };
  fill(root, grid(
    panel({
      id: "reward", title: "Reward, in training and held out", y: "reward of an answer",
      without: "This run logs no reward: it learns from given answers.",
      series: (run) => [
        line(run, "reward", several() ? "training, mean" : "training, mean (band: ±1 standard deviation)", "c0", { band: spread(run) }),
        { name: "held out, mean", kind: "c1", dots: true, points: evalCurve(run, (e) => e.reward) },
        line(run, "objective/rlhf_reward", "training, the KL penalty taken off", "c2"),
        line(run, "mean_reward", "score, mean of both answers", "c0"),
        line(run, "rewards/chosen", "implicit reward of the chosen answer", "c0"),
        line(run, "rewards/rejected", "implicit reward of the rejected answer", "c1"),
      ],
    }),
    panel({
      id: "parts", title: "Each reward function", y: "mean of the function, unweighted",
      without: "No reward function's own mean is logged.",
      series: (run) => parts(run).map((name, i) => line(run, `rewards/${name}/mean`, name + weight(run, name), `c${i % KINDS}`)),
    }),
  ));
});

function weight(run, name) {
  const [names, weights] = [run.config.rewards, run.config.reward_weights];
  const at = names && weights ? names.findIndex((n) => n.split(/[.:]/).at(-1) === name) : -1;
  return at >= 0 && weights[at] !== undefined && !several() ? ` (weight ${weights[at]})` : "";
}

section("signal", {}, (root) => {
  fill(root, grid(
    panel({
      id: "groups-share", title: "Groups by answers right", y: "share of a step’s groups", write: share, ylim: [0, 1], stacked: true,
      without: "This run samples no groups.",
      series: (run) => [
        line(run, "groups/all_wrong", "all wrong", "c1"),
        line(run, "groups/mixed", "mixed", "c0"),
        line(run, "groups/all_right", "all right", "c2"),
      ],
    }),
    panel({
      id: "signal-share", title: "Groups whose rewards differ", y: "share of a step’s groups", write: share, ylim: [0, 1],
      without: "This run samples no groups.",
      series: (run) => [line(run, "frac_groups_with_signal", "with signal", "c0")],
    }),
    panel({
      id: "effective", title: "Effective samples", y: "answers in groups with signal, per second", ylim: [0],
      without: "It needs frac_groups_with_signal and step_time, which this run does not log.",
      series: (run) => [line(run, "derived/effective_per_s", "answers that teach", "c0")],
    }),
  ));
});

section("policy", {}, (root) => {
  const estimator = (run) => /\bon (k[123])\b/.exec(run.plan.reference ?? "")?.[1];
  const named = [...new Set(shown().map(estimator).filter(Boolean))];
  const none = shown().every((run) => /^none/.test(run.plan.reference ?? ""));
  fill(root, grid(
    panel({
      id: "kl", title: `KL to the starting policy${named.length === 1 ? `, estimated by ${named[0]}` : ""}`, y: "nats per token",
      without: none ? "No KL: beta is 0, so there is no reference to compare with." : "No KL is logged.",
      series: (run) => [line(run, "kl", estimator(run) ? `KL (${estimator(run)})` : "KL", "c0")],
    }),
    panel({
      id: "clip", title: "Clipped ratios", y: "share of trained tokens", write: share, ylim: [0],
      without: "No clipped share is logged.",
      series: (run) => [line(run, "clip_ratio/low_mean", "at the lower bound", "c1"), line(run, "clip_ratio/high_mean", "at the upper bound", "c0")],
    }),
    panel({
      id: "entropy", title: "Entropy", y: "nats per token", ylim: [0], without: "No entropy is logged.",
      series: (run) => [line(run, "entropy", "mean over trained tokens", "c0")],
    }),
    panel({
      id: "grad", title: "Gradient norm", y: "before clipping", ylim: [0], without: "No gradient norm is logged.",
      series: (run) => [line(run, "grad_norm", "policy", "c0"), line(run, "value/grad_norm", "value model", "c1")],
    }),
    panel({
      id: "gap", title: "Sampler against trainer", y: "difference of a token’s log-prob, nats", ylim: [0],
      without: "The sampler's and the trainer's log-probs are not compared in this run.",
      series: (run) => [
        line(run, "sampling/sampling_logp_difference/mean", "mean", "c0"),
        line(run, "sampling/sampling_logp_difference/max", "largest", "c1"),
      ],
    }),
    panel({
      id: "rate", title: "Learning rate", y: "learning rate", ylim: [0], without: "No learning rate is logged.",
      series: (run) => [line(run, "learning_rate", "policy", "c0"), line(run, "value/learning_rate", "value model", "c1")],
    }),
  ));
  const value = shown().filter((run) => column(run, "value/explained_variance"));
  if (value.length) {
    root.firstChild.append(panel({
      id: "value", title: "Value model", y: "share of the returns’ variance explained", write: share, ylim: [0],
      without: "", series: (run) => [line(run, "value/explained_variance", "explained", "c0")],
    }));
  }
});

section("time", {}, (root) => {
  const spent = (run) => Object.keys(run.columns).filter((k) => k.startsWith("time/"));
  const memory = (run) => Object.keys(run.columns).filter((k) => k.startsWith("memory/"));
  fill(root, grid(
    panel({
      id: "split", title: "Time of a step", y: "seconds", write: (v) => short(v), stacked: true, without: "No split of a step's time is logged.",
      series: (run) => spent(run).map((key, i) => line(run, key, key.slice(5), `c${i % KINDS}`)),
    }),
    panel({
      id: "speed", title: "Tokens per second", y: "answer tokens per second", ylim: [0], without: "No speed is logged.",
      series: (run) => [line(run, "generated_tokens_per_second", "while generating", "c1"), line(run, "tokens_per_second", "over the whole step", "c0")],
    }),
    panel({
      id: "memory", title: "Memory at its peak", y: "GiB", ylim: [0], without: `Memory at its peak is not logged in ${several() ? "these runs" : "this run"}.`,
      series: (run) => memory(run).map((key, i) => line(run, key, MEMORY[key] ?? key, `c${i % KINDS}`)),
    }),
  ), ...shown().filter((run) => run.models).map((run) => el(
    "p.note", {}, `${several() ? `${run.label}: weights` : "Weights"} held: ${Object.entries(run.models).map(([name, w]) => `${name} ${short(w.parameters)} (${short(w.bytes / 2 ** 20)} MiB)`).join(", ")}.`,
  )));
});
const MEMORY = { "memory/peak_gib": "device", "memory/process_peak_gib": "process" };

const grid = (...panels) => el(`div.grid${panels.length === 3 ? ".three" : ""}`, {}, panels);

section("loss", { key: null }, (root, state) => {
  const groups = shown().some((run) => RULED[run.kind]);
  document.getElementById("loss-lead").textContent = groups
    ? "The loss stands at the end on purpose. A group’s advantages sum to zero, and at the first update the ratio is 1, so the policy loss is near zero whether the run learns or not; its gradient is not."
    : "What is minimised.";
  const keys = [...new Set(shown().flatMap((run) => Object.keys(run.columns)))].filter((k) => !["step", "seconds", "tokens"].includes(k)).sort();
  if (!keys.includes(state.key)) state.key = keys.find((k) => k.startsWith("completions/")) ?? keys[0];
  const hold = el("div");
  const draw = () => fill(hold, panel({
    id: "any", title: state.key ?? "Series", y: state.key ?? "", without: "Nothing is logged yet.",
    series: (run) => (state.key ? [line(run, state.key, state.key, "c0")] : []),
  }));
  const select = el("select", { id: "any-key" }, keys.map((k) => el("option", { selected: k === state.key }, k)));
  select.addEventListener("change", () => {
    state.key = select.value;
    draw();
  });
  draw();
  fill(root, grid(
    panel({ id: "loss-curve", title: "Loss", y: "loss", without: "No loss is logged.", series: (run) => [line(run, "loss", "policy", "c0"), line(run, "value/loss", "value model", "c1")] }),
    el("div", {}, el("label.select", { for: "any-key" }, "Any series that was logged ", select), hold),
  ));
});
