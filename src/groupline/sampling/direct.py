"""One decode step of a Llama-shaped decoder, written out: what its modules compute, in a third of the operations.

For a small model on a CPU most of a decode step is the time between operations. Here query, key and value are one
product, so are gate and up, norms and rotations touch queries and keys together, and residuals are added by the product
that makes them. Used only where it gives the modules' own numbers (`direct_step`).

Legend: b rows, H hidden width, h query heads, k key/value heads, d head width, I intermediate width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from groupline.models.attention import PackedPlan, planned
from groupline.models.products import Prepacked, can_prepack, linear
from groupline.sampling.cache import DecodePlan, PromptCache
from groupline.sampling.scheduler import Answer, Prompt

_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_SILU = (nn.SiLU, SiLUActivation)
_MOVING_ROTATIONS = ("dynamic", "longrope")  # their angles depend on the longest sequence


class DirectStep:
    """Runs one token a row through `body`, a decoder of the family; see `direct_step`.

    Joined weights are kept here: taken from the modules at each `refresh`. A weight that only the sampler has (a folded
    LoRA weight) moves into the joined one instead of being copied.
    """

    def __init__(self, body: Any, shared: set[int], prepack: bool = False) -> None:
        """shared: ids of the parameters that are not the sampler's own, so that they must stay where they are."""
        self.body = body
        self.layers = [_Layer(layer, shared, prepack) for layer in body.layers]
        self.norm = _Norm([body.norm])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        for layer in self.layers:
            for product in layer.products:
                product.refresh()

    def release(self) -> None:
        """Give prepacked weights back; `refresh` makes them anew."""
        for layer in self.layers:
            for product in layer.products:
                if isinstance(product, Prepacked):
                    product.release()

    def __call__(self, ids: Tensor, plan: DecodePlan) -> Tensor:
        """ids [b] -> hidden states [b, H] after the last norm. Advances nothing: the plan's rows are at this token."""
        x = self.body.embed_tokens(ids)
        cos, sin = (t[0].unsqueeze(1) for t in self.body.rotary_emb(x, plan.position_ids[None]))  # [b, 1, d]
        for index, layer in enumerate(self.layers):
            x = layer(x, index, cos, sin, plan)
        hidden: Tensor = self.norm(x)
        return hidden


class _Layer:
    def __init__(self, layer: Any, shared: set[int], prepack: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.width = attention.head_dim
        self.scaling = float(attention.scaling)
        self.window = getattr(attention, "sliding_window", None)
        self.heads, self.kv_heads = (p.weight.shape[0] // self.width for p in (attention.q_proj, attention.k_proj))
        self.silu = type(mlp.act_fn) in _SILU
        self.act = mlp.act_fn
        self.first, self.second = _Norm([layer.input_layernorm]), _Norm([layer.post_attention_layernorm])
        self.head_norm = None
        if hasattr(attention, "q_norm"):
            self.head_norm = _Norm([attention.q_norm] * self.heads + [attention.k_norm] * self.kv_heads)
        self.qkv = _product([attention.q_proj, attention.k_proj, attention.v_proj], shared, prepack)
        self.out, self.down = (_product([m], shared, prepack) for m in (attention.o_proj, mlp.down_proj))
        self.products = [self.qkv, self.out, self.down]
        self.fused = isinstance(self.down, Prepacked)
        if self.fused:  # two products, as each can take an elementwise step with it
            self.gate, self.up = (_product([m], shared, prepack) for m in (mlp.gate_proj, mlp.up_proj))
            self.products += [self.gate, self.up]
        else:
            self.gate_up = _product([mlp.gate_proj, mlp.up_proj], shared, prepack)
            self.products.append(self.gate_up)

    def __call__(self, x: Tensor, index: int, cos: Tensor, sin: Tensor, plan: DecodePlan) -> Tensor:
        b, turned = len(x), self.heads + self.kv_heads
        qkv = self.qkv(self.first(x)).reshape(b, turned + self.kv_heads, self.width)
        qk = qkv[:, :turned]
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = _rotate(qk, cos, sin)
        a = plan.attend(
            index, qk[:, : self.heads], qk[:, self.heads :], qkv[:, turned:], scaling=self.scaling, window=self.window
        )
        if not self.fused:
            x = x + self.out(a.reshape(b, -1))
            gate, up = self.gate_up(self.second(x)).chunk(2, -1)
            gate = nn.functional.silu(gate, inplace=True) if self.silu else self.act(gate)
            return x + self.down(gate * up)  # type: ignore[no-any-return]
        x = self.out.with_other(a.reshape(b, -1), x, "add")
        y = self.second(x)
        gate = self.gate(y, "swish") if self.silu else self.act(self.gate(y))
        return self.down.with_other(self.up.with_other(y, gate, "mul"), x, "add")  # type: ignore[no-any-return]


def _product(modules: list[Any], shared: set[int], prepack: bool) -> Any:
    """Linear layers of one input as one product."""
    if prepack and all(can_prepack(m.weight) for m in modules):
        return Prepacked([m.weight for m in modules], [m.bias for m in modules])
    return _Joined(modules, shared)


class _Joined:
    """Linear layers of one input as one product: weights and biases one below the other."""

    def __init__(self, modules: list[Any], shared: set[int]) -> None:
        sizes = [m.weight.shape[0] for m in modules]
        self.weight = modules[0].weight.new_empty(sum(sizes), modules[0].weight.shape[1])
        self.bias = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        if modules[0].bias is not None:
            self.bias = modules[0].bias.new_empty(sum(sizes))
            self._copies += [(p, m.bias) for p, m in zip(self.bias.split(sizes), modules, strict=True)]
        for part, module in zip(self.weight.split(sizes), modules, strict=True):
            if id(module.weight) in shared:
                self._copies.append((part, module.weight))
            else:
                with torch.no_grad():
                    part.copy_(module.weight)
                    module.weight.set_(part)

    def refresh(self) -> None:
        for mine, theirs in self._copies:
            mine.copy_(theirs)

    def tensors(self) -> list[Tensor | None]:
        """What a product reads."""
        return [self.weight, self.bias]

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Norm:
    """x / rms(x) * weight over the last dimension; one module, or one a head for x [b, heads, d]."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules
        module = modules[0]
        self.eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
        self._root = module.weight.new_tensor(self.eps**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:  # as the modules do: in fp32, then back
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return self._weight() * wide.to(x.dtype)
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).div_(x.shape[-1] ** 0.5).hypot_(self._root)
        out: Tensor = (x / rms).mul_(self._weight())
        return out

    def _weight(self) -> Tensor:
        if len(self._modules) == 1:
            weight: Tensor = self._modules[0].weight
            return weight
        return torch.stack([m.weight for m in self._modules])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, heads, d], cos and sin [b, 1, d] whose halves are alike -> x cos + rotate_half(x) sin."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def direct_step(body: Any, shared: set[int], prepack: bool = False) -> tuple[DirectStep | None, str]:
    """A `DirectStep` for `body`, whose attention is packed, or None and why its modules must run instead.

    prepack: keep weights in a layout of their own, where the CPU has one; a copy of all weights.
    Checks the shape of the layers, then compares the two on a prefilled prompt with three answers.
    """
    reason = other_shape(body)
    if reason:
        return None, reason
    direct = DirectStep(body, shared, prepack)
    difference = _difference(direct, body)
    limit = 1e-4 if next(body.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    if difference < limit:
        return direct, ""
    return None, f"its step differs by {difference:.1e} of the largest value"


def other_shape(body: Any) -> str | None:
    """What `body` has that the written-out step has not; None: nothing."""
    if not all(hasattr(body, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return f"{type(body).__name__} has other parts than embed_tokens, layers, norm and rotary_emb"
    if getattr(body.rotary_emb, "rope_type", "default") in _MOVING_ROTATIONS:
        return f"its rotary angles are of the kind {body.rotary_emb.rope_type}"
    for index, layer in enumerate(body.layers):
        if _children(layer) != set(_PARTS):
            return f"layer {index} has other parts than {', '.join(_PARTS)}"
        if _children(layer.self_attn) - {"q_norm", "k_norm"} != {"q_proj", "k_proj", "v_proj", "o_proj"}:
            return f"the attention of layer {index} has other parts"
        if _children(layer.mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
            return f"the MLP of layer {index} has other parts"
        products = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        if len(products) != 7 or any(type(m) is not nn.Linear for m in products):
            return f"a product of layer {index} is not a plain linear layer"
    return None


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


@torch.inference_mode()
def _difference(direct: DirectStep, body: Any) -> float:
    """Largest difference of hidden states from the modules' over two steps, relative to the largest of them."""
    device = next(body.parameters()).device
    prompt = Prompt(0, 3, 4, pages=[0])
    answers = [Answer(prompt, i, pages=[0]) for i in range(3)]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(1000, body.embed_tokens.num_embeddings), (3, 3), generator=draw).to(device)
    cache = PromptCache(device)
    cache.begin([prompt], {0})
    with planned(PackedPlan([3], [[]], device, keep=cache.keep)):
        body(input_ids=ids[:1], position_ids=torch.arange(3, device=device)[None], use_cache=False)
    plans = DecodePlan(cache, answers, 4), DecodePlan(cache, answers, 4)
    worst = 0.0
    for row in ids[1:]:
        with planned(plans[0]):
            theirs = body(input_ids=row[None], position_ids=plans[0].position_ids[None], use_cache=False)
        ours, expected = direct(row, plans[1]), theirs.last_hidden_state[0]
        worst = max(worst, float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-9)))
        for plan in plans:
            plan.step()
    return worst if worst == worst else float("inf")
