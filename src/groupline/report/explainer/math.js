// The page's mathematics: numbers in, numbers out; touches nothing of the page. Each function repeats one of the Python
// library (named at it), and tests compare the two over fixtures that the Python functions write.
"use strict";
const math = (() => {
  const sum = (xs) => xs.reduce((a, b) => a + b, 0);
  const mean = (xs) => sum(xs) / xs.length;

  /** Standard deviation about the mean, divided by n - ddof. */
  function std(xs, ddof = 1) {
    const m = mean(xs);
    return Math.sqrt(sum(xs.map((x) => (x - m) ** 2)) / Math.max(xs.length - ddof, 1));
  }

  const allEqual = (xs) => Math.max(...xs) === Math.min(...xs);

  /** groupline.objective.group_advantages: one list of rewards a group in, one list of advantages a group out. */
  function groupAdvantages(groups, { baseline = "mean", scale = "group", ddof = 1, eps = 1e-4 } = {}) {
    const batch = groups.flat();
    return groups.map((rewards) => {
      if (allEqual(rewards)) return rewards.map(() => 0);
      const n = rewards.length;
      const middle = mean(rewards);
      const stretch = baseline === "leave_one_out" ? n / (n - 1) : 1;
      const unit = scale === "none" ? 1 : std(scale === "batch" ? batch : rewards, ddof) + eps;
      return rewards.map((r) => (stretch * (r - middle)) / unit);
    });
  }

  /** groupline.metrics.p_no_signal: the chance that a group's 0/1 rewards are all equal. */
  const pNoSignal = (p, size) => p ** size + (1 - p) ** size;

  /** groupline.objective.token_weights: the weight of one token of each answer. */
  function tokenWeights(lengths, rule, budget = null, totals = {}) {
    const answers = totals.sequences ?? lengths.filter((n) => n > 0).length;
    const tokens = totals.tokens ?? sum(lengths);
    const denominator = {
      per_sequence: (n) => answers * n,
      per_token: () => tokens,
      per_budget: () => (totals.sequences ?? lengths.length) * budget,
    }[rule];
    return lengths.map((n) => (n > 0 ? 1 / denominator(n) : 0));
  }

  /** What policy_loss (form "surrogate") maximises for one token: min(r A, clip(r) A), and its gradient in log-prob. */
  function clipped(ratio, advantage, low, high) {
    const bounded = Math.min(Math.max(ratio, 1 - low), 1 + high);
    const stopped = (ratio < 1 - low && advantage < 0) || (ratio > 1 + high && advantage > 0);
    return {
      plain: ratio * advantage,
      bounded: bounded * advantage,
      value: Math.min(ratio * advantage, bounded * advantage),
      gradient: stopped ? 0 : ratio * advantage,
      stopped,
    };
  }

  const BOUND = 20; // groupline.objective.LOG_RATIO_BOUND
  const k1 = (logp, ref) => logp - ref;
  const k2 = (logp, ref) => (logp - ref) ** 2 / 2;

  /** e^d - d - 1 with d = ref - logp: a series where it would cancel, the tangent beyond d = 20, as in the library. */
  function k3(logp, ref) {
    const d = ref - logp;
    if (Math.abs(d) >= 0.1) {
      const near = Math.min(d, BOUND);
      return Math.expm1(near) - near + Math.expm1(BOUND) * Math.max(d - BOUND, 0);
    }
    let term = (d * d) / 2;
    let total = term;
    for (let n = 3; n <= 9; n++) total += term *= d / n;
    return total;
  }
  const estimators = { k1, k2, k3 };

  /** d(estimator) / d(logp) on one token: what flows back when the estimator is part of the loss. */
  const estimatorGradients = {
    k1: () => 1,
    k2: (logp, ref) => logp - ref,
    k3: (logp, ref) => -Math.expm1(Math.min(ref - logp, BOUND)),
  };

  function logSoftmax(logits) {
    const top = Math.max(...logits);
    const norm = top + Math.log(sum(logits.map((x) => Math.exp(x - top))));
    return logits.map((x) => x - norm);
  }
  const softmax = (logits) => logSoftmax(logits).map(Math.exp);

  /** KL(p || q) in nats, both given by logits. */
  function categoricalKl(p, q) {
    const [a, b] = [logSoftmax(p), logSoftmax(q)];
    return sum(a.map((x, i) => Math.exp(x) * (x - b[i])));
  }

  /** KL(N(m, s) || N(m2, s2)) in nats. */
  const gaussianKl = (m, s, m2, s2) => Math.log(s2 / s) + (s * s + (m - m2) ** 2) / (2 * s2 * s2) - 0.5;
  const gaussianLogp = (x, m, s) => -0.5 * ((x - m) / s) ** 2 - Math.log(s) - 0.5 * Math.log(2 * Math.PI);

  /** Every outcome of a categorical: {p, logp, ref}. */
  function categoricalPoints(logits, refLogits) {
    const [logp, ref] = [logSoftmax(logits), logSoftmax(refLogits)];
    return logp.map((x, i) => ({ p: Math.exp(x), logp: x, ref: ref[i] }));
  }

  /** A grid fine and wide enough for expectations under N(m, s), beside a standard normal reference. s stays above 0.71,
      below which the spread of k3 would be infinite. */
  function gaussianPoints(m, s, m2, s2, halfWidth = 24, count = 6000) {
    const step = (2 * halfWidth) / count;
    return Array.from({ length: count + 1 }, (_, i) => {
      const x = -halfWidth + i * step;
      const logp = gaussianLogp(x, m, s);
      return { x, p: Math.exp(logp) * step, logp, ref: gaussianLogp(x, m2, s2) };
    });
  }

  /** {k1, k2, k3: {mean, spread}} over outcomes drawn from the policy: no sampling, an exact sum. */
  function estimatorFacts(points) {
    return Object.fromEntries(
      Object.entries(estimators).map(([name, estimate]) => {
        const average = sum(points.map((o) => o.p * estimate(o.logp, o.ref)));
        const square = sum(points.map((o) => o.p * (estimate(o.logp, o.ref) - average) ** 2));
        return [name, { mean: average, spread: Math.sqrt(square) }];
      }),
    );
  }

  /** Mean over the policy's draws of each estimator's gradient in each logit: sum_x p(x) c(x) (1[x = j] - p(j)). */
  function expectedLogitGradients(logits, refLogits) {
    const points = categoricalPoints(logits, refLogits);
    return Object.fromEntries(
      Object.entries(estimatorGradients).map(([name, slope]) => {
        const pulls = points.map((o) => o.p * slope(o.logp, o.ref));
        const total = sum(pulls);
        return [name, points.map((o, j) => pulls[j] - o.p * total)];
      }),
    );
  }

  /** The gradients in the policy's logits of KL(policy || reference) and of KL(reference || policy). */
  function klLogitGradients(logits, refLogits) {
    const points = categoricalPoints(logits, refLogits);
    const kl = categoricalKl(logits, refLogits);
    return {
      forward: points.map((o) => o.p * (o.logp - o.ref - kl)),
      reverse: points.map((o) => o.p - Math.exp(o.ref)),
    };
  }

  /** For normals: mean over the policy's draws of each estimator's gradient in the policy's mean. */
  function expectedMeanGradients(m, s, m2, s2) {
    const points = gaussianPoints(m, s, m2, s2);
    return Object.fromEntries(
      Object.entries(estimatorGradients).map(([name, slope]) => [
        name,
        sum(points.map((o) => (o.p * slope(o.logp, o.ref) * (o.x - m)) / (s * s))),
      ]),
    );
  }
  const klMeanGradients = (m, s, m2, s2) => ({ forward: (m - m2) / (s2 * s2), reverse: (m - m2) / (s * s) });

  /** groupline.metrics.pass_at_k: 1 - C(n-c, k) / C(n, k). */
  function passAtK(n, c, k) {
    if (n - c < k) return 1;
    let none = 1;
    for (let i = 0; i < k; i++) none *= (n - c - i) / (n - i);
    return 1 - none;
  }
  const passAtKNaive = (n, c, k) => 1 - (1 - c / n) ** k;

  /** pass@k where the chances of a right answer are known: the mean over kinds of problems, by their share. */
  const passAtKOfChances = (chances, shares, k) => sum(chances.map((p, i) => shares[i] * (1 - (1 - p) ** k)));

  /** The outcome that a uniform number in [0, 1) picks. */
  function draw(probs, u) {
    let reached = 0;
    for (let i = 0; i < probs.length - 1; i++) if (u < (reached += probs[i])) return i;
    return probs.length - 1;
  }

  /** One GRPO step on logits: advantages of the drawn answers, gradient ascent on the mean of A log pi. */
  function banditStep(logits, drawn, rewards, learningRate, options = {}) {
    const probs = softmax(logits);
    const [advantages] = groupAdvantages([drawn.map((a) => rewards[a])], options);
    const gradient = probs.map(
      (p, j) => sum(drawn.map((a, i) => advantages[i] * ((a === j ? 1 : 0) - p))) / drawn.length,
    );
    return { advantages, gradient, logits: logits.map((x, j) => x + learningRate * gradient[j]) };
  }

  /** Uniform numbers in [0, 1) from a seed (mulberry32). Only for pictures. */
  function uniforms(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let z = state;
      z = Math.imul(z ^ (z >>> 15), z | 1);
      z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
      return ((z ^ (z >>> 14)) >>> 0) / 4294967296;
    };
  }
  /** A standard normal number from two uniform ones (Box-Muller). */
  const normal = (uniform) => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());

  return {
    sum, mean, std, allEqual, groupAdvantages, pNoSignal, tokenWeights, clipped, k1, k2, k3, estimators,
    estimatorGradients, logSoftmax, softmax, categoricalKl, gaussianKl, gaussianLogp, categoricalPoints, gaussianPoints,
    estimatorFacts, expectedLogitGradients, klLogitGradients, expectedMeanGradients, klMeanGradients, passAtK,
    passAtKNaive, passAtKOfChances, draw, banditStep, uniforms, normal,
  };
})();
