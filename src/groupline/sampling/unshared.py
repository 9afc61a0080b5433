"""Sampling for models whose attention cannot be shared: transformers' own `generate`, one group at a time.

A group's answers have one prompt, so nothing is padded and the model's own cache is right whatever it holds (state
spaces, ALiBi). Tokens are still chosen by `choose`, so draws, log-probs and seeds mean the same as in the engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from groupline.sampling.choose import choose
from groupline.sampling.draft import Drafts


class _Chooser(LogitsProcessor):  # type: ignore[misc]
    """Replaces the logits by a single permitted token per row: the one that `choose` drew."""

    def __init__(self, drafts: Drafts, rows: list[int], end: int) -> None:
        self.drafts, self.rows, self.end = drafts, rows, end
        self.ended = np.zeros(len(rows), dtype=bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        going = np.flatnonzero(~self.ended)
        rows = [self.rows[i] for i in going]
        logits = scores[torch.from_numpy(going).to(scores.device)].float()
        uniform = torch.from_numpy(self.drafts.uniform(rows)).to(scores.device)
        drawn = choose(logits, uniform, self.drafts.params)
        ids, logprobs, plain = (x.cpu().numpy() for x in drawn)
        forced = np.full(len(self.rows), self.end, dtype=np.int64)  # an ended row repeats the end until all have ended
        forced[going] = ids
        self.ended[going] = self.drafts.record(rows, ids, logprobs, plain)
        only = torch.full_like(scores, -torch.inf)
        only[torch.arange(len(forced)), torch.from_numpy(forced).to(scores.device)] = 0
        return only


class _AllEnded:
    def __init__(self, chooser: _Chooser) -> None:
        self.chooser = chooser

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), bool(self.chooser.ended.all()), device=input_ids.device)


def generate_unshared(model: Any, drafts: Drafts) -> None:
    """Fill `drafts` from `model.generate`."""
    device = next(model.parameters()).device
    end = int(drafts.eos_ids[0]) if len(drafts.eos_ids) else 0
    config = GenerationConfig(max_new_tokens=drafts.params.max_new_tokens, do_sample=False, pad_token_id=end)
    own = model.generation_config
    # `generate` fills unset values from the model's own config: its end ids would end rows that `drafts` lets go on,
    # and a repetition penalty or suppressed tokens would change the logits before `choose` sees them.
    model.generation_config = GenerationConfig()
    try:
        for p, prompt in enumerate(drafts.prompts):
            chooser = _Chooser(drafts, list(range(p * drafts.n, (p + 1) * drafts.n)), end)
            model.generate(
                torch.tensor([prompt] * drafts.n, device=device),
                attention_mask=torch.ones(drafts.n, len(prompt), dtype=torch.long, device=device),
                generation_config=config,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=[_AllEnded(chooser)],
            )
    finally:
        model.generation_config = own
