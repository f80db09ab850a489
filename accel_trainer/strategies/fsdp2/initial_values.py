"""Where the values of a model come from when it is sharded: each rank's own memory, rank 0's, or files later on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.placement import local_box, local_tensor, materialize, set_target_device
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.cores import cores_of_rank
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.strategies.broadcast_values import broadcast_tensors

__all__ = ["Values", "bring_whole", "compare_values", "hold", "send_differing", "settle"]

_BUFFER_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Values:
    """Parameters and buffers by whether the ranks have values for them, and the same; equal on every rank."""

    differing: list[str]
    """Every rank has values, and they are not the same everywhere."""
    awaited: list[str]
    """Rank 0 has values, and some rank has none."""
    empty: list[str]
    """On the meta device on every rank."""


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _fingerprint(tensor: Tensor) -> bytes:
    """Return what tells values apart, bit by bit; on a device, a buffer at a time is copied to the host."""
    digest = xxhash.xxh3_128()  # no secret to keep: a tenth of sha256's time
    if not tensor.is_meta:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, data.numel(), _BUFFER_BYTES):
            digest.update(data[begin : begin + _BUFFER_BYTES].cpu().numpy().data)
    return bytes(digest.digest())


def _fingerprints(named: Mapping[str, Tensor], process: ProcessContext) -> dict[str, bytes]:
    """Return the fingerprints of tensors, taken on this rank's part of the node's cores."""
    num_threads = min(8, cores_of_rank(process.local_world_size))
    with ThreadPoolExecutor(num_threads) as pool:
        return dict(zip(named, pool.map(_fingerprint, named.values()), strict=True))


def _outline(facts: Mapping[str, Any], name: str) -> str:
    return "absent" if name not in facts else f"{facts[name][0]} in {facts[name][1]}"


def compare_values(model: nn.Module, process: ProcessContext, *, may_await: bool) -> Values:
    """Find out which values the ranks share. Collective: every rank calls it with the same model.

    Args:
        may_await: whether rank 0 may be the only one with values: `fsdp.cpu_ram_efficient_loading`.

    Raises:
        ConfigError: models differ in names, shapes or dtypes; or ranks have no values where that was not asked for.
        ProcessGroupError: the same, on the ranks whose models are as rank 0's.
    """
    named = _named(model)
    prints = _fingerprints(named, process)
    own = {name: (tuple(t.shape), t.dtype, t.is_meta, prints[name]) for name, t in named.items()}
    box: list[Any] = [own if process.is_main else None]
    dist.broadcast_object_list(box, src=0)
    main: Mapping[str, Any] = box[0]
    error: ConfigError | None = None
    differs = [name for name in {**main, **own} if main.get(name, ())[:2] != own.get(name, ())[:2]]
    lacks = [name for name in own if name not in differs and own[name][2] and not main[name][2]]
    extra = [name for name in own if name not in differs and not own[name][2] and main[name][2]]
    kind, where = type(model).__name__, f"rank {process.rank}"
    if differs:
        error = ConfigError(
            f"{kind} is not the same model on {where} as on rank 0: {differs[0]!r} is {_outline(own, differs[0])} here "
            f"and {_outline(main, differs[0])} there; build it from one configuration on every rank"
        )
    elif extra or (lacks and not may_await):
        name = (extra or lacks)[0]
        error = ConfigError(
            f"{name!r} of {kind} is on the meta device on {'rank 0' if extra else where} and has values on "
            f"{where if extra else 'rank 0'}; give it values on every rank, on none, or, with "
            "fsdp.cpu_ram_efficient_loading=true, on rank 0 alone"
        )
    gather_or_raise(process, f"comparison of {kind} over the ranks", error)
    other = [name for name in own if not own[name][2] and own[name][3] != main[name][3]]
    flags = torch.tensor([[name in other, name in lacks] for name in main], dtype=torch.int32, device=process.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    marks = dict(zip(main, flags.tolist(), strict=True))
    return Values(
        differing=[name for name, (is_other, is_lacking) in marks.items() if is_other and not is_lacking],
        awaited=[name for name, (_, is_lacking) in marks.items() if is_lacking],
        empty=[name for name in main if main[name][2]],
    )


def send_differing(model: nn.Module, values: Values, device: torch.device) -> None:
    """Give every rank rank 0's values where they differ; what all ranks have alike is sent nowhere. Collective."""
    if values.differing:
        named = _named(model)
        broadcast_tensors([named[name].detach() for name in values.differing], device)


def hold(model: nn.Module, values: Values, process: ProcessContext) -> dict[str, Tensor]:
    """Return on rank 0 what other ranks wait for, whole as it is before the model is laid out; nothing elsewhere."""
    named = _named(model) if process.is_main and values.awaited else {}
    return {name: named[name].detach() for name in values.awaited if name in named}


def bring_whole(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move what is not sharded to `device`; what has no values yet gets them there."""
    for tensor in tensors:
        if tensor.is_meta:
            set_target_device(tensor, device)
        else:
            tensor.data = tensor.data.to(device)


def settle(
    model: nn.Module, values: Values, held: Mapping[str, Tensor], device: torch.device, shard_device: torch.device
) -> None:
    """Give a model that is laid out the values it waits for; refuse to run it before files have given the rest.

    Collective: what rank 0 holds is sent one whole tensor at a time, and each rank keeps its part.

    Args:
        held: what `hold` returned.
        device: of buffers and parameters that stay whole, and where tensors are exchanged.
        shard_device: of shards: the CPU where they are offloaded.
    """
    named = _named(model)
    for tensor in named.values():
        if tensor.is_meta:
            set_target_device(tensor, shard_device if isinstance(tensor, DTensor) else device)
    for name in values.awaited:
        target = named[name]
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if name in held:
            whole.copy_(held[name])
        dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)  # gloo knows few types
        if target.is_meta:
            materialize(target)
        with torch.no_grad():
            local_tensor(target).copy_(whole[local_box(target).within(Box.full(target.shape))])
    if values.empty:
        _refuse_until_loaded(model)


def _refuse_until_loaded(model: nn.Module) -> None:
    def check(module: nn.Module, args: Any) -> None:
        empty = [name for name, tensor in _named(module).items() if tensor.is_meta]
        if empty:
            raise ConfigError(
                f"{len(empty)} parameter(s) and buffer(s) of {type(module).__name__} have no values yet (first: "
                f"{empty[0]!r}): it was built on the meta device and laid out so; load its weights with "
                "load_checkpoint_in_model(model, directory) before it runs"
            )
        handle.remove()

    # Before FSDP2's own hook, which cannot be tried again once it has met parameters without values.
    handle = model.register_forward_pre_hook(check, prepend=True)
