"""Records the group that `groupline explain` shows, from a real run of the quickstart's recipe.

    python bench/explainer_group.py [--step 5]

Trains recipes/quickstart.yaml as it stands up to the given step and takes from it the group with the most different
rewards (of those, the most different answers; then the fewest tokens): its prompt, its answers with their tokens,
log-probs and rewards by part, the advantages that the trainer used, and the log-probs of the same tokens once the
step's update was made, which is what a second update on the same answers would compare with. Writes
src/groupline/report/explainer/group.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from groupline.batch import Batch
from groupline.config import Config
from groupline.records import Group
from groupline.runlog import write_json
from groupline.training.grpo import run
from groupline.training.hooks import Hooks
from groupline.training.setup import Setup, prepare

RECIPE = "recipes/quickstart.yaml"
OUT = Path("src/groupline/report/explainer/group.json")


class Recorder(Hooks):
    """Keeps one group of the wanted step."""

    keeps_model = False

    def __init__(self, setup: Setup, step: int) -> None:
        self.setup, self.wanted, self.step = setup, step, 0
        self.recorded: dict[str, Any] = {}

    def rollout_end(self, groups: Sequence[Group], batch: Batch) -> None:
        self.step += 1
        self.groups, self.batch = groups, batch

    def update_end(self, metrics: Mapping[str, float]) -> None:
        if self.step == self.wanted:
            self.recorded = self._record()
            self.stop = True

    def _record(self) -> dict[str, Any]:
        setup, size = self.setup, self.setup.config.num_generations
        after = self._logps()

        def order(number: int) -> tuple[int, int, int]:
            rollouts = self.groups[number].rollouts
            tokens = sum(len(r.completion.ids) for r in rollouts)
            return -len({r.reward for r in rollouts}), -len({r.text for r in rollouts}), tokens

        whole = [n for n in range(len(self.groups)) if all(n * size + i in after for i in range(size))]
        number = min(whole, key=order)
        group = self.groups[number]
        answers = []
        for i, rollout in enumerate(group.rollouts):
            place, completion = number * size + i, rollout.completion
            answers.append(
                {
                    "text": rollout.text,
                    "finish_reason": completion.finish_reason,
                    "rewards": dict(rollout.rewards),
                    "reward": rollout.reward,
                    "advantage": float(self.batch.advantages[place]),
                    "tokens": [setup.tokenizer.decode([i]) for i in completion.ids],
                    "logp": [round(x, 6) for x in completion.logprobs],
                    "logp_after": [round(x, 6) for x in after[place]],
                }
            )
        objective = setup.objective
        return {
            "made_by": f"python bench/explainer_group.py --step {self.wanted}",
            "recipe": RECIPE,
            "step": self.step,
            "problem": group.problem.id,
            "prompt": group.problem.to_json()["prompt"],
            "gold": group.problem.answer,
            "reward_weights": {r.name: r.weight for r in setup.rewards},
            "objective": {
                name: getattr(objective, name)
                for name in (
                    "name",
                    "baseline",
                    "scale",
                    "ddof",
                    "eps",
                    "clip_low",
                    "clip_high",
                    "token_weight",
                    "beta",
                )
            },
            "budget": setup.config.max_completion_length,
            "step_answers": len(self.batch.lengths),
            "step_tokens": int(self.batch.lengths.sum()),
            "answers": answers,
        }

    @torch.no_grad()
    def _logps(self) -> dict[int, list[float]]:
        """{answer's place in the step: log-probs of its tokens under the weights as they are now}."""
        found: dict[int, list[float]] = {}
        for micro in self.batch.micro_batches:
            logp = self.setup.scorer(self.setup.policy, micro.row)[0]
            for own, place in enumerate(micro.answers):
                found[place] = logp[micro.row.sequence == own].tolist()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=5)
    step = parser.parse_args().step
    with tempfile.TemporaryDirectory() as folder:
        config = Config.load(RECIPE, eval_problems=0, output_dir=str(Path(folder) / "run"))
        setup = prepare(config, say=str)
        recorder = Recorder(setup, step)
        run(config, setup, hooks=recorder)
    write_json(OUT, recorder.recorded)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
