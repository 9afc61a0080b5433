// 5. Length beside accuracy, over the run and answer by answer.
"use strict";
section("lengths", {}, (root) => {
  const height = 210;
  fill(root, el("div.aligned", {},
    panel({
      id: "length", title: "Length", y: "tokens of an answer", ylim: [0], height, without: "No answer lengths are logged in this run.",
      series: (run) => [
        line(run, "completions/mean_length", "mean", "c0"),
        line(run, "derived/length_p95", "95th percentile", "c1"),
        { name: "held out, mean", kind: "c3", dots: true, points: evalCurve(run, (e) => e.length) },
      ],
    }),
    panel({
      id: "accuracy", title: "Accuracy, and answers cut off", y: "share of answers", write: share, ylim: [0, 1], height, without: "Whether answers are right is not logged in this run.",
      series: (run) => [
        line(run, "accuracy", "right, training", "c0"),
        { name: "right, held out (pass@1)", kind: "c3", dots: true, points: evalCurve(run, (e) => e.pass["1"]?.[0]) },
        line(run, "completions/clipped_ratio", "cut at the token limit", "c1"),
      ],
    })), ...noP95(), ...shown().map(scatter));
});

const noP95 = () => {
  const lacking = shown().filter((run) => RULED[run.kind] && run.steps && !column(run, "derived/length_p95"));
  return lacking.length ? [el("p.note", {}, `The 95th percentile needs the answers, and ${several() ? lacking.map((r) => r.label).join(", ") : "this run"} has none written (log_rollouts), or the page was asked for none.`)] : [];
};

function scatter(run) {
  const { bins, points } = run.lengths;
  if (!bins.length) return null;
  const i = view.runs.indexOf(run);
  const [low, high] = [bins[0][0], bins.at(-1)[1]];
  const full = bins.filter(([, , n]) => n);
  const middle = ([a, b]) => (a + b - 1) / 2;
  const wobble = (k) => ((k * 0.618034) % 1) * 0.085; // fixed, so that the picture is the same every time
  const picture = chart(`scatter-${i}`, {
    height: 270,
    label: () => `Length of an answer against whether it is right, ${run.label}. ${full.map((b) => `${b[0]} to ${b[1] - 1} tokens: ${b[2]} answers, ${percent(b[3] / b[2], 0)} right`).join("; ")}`,
    draw: (p) => {
      const width = high - low || 1;
      p.frame({ xs: [low - 0.02 * width, high + 0.02 * width], ys: [-0.12, 1.12], xTicks: ticks(low, high, p.width < 420 ? 3 : 6), yTicks: [0, 0.5, 1], yWrite: (v) => percent(v, 0), xName: "tokens of an answer", yName: "share of answers right", edges: { left: 48, right: 16 } });
      points.forEach(([tokens, right], k) => p.dot(tokens, right ? 1.02 + wobble(k) : -0.02 - wobble(k), `faint ${right ? "c2" : "c1"}`, 3));
      const shares = full.map((b) => [middle(b), b[3] / b[2], b]);
      for (const [x, , b] of shares) {
        const [a, z] = wilson(b[3], b[2]);
        p.line([[x, a], [x, z]], "c0 thin");
      }
      if (shares.length > 1) p.line(shares.map(([x, v]) => [x, v]), "c0");
      shares.forEach(([x, v]) => p.dot(x, v, "c0", 4.5));
    },
  });
  const total = bins.reduce((sum, b) => sum + b[2], 0);
  return el("div.plot", { id: `scatter-${i}-plot` }, el("h3", {}, `${several() ? `${run.label}: l` : "L"}ength against correctness`),
    el("p.note", {}, `Line: share right of all ${total.toLocaleString("en")} training answers by length, with 95% intervals (Wilson, answers taken as independent). Dots: ${points.length.toLocaleString("en")} of them, spread evenly over the run, right ones above and wrong ones below.`),
    picture.node,
    lazyTable(`scatter-${i}`, "Length against correctness", ["tokens", "answers", "right", "share right"], full.length, (k) => [`${full[k][0]}–${full[k][1] - 1}`, full[k][2], full[k][3], percent(full[k][3] / full[k][2])]));
}

/** Wilson's 95% interval, as groupline.metrics.wilson_interval. */
function wilson(right, n) {
  const z = 1.959963984540054;
  const [p, z2] = [right / n, z * z];
  const centre = (p + z2 / (2 * n)) / (1 + z2 / n);
  const half = (z / (1 + z2 / n)) * Math.sqrt((p * (1 - p)) / n + z2 / (4 * n * n));
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}
