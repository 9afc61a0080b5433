"""Decoding many steps without the host: one step of fixed shape and addresses, on CUDA captured in a graph.

A burst runs a few steps on the device, which draw from uniform numbers uploaded before it. Only then are ids and
log-probs copied to the host, which ends answers, admits others and sets up the next burst. What a row drew after its
end is dropped. On CPU the same step runs without a graph, so that it can be tested there.

A graph holds addresses of weights, not weights. An update in place (an optimiser's, or the sampler's `load_weights`)
is therefore seen by it; where an address has changed, graphs are dropped and captured again.

Legend: B groups, R rows a group, b = B R rows, h query heads, k key/value heads, d key width, e value width, P prompt
tokens and T own tokens that there is room for, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupline.records import SamplingParams
from groupline.sampling.cache import PromptCache
from groupline.sampling.choose import draw, refuse_non_finite
from groupline.sampling.draft import Drafts
from groupline.sampling.scheduler import Answer, Scheduler
from groupline.sampling.static import Caches, Layer, Shape

MOST_GRAPHS = 64
Forward = Callable[[Tensor, Any], Tensor]


class StaticPlan:
    """Attention of one new token a row. Lengths are read on the device, so a captured step follows them."""

    def __init__(self, shape: Shape, layers: dict[int, Layer], lengths: Tensor, prompt_lengths: Tensor) -> None:
        """lengths: own tokens before this step, prompt_lengths: of each row's prompt; both [b], kept by the caller."""
        self.shape, self.lengths, self.prompt_lengths = shape, lengths, prompt_lengths
        self._own = {i: layer.own(shape) for i, layer in layers.items()}
        self._prompt = {i: layer.prompt(shape) for i, layer in layers.items()}
        self.begin()

    def begin(self) -> None:
        """Before each step: what follows from the lengths is made anew."""
        self.position_ids = self.prompt_lengths + self.lengths  # [b]
        self._masks: dict[int | None, Tensor] = {}
        self._cells: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """query [b, h, d], key [b, k, d], value [b, k, e] -> [b, h, e]."""
        groups, rows, prompt, room = self.shape
        kv, d, e = key.shape[1], key.shape[2], value.shape[2]
        own_k, own_v = self._own[layer]
        cells = self._written(kv)
        own_k.view(-1, d).index_copy_(0, cells, key.reshape(-1, d))
        own_v.view(-1, e).index_copy_(0, cells, value.reshape(-1, e))
        own_k, own_v = own_k.flatten(0, 2), own_v.flatten(0, 2)  # [B k R, T, d or e], views
        prompt_k, prompt_v = (x.flatten(0, 1) for x in self._prompt[layer])
        q = query.reshape(groups, rows, kv, -1, d).transpose(1, 2).reshape(groups * kv, -1, d)  # [B k, R repeat, d]
        repeat = q.shape[1] // rows
        # Products are added to the mask, in their accumulators: no queries are scaled and no scores joined.
        scores = self._mask(window, q.dtype)[:, None, :, None].expand(-1, kv, -1, repeat, -1)
        scores = scores.clone(memory_format=torch.contiguous_format).view(groups * kv, rows * repeat, prompt + room)
        scores[..., :prompt].baddbmm_(q, prompt_k, alpha=scaling)
        to_own = scores[..., prompt:].view(-1, repeat, room)  # [B k R, repeat, T]
        to_own.baddbmm_(q.view(-1, repeat, d), own_k.transpose(1, 2), alpha=scaling)
        p = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        out = p[..., :prompt].bmm(prompt_v)  # [B k, R repeat, e]
        out.view(-1, repeat, e).baddbmm_(p[..., prompt:].view(-1, repeat, room), own_v)
        return out.view(groups, kv, rows, repeat, e).transpose(1, 2).reshape(groups * rows, -1, e)

    def _written(self, kv: int) -> Tensor:
        """[b * k] cells that this step's tokens take in a layer's own keys, seen as [B k R T]."""
        if kv not in self._cells:
            groups, rows, _, room = self.shape
            first = torch.arange(groups * kv * rows, device=self.lengths.device).view(groups, kv, rows) * room
            self._cells[kv] = (first.transpose(1, 2) + self.lengths.view(groups, rows, 1)).flatten()
        return self._cells[kv]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, R, P + T]: 0 where a row sees the column, -inf elsewhere."""
        if window not in self._masks:
            groups, rows, prompt, room = self.shape
            device = self.lengths.device
            prompt_at, own_at = torch.arange(prompt, device=device), torch.arange(room, device=device)
            start, own = self.prompt_lengths[:, None], self.lengths[:, None]
            see_prompt, see_own = prompt_at < start, own_at <= own
            if window is not None:
                see_prompt = see_prompt & (start + own - prompt_at < window)
                see_own = see_own & (own - own_at < window)
            see = torch.cat([see_prompt, see_own], -1)  # [b, P + T]
            mask = torch.zeros(see.shape, dtype=dtype, device=device).masked_fill(~see, -torch.inf)
            self._masks[window] = mask.view(groups, rows, -1)
        return self._masks[window]


class Step:
    """One decode step of one shape, its state on the device. Calling it draws a token for every row."""

    def __init__(self, shape: Shape, layers: dict[int, Layer], forward: Forward, params: SamplingParams, most: int):
        """forward(ids [b], plan) -> logits [b, V]. most: steps of the longest burst."""
        device = next(iter(layers.values())).own(shape)[0].device
        self.shape, self.forward, self.params = shape, forward, params
        self.state = torch.zeros(4, shape.places, dtype=torch.long, device=device)
        self.state[3] = 1
        self.ids, self.lengths, self.last, prompt_lengths = self.state.unbind()  # [b] each
        self.uniform = torch.zeros(most, shape.places, dtype=torch.float64, device=device)  # [steps, b]
        self.drawn = torch.zeros(
            most, 3, shape.places, dtype=torch.float64, device=device
        )  # ids, log-probs, plain ones
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # steps since the burst began
        self.plan = StaticPlan(shape, layers, self.lengths, prompt_lengths)
        self.replay: Callable[[], None] | None = None  # the step as a captured graph

    def load(self, state: Tensor, uniform: Tensor) -> None:
        """Begin a burst. state [4, b]: ids drawn last, own tokens in the cache, most of them ever, prompt tokens."""
        self.state.copy_(state)
        self.uniform.copy_(uniform)
        self.at.zero_()

    def __call__(self) -> None:
        """Device work only: nothing in here waits for a result."""
        self.plan.begin()
        logits = self.forward(self.ids, self.plan)
        ids, logp, plain = draw(logits, self.uniform.index_select(0, self.at)[0], self.params)
        drawn = torch.stack([ids.double(), logp.double(), plain.double()])
        self.drawn.index_copy_(0, self.at, drawn[None])
        self.ids.copy_(ids)
        self.lengths.copy_(torch.minimum(self.lengths + 1, self.last))
        self.at += 1


class StaticDecode:
    """Decodes the live answers of a scheduler in bursts; keeps caches and captured steps between calls."""

    def __init__(
        self,
        forward: Forward,
        addresses: Callable[[], tuple[int, ...]],
        device: torch.device,
        notify: Callable[[str], None],
        steps: int = 8,
    ) -> None:
        """forward(ids [b], plan) -> logits [b, V]; addresses: of every weight that it reads. steps: of a burst."""
        self.forward, self.addresses, self.device, self.notify, self.steps = forward, addresses, device, notify, steps
        self.capturing = device.type == "cuda"
        self.failed = False  # a step could not be captured; steps run one by one then
        self._steps: dict[tuple[Any, ...], Step] = {}
        self.caches = Caches(device, self._drop_steps)
        self._weights_at: tuple[int, ...] = ()
        self._stream: Any = None  # graphs that share a memory pool are captured on one stream
        self._pool: Any = None

    def begin(self, scheduler: Scheduler, drafts: Drafts) -> None:
        """Before the first burst of a call."""
        addresses = self.addresses()
        if addresses != self._weights_at:
            self._drop_steps()
        self._weights_at = addresses
        pool, new = scheduler.pool, drafts.params.max_new_tokens
        rows = min(scheduler.max_rows, len(drafts.lengths))
        members = [min(drafts.n, rows - i) for i in range(0, rows, drafts.n)]
        longest = max(map(len, drafts.prompts))
        self.caches.begin(members, longest, pool.needed(new - 1) * pool.size, pool.total * pool.size)

    def burst(self, scheduler: Scheduler, drafts: Drafts, cache: PromptCache) -> None:
        """Decode every live answer for a few steps, or until it ends. Raises ValueError if logits are not finite."""
        live, params = scheduler.live, drafts.params
        rows = [a.prompt.index * drafts.n + a.number for a in live]
        room = scheduler.width * scheduler.pool.size
        left = params.max_new_tokens - int(drafts.lengths[rows].min())
        steps = min(self.steps, room - max(a.length for a in live), left)
        grid = self.caches.arrange(live, room, cache)
        at = {id(a): i for i, a in enumerate(grid.answers)}
        places = [at[id(a)] for a in live]
        step = self._step(grid.shape, params)
        drawn = self._run(step, self._state(step, live, places, drafts, rows, steps), steps)[:, :, places]
        alive = np.arange(len(live))
        for one in drawn:
            ids, logp, plain = one[:, alive]
            try:
                refuse_non_finite(np.isfinite(logp) & np.isfinite(plain))
            except ValueError:
                self.caches.clear()  # what is not finite shines through masks
                raise
            scheduler.advance([live[i] for i in alive])
            ended = drafts.record([rows[i] for i in alive], ids.astype(np.int64), logp, plain)
            if ended.any():
                scheduler.finish([live[i] for i in alive[ended]])
                alive = alive[~ended]
            if not len(alive):
                break

    def _step(self, shape: Shape, params: SamplingParams) -> Step:
        key = (shape, params.temperature, params.top_k, params.top_p, params.min_p)
        step = self._steps.pop(key, None) or Step(shape, self.caches.layers, self.forward, params, self.steps)
        while len(self._steps) >= MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]  # the one not used for longest
        self._steps[key] = step
        return step

    def _drop_steps(self) -> None:
        self._steps.clear()
        self._pool = None  # a pool whose graphs are all gone must not be given to another

    @staticmethod
    def _state(
        step: Step, live: Sequence[Answer], places: list[int], drafts: Drafts, rows: list[int], steps: int
    ) -> tuple[Tensor, Tensor]:
        """What `Step.load` takes. A place without an answer stays at its first token."""
        state = np.zeros(step.state.shape, dtype=np.int64)
        state[3] = 1
        state[0, places] = drafts.last(rows)
        state[1, places] = [a.length for a in live]
        # A row past its end stays where an answer may still be: a model may have no positions beyond.
        state[2, places] = min(step.shape.room - 1, drafts.params.max_new_tokens - 2)
        state[3, places] = [a.prompt.length for a in live]
        uniform = np.zeros(step.uniform.shape)
        uniform[:steps, places] = drafts.uniforms_ahead(rows, steps)
        return torch.from_numpy(state), torch.from_numpy(uniform)

    def _run(self, step: Step, state: tuple[Tensor, Tensor], steps: int) -> NDArray[np.float64]:
        """[steps, 3, b] ids, log-probs and plain log-probs."""
        if self.capturing and not self.failed and step.replay is None:
            try:
                step.replay = self._capture(step, state)
            except RuntimeError as error:  # a forward that waits for the device, or memory that is not there
                self.failed = True
                self.notify(f"decoding without CUDA graphs: {str(error).splitlines()[0]}")
        step.load(*state)
        run = step.replay or step
        for _ in range(steps):
            run()
        drawn: NDArray[np.float64] = step.drawn[:steps].cpu().numpy()
        return drawn

    def _capture(self, step: Step, state: tuple[Tensor, Tensor]) -> Callable[[], None]:
        """The step as a graph. Warming up writes the keys that the burst's first step will write, and nothing else."""
        standing = state[0].clone()
        standing[2] = standing[1]  # rows do not move on
        with torch.cuda.device(self.device):
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            try:
                # After a failure the capture's own context leaves its stream current; this one does not.
                with torch.cuda.stream(self._stream):
                    for waiting in (True, False):  # libraries set themselves up first
                        step.load(standing, state[1])
                        with _no_waiting(not waiting):
                            step()
                    step.load(standing, state[1])
                    with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                        step()
            finally:
                current.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


@contextmanager
def _no_waiting(on: bool) -> Iterator[None]:
    """Inside, what makes the host wait for the device raises RuntimeError: before it can break a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error" if on else before)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
