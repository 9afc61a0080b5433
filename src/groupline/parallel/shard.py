"""A model over several ranks: a copy each, or a share each (FSDP2: parameters, gradients, optimiser state).

Shared out are the decoder layers, one all-gather each. Embeddings, last norm and head stay whole on every rank: the head
is read outside of any module's forward (`models.logprobs.find_head`), and is often the embedding too. Losses are sums
with weights counted over all ranks, so gradients are added up, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from groupline.models.packing import decoder, layers_of
from groupline.parallel.mesh import World, own_share, whole


def shard(model: nn.Module, device: torch.device, compute: torch.dtype, world: World) -> None:
    """Replace the parameters of `model`'s decoder layers by this rank's share of them, on `device`.

    compute: format that they are gathered in; their shares, and sums of gradients, stay in their own.
    """
    mesh = init_device_mesh(device.type, (world.size,))
    half = compute != torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute if half else None, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False
    )
    body = decoder(model)
    layers = layers_of(body)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = {p for p in body.parameters() if id(p) not in inside}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(body, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=outside)
    for layer in layers:
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    # FSDP notes formats at the first pass, by what trains then: if that is a reference's, no adapter does.
    fully_shard.state(body)._lazy_init()  # type: ignore[attr-defined]
    _watch(body, world)


def _watch(body: nn.Module, world: World) -> None:
    """Every pass through the layers gathers them, and may wait for a rank that does not come."""
    passes: list[AbstractContextManager[None]] = []

    def begin(*_: object) -> None:
        passes.append(world.exchange("the layers' weights"))
        passes[-1].__enter__()

    def end(*_: object) -> None:
        passes.pop().__exit__(None, None, None)

    body.register_forward_pre_hook(begin)
    body.register_forward_hook(end, always_call=True)


def is_share(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of it."""
    return isinstance(tensor, DTensor)


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Copy whole values into a tensor of which this rank may hold a share."""
    if isinstance(target, DTensor):
        value = value.to(device=target.device, dtype=target.dtype)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def whole_weights(named: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Whole weights on the CPU, gathered one after another; every rank must call it. keep: else nothing is held."""
    out: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}  # tied ones stay one
    for name, tensor in named:
        key = own_share(tensor).data_ptr()
        if keep and key and key in seen:
            out[name] = seen[key]
            continue
        found = whole(tensor)
        if keep:
            out[name] = found.detach().cpu()
            if not is_share(tensor):
                seen[key] = out[name]
    return out


def sum_gradients(parameters: Sequence[nn.Parameter], world: World) -> None:
    """Add up over ranks the gradients that no share holds: those of shares were added in the backward."""
    world.sum_((p.grad for p in parameters if p.grad is not None and not is_share(p.grad)), "gradients")


@torch.no_grad()
def clip(parameters: Sequence[nn.Parameter], most: float, world: World) -> Tensor:
    """`nn.utils.clip_grad_norm_` where some gradients are shares: returns the norm of all, and scales them to `most`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    shares = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    plain = [g for g in gradients if not isinstance(g, DTensor)]
    device = (shares + plain)[0].device
    square = torch.zeros((), dtype=torch.float64, device=device)
    for g in shares:
        square += torch.linalg.vector_norm(g, dtype=torch.float32).double().square()
    world.sum_([square], "the gradient's norm")
    for g in plain:
        square += torch.linalg.vector_norm(g, dtype=torch.float32).double().square()
    norm = square.sqrt()
    factor = float(torch.clamp(most / (norm + 1e-6), max=1.0))
    if factor < 1:
        for g in shares + plain:
            g.mul_(factor)
    return norm
