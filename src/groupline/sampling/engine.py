"""The rollout engine: continuous batching over a transformers causal LM, each prompt prefilled once for its answers.

Legend: b live rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from groupline.models.attention import NAME, PackedPlan, planned, set_attention
from groupline.models.load import end_ids
from groupline.models.logprobs import find_head
from groupline.models.lora import Mirror
from groupline.models.memory import free_memory
from groupline.models.packing import decoder, why_not_shared
from groupline.models.products import Prepacked, can_prepack, linear, use_linear, worth_prepacking
from groupline.records import Completion, SamplingParams
from groupline.sampling.blocks import PagePool
from groupline.sampling.cache import DecodePlan, PromptCache, arrange_rows, fewer_rows
from groupline.sampling.choose import choose
from groupline.sampling.direct import DirectStep, direct_step
from groupline.sampling.draft import Drafts, OnGroup
from groupline.sampling.graphs import StaticDecode
from groupline.sampling.sampler import checked
from groupline.sampling.scheduler import Answer, Prompt, Scheduler
from groupline.sampling.unshared import generate_unshared


class Engine:
    """Samples from `model`; call `load_weights` after every update of it.

    tokenizer: needed for stop strings, and its end-of-sequence ids count beside the generation config's.
    cache_gib: budget for keys and values; by default a quarter of the device's free memory.
    max_rows: most answers decoded at once. page_size: tokens a cache page. dtype: weights' type while sampling.
    graphs: decode in bursts of steps at fixed addresses, captured in CUDA graphs; by default on CUDA. Without CUDA the
    same steps run uncaptured. burst: steps between two looks at who has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        cache_gib: float | None = None,
        max_rows: int = 256,
        page_size: int = 32,
        dtype: torch.dtype | None = None,
        graphs: bool | None = None,
        burst: int = 8,
        notify: Callable[[str], None] = print,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_rows, self.page_size, self.cache_gib = max_rows, page_size, cache_gib
        self.version = 0
        self.mirror = Mirror(model, dtype)
        self.model = self.mirror.model
        self.eos_ids = end_ids(self.model, tokenizer)
        self.device = next(self.model.parameters()).device
        self.unshared_reason = why_not_shared(self.model)
        self.direct: DirectStep | None = None
        if self.unshared_reason is None:
            set_attention(self.model, NAME)
            use_linear(self.model)
            self.prepack = worth_prepacking(self.model)
            self.direct, self.direct_reason = direct_step(decoder(self.model), self.mirror.borrowed, self.prepack)
            self._lay_out()
        else:
            notify(f"sampling without a shared prompt cache: {self.unshared_reason}")
        self._slot_bytes: int | None = None
        self.static: StaticDecode | None = None
        if self.unshared_reason is None and (self.device.type == "cuda" if graphs is None else graphs):
            self.static = StaticDecode(self._logits, self._addresses, self.device, notify, burst)

    def load_weights(self, policy: nn.Module, version: int) -> None:
        """Bring the sampling weights up to date. `policy` is the model the engine was made with."""
        self.mirror.refresh()
        if self.unshared_reason is None:
            self._lay_out()
        self.version = version

    def close(self) -> None:
        """Nothing but memory is held, see `release`."""
        self.release()

    def _lay_out(self) -> None:
        if self.direct is not None:
            self.direct.refresh()
        self._head = find_head(self.model)
        self._packed_head = None
        if self.prepack and can_prepack(self._head.weight):
            self._packed_head = Prepacked([self._head.weight], [self._head.bias])
        self._released = False

    def release(self) -> None:
        """Let go of the weights' prepacked copy until `load_weights`, or the next `generate`, makes it anew."""
        self._released, self._packed_head = self.unshared_reason is None, None
        if self.direct is not None:
            self.direct.release()

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        keys: Sequence[Hashable] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """`n` answers to every prompt (token ids), in order.

        Draws are keyed by (seed, key of the prompt, number of the answer) and by nothing else, so neither the order
        of prompts nor the batch changes an answer (up to rounding in the model's products). keys default to the
        prompt's own tokens and how often they came before in this call. on_group: called with a prompt's number and
        its answers when the last of them has ended, while others are decoded.
        """
        params = params or SamplingParams()
        limit = getattr(self.model.config, "max_position_embeddings", None)
        keys = checked(prompts, n, params, keys, limit, self.tokenizer)
        drafts = Drafts(prompts, n, params, seed, keys, self.eos_ids, self.tokenizer, self.version, on_group)
        if self.unshared_reason is not None:
            generate_unshared(self.model, drafts)
        else:
            self._run(drafts)
        return drafts.completions()

    def _run(self, drafts: Drafts) -> None:
        if self._released:
            self._lay_out()
        scheduler = Scheduler(self._page_pool(drafts), self.max_rows)
        for prompt in drafts.prompts:
            scheduler.add(len(prompt), drafts.n, drafts.params.max_new_tokens)
        if self.static is not None and self.static.failed:
            self.static = None
        if self.static is not None:
            self.static.begin(scheduler, drafts)
        cache = PromptCache(self.device)
        first: dict[int, Tensor] = {}  # prompt -> logits of its answers' first token, while answers wait for them
        plan: DecodePlan | None = None
        while not scheduler.done:
            step = scheduler.schedule()
            drafts.restart([self._row(drafts, a) for a in step.preempted])
            needed = {a.prompt.index for a in scheduler.live} | {p.index for p in scheduler.idle}
            if step.prompts:
                first |= self._prefill(step.prompts, needed, cache, drafts)
            if step.started:
                logits = torch.stack([first[a.prompt.index] for a in step.started])
                self._draw(drafts, scheduler, step.started, logits)
                first = {i: z for i, z in first.items() if i in needed}
            live = scheduler.live
            if not live:
                plan = None
                continue
            if self.static is not None:
                self.static.burst(scheduler, drafts, cache)
                continue
            changed = bool(step.started or step.preempted)
            if plan is None or changed or plan.span >= plan.room or len(live) <= fewer_rows(len(plan.answers)):
                rows = live if plan is None else arrange_rows(plan.answers, live)
                plan = DecodePlan(cache, rows, scheduler.width * self.page_size, plan)
            else:
                plan.step()
            last = torch.from_numpy(drafts.last([self._row(drafts, a) for a in plan.answers])).to(self.device)
            logits = self._logits(last, plan)
            scheduler.advance(live)
            self._draw(drafts, scheduler, plan.answers, logits)

    def _logits(self, ids: Tensor, plan: Any) -> Tensor:
        """Logits [b, V] that follow the rows' newest tokens, ids [b], under the plan of one decode step."""
        if self.direct is not None:
            hidden = self.direct(ids, plan)
        else:
            with planned(plan):
                hidden = decoder(self.model)(
                    input_ids=ids[None], position_ids=plan.position_ids[None], use_cache=False
                ).last_hidden_state[0]
        if self._packed_head is not None:
            return self._head.shape(self._packed_head(hidden))
        z = linear(hidden, self._head.weight, self._head.bias)
        return self._head.shape(z if z.dtype == torch.float64 else z.float())

    def _addresses(self) -> tuple[int, ...]:
        """Where the weights that a decode step reads are."""
        layers = [] if self.direct is None else self.direct.layers
        joined = (t for layer in layers for product in layer.products for t in product.tensors())
        head = self._head.weight, self._head.bias
        tensors = chain(self.model.parameters(), self.model.buffers(), joined, head)
        return tuple(t.data_ptr() for t in tensors if t is not None)

    @staticmethod
    def _row(drafts: Drafts, answer: Answer) -> int:
        return answer.prompt.index * drafts.n + answer.number

    def _draw(self, drafts: Drafts, scheduler: Scheduler, answers: list[Answer], logits: Tensor) -> None:
        """Draw a token for each answer that has not ended yet; end those that are finished with it."""
        alive = [i for i, a in enumerate(answers) if a.pages]
        rows = [self._row(drafts, answers[i]) for i in alive]
        uniform = np.zeros(len(answers))
        uniform[alive] = drafts.uniform(rows)
        drawn = choose(logits, torch.from_numpy(uniform).to(self.device), drafts.params)
        ended = drafts.record(rows, *(x.cpu().numpy()[alive] for x in drawn))
        if ended.any():
            scheduler.finish([answers[i] for i, end in zip(alive, ended, strict=True) if end])

    def _prefill(
        self, prompts: list[Prompt], resident: set[int], cache: PromptCache, drafts: Drafts
    ) -> dict[int, Tensor]:
        """Run prompts once, packed, their keys into the cache; logits [V] of each prompt's last token."""
        ids = [drafts.prompts[p.index] for p in prompts]
        cache.begin(prompts, resident)
        plan = PackedPlan([len(i) for i in ids], [[] for _ in ids], self.device, keep=cache.keep)
        positions = list(chain.from_iterable(range(len(i)) for i in ids))
        with planned(plan):
            hidden = decoder(self.model)(
                input_ids=torch.tensor([list(chain.from_iterable(ids))], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
            ).last_hidden_state[0]
        ends = np.cumsum([len(i) for i in ids]) - 1
        logits = self._head.logits(hidden[torch.from_numpy(ends).to(self.device)])
        return {p.index: z for p, z in zip(prompts, logits, strict=True)}

    def _page_pool(self, drafts: Drafts) -> PagePool:
        """As many pages as the call can use, within the budget."""
        size = self.page_size
        if self._slot_bytes is None:
            self._slot_bytes = self._measure_slot()
        pages = PagePool(1, size)
        per_answer = max(1, pages.needed(drafts.params.max_new_tokens - 1))
        wanted = sum(pages.needed(len(p)) for p in drafts.prompts) + len(drafts.prompts) * drafts.n * per_answer
        longest = max(pages.needed(len(p)) for p in drafts.prompts)
        # Rows bound what is live at once; prompts stay resident only while their answers run or come next.
        wanted = min(wanted, self.max_rows * (per_answer + longest) + longest)
        budget = self.cache_gib * 2**30 if self.cache_gib is not None else free_memory(self.device) / 4
        total = min(wanted, int(budget / (self._slot_bytes * size)))
        if total < 1:
            raise ValueError(f"cache_gib={self.cache_gib} holds not even one page of {size} tokens")
        return PagePool(total, size)

    def _measure_slot(self) -> int:
        """Bytes that one token takes in the cache, from a forward of one token."""
        sizes: dict[int, int] = {}

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            sizes[layer] = key[0].numel() * key.element_size() + value[0].numel() * value.element_size()

        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with planned(PackedPlan([1], [[]], self.device, keep=keep)):
            decoder(self.model)(input_ids=one, position_ids=one, use_cache=False)
        return sum(sizes.values())
