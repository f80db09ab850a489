"""Broadcast of rank 0's values: all ranks start from the same, and evaluate the same.

Those of a model that is going to be sharded are compared first: equal ones stay where they are, in each rank's own
memory, and others come from rank 0, or later on from files.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.safetensors_file import chunks_of
from accel_trainer.checkpoint.shards import local_box, local_tensor, materialize, set_target_device
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collectives import broadcast_object
from accel_trainer.runtime.cores import cores_of_rank
from accel_trainer.runtime.process import ProcessContext, use_device
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.torch_private import non_persistent_buffers

# One collective for many small tensors; a copy of one bucket, and not of the model, is in memory at a time.
_BUCKET_BYTES = 64 * 2**20


def broadcast_module_states(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, in buckets of 64 MiB on `device`. Collective."""
    # Without it, a model initialised from different seeds would be other models on other ranks, and nothing would say
    # so. By id: a tied parameter is sent once.
    tensors = {id(t): t.detach() for t in [*module.parameters(), *module.buffers()]}
    broadcast_tensors(tensors.values(), device)


def broadcast_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values of these tensors, in buckets of 64 MiB on `device`. Collective."""
    for bucket in buckets_of(tensors):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), src=0)  # gloo knows few types
        if dist.get_rank() == 0:
            continue
        for tensor, received in zip(bucket, split_like(flat, bucket), strict=True):
            # from_pretrained maps weights from their file: writing equal values would give every rank a copy of the
            # full model in memory.
            if not torch.equal(tensor, received := received.to(tensor.device)):
                tensor.copy_(received)


@torch.no_grad()
def broadcast_buffers(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's saved buffers, which a checkpoint has. Collective."""
    broadcast_tensors(_saved_buffers(model), device)


def _saved_buffers(model: nn.Module) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for module in model.modules():
        left_out = non_persistent_buffers(module)
        own = ((name, value) for name, value in module.named_buffers(recurse=False) if name not in left_out)
        found.update((id(value), value) for _, value in own if not isinstance(value, DTensor))
    return list(found.values())


def share_buffers_in_evaluation(called: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Have all ranks evaluate with rank 0's saved buffers, if a model has any, where the engine does not see to it.

    The first forward of `called`, which the loop calls, in evaluation mode after training is collective then.
    """
    # Statistics of a batch norm are each rank's own since its last forward of training, and rank 0's are saved. DDP
    # sends them before every forward; an evaluation without that would be of another model on each rank.
    if dist.get_world_size() == 1 or not _saved_buffers(model):
        return
    has_trained = False
    # The model holds the hook: a strong reference would make a circle, and its memory wait for the collector.
    owner = weakref.ref(model)

    def follow(module: nn.Module, args: Any) -> None:
        nonlocal has_trained
        inner = owner() or module
        if has_trained and not inner.training:
            broadcast_buffers(inner, device)
        has_trained = inner.training

    called.register_forward_pre_hook(follow)


def buckets_of(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that are not empty in buckets of one dtype, of about 64 MiB together; in one order per call."""
    held: dict[torch.dtype, list[Tensor]] = {}
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        held.setdefault(tensor.dtype, []).append(tensor)
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield from held.values()
            held, size = {}, 0
    yield from held.values()


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the pieces of a flat tensor in the shapes of the tensors that it was put together of."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    yield from (piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True))


# --- a model that is sharded ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Values:
    """Names of parameters and buffers by where their values are; equal on every rank."""

    differing: list[str]
    """Every rank has values, and they are not the same everywhere."""
    awaited: list[str]
    """Rank 0 has values, and some rank has none."""
    empty: list[str]
    """On the meta device on every rank."""


class _Fact(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_meta: bool
    fingerprint: bytes
    """Equal for values that are equal bit by bit."""

    def __str__(self) -> str:
        return f"{self.shape} in {self.dtype}"


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _fact(tensor: Tensor) -> _Fact:
    digest = xxhash.xxh3_128()  # no secret to keep: a tenth of sha256's time
    for chunk in () if tensor.is_meta else chunks_of(tensor):
        digest.update(chunk)
    return _Fact(tuple(tensor.shape), tensor.dtype, tensor.is_meta, bytes(digest.digest()))


def _facts(named: Mapping[str, Tensor], process: ProcessContext) -> dict[str, _Fact]:
    # A device's link has one direction to share, and each thread takes two pinned buffers.
    is_on_host = all(tensor.device.type in ("cpu", "meta") for tensor in named.values())
    num_threads = min(8 if is_on_host else 2, cores_of_rank(process.local_world_size))
    with ThreadPoolExecutor(num_threads, initializer=use_device, initargs=(process.device,)) as pool:
        return dict(zip(named, pool.map(_fact, named.values()), strict=True))


def compare_values(model: nn.Module, process: ProcessContext, *, may_await: bool) -> Values:
    """Compare the ranks' values of a model. Collective: every rank calls it with the same model.

    Args:
        may_await: whether rank 0 may be the only one with values: `fsdp.cpu_ram_efficient_loading`.

    Raises:
        ConfigError: models differ in names, shapes or dtypes; or ranks have no values where that was not asked for.
        ProcessGroupError: the same, on the ranks whose models are as rank 0's.
    """
    named = _named(model)
    own = _facts(named, process)
    # Fingerprints travel, not values: ranks that loaded the same files send a few bytes for each tensor.
    main: Mapping[str, _Fact] = broadcast_object(own, process)
    kind = type(model).__name__
    # Every rank learns of the error: one that went on alone would wait in the first collective for ever.
    error = _model_mismatch(kind, process.rank, own, main)
    error = error or _device_mismatch(kind, process.rank, own, main, may_await)
    gather_or_raise(process, f"comparison of {kind} over the ranks", error)
    # 1 where a rank's values differ from rank 0's, 2 where it has none.
    found = [(own[name] != fact) * (1 + own[name].is_meta) for name, fact in main.items()]
    flags = torch.tensor(found, dtype=torch.int32, device=process.device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    marks = dict(zip(main, flags.tolist(), strict=True))
    return Values(
        differing=[name for name, mark in marks.items() if mark == 1],
        awaited=[name for name, mark in marks.items() if mark == 2],
        empty=[name for name, fact in main.items() if fact.is_meta],
    )


def _model_mismatch(kind: str, rank: int, own: Mapping[str, _Fact], main: Mapping[str, _Fact]) -> ConfigError | None:
    for name in {**main, **own}:
        if main.get(name, ())[:2] != own.get(name, ())[:2]:
            return ConfigError(
                f"{kind} is not the same model on rank {rank} as on rank 0: {name!r} is {own.get(name, 'absent')} here "
                f"and {main.get(name, 'absent')} there; build it from one configuration on every rank"
            )
    return None


def _device_mismatch(
    kind: str, rank: int, own: Mapping[str, _Fact], main: Mapping[str, _Fact], may_await: bool
) -> ConfigError | None:
    extra = next((name for name in own if main[name].is_meta and not own[name].is_meta), None)
    lacking = None if may_await else next((name for name in own if own[name].is_meta and not main[name].is_meta), None)
    name, meta_rank, other_rank = (lacking, rank, 0) if extra is None else (extra, 0, rank)
    if name is None:
        return None
    return ConfigError(
        f"{name!r} of {kind} is on the meta device on rank {meta_rank} and has values on rank {other_rank}; give it "
        "values on every rank, on none, or, with fsdp.cpu_ram_efficient_loading=true, on rank 0 alone"
    )


def broadcast_differing(model: nn.Module, values: Values, device: torch.device) -> None:
    """Give every rank rank 0's values where they differ; equal ones are not sent. Collective."""
    if values.differing:
        named = _named(model)
        broadcast_tensors([named[name].detach() for name in values.differing], device)


def awaited_tensors(model: nn.Module, values: Values, process: ProcessContext) -> dict[str, Tensor]:
    """Return on rank 0 the tensors that other ranks wait for, before the model is sharded; nothing elsewhere."""
    named = _named(model) if process.is_main and values.awaited else {}
    return {name: named[name].detach() for name in values.awaited if name in named}


def move_unsharded(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move tensors that are not sharded to `device`; a meta tensor gets its memory there later."""
    for tensor in tensors:
        if tensor.is_meta:
            set_target_device(tensor, device)
        else:
            tensor.data = tensor.data.to(device)


def fill_sharded_model(
    model: nn.Module, values: Values, awaited: Mapping[str, Tensor], device: torch.device, shard_device: torch.device
) -> None:
    """Give a sharded model the values it waits for; refuse to run it before files have given the rest.

    Collective: rank 0 sends one unsharded tensor at a time, and each rank keeps its shard.

    Args:
        device: of buffers and unsharded parameters, and where tensors are exchanged.
        shard_device: of shards: the CPU where they are offloaded.
    """
    named = _named(model)
    for tensor in named.values():
        if tensor.is_meta:
            set_target_device(tensor, shard_device if isinstance(tensor, DTensor) else device)
    # One at a time: no rank but the first ever has memory for the model.
    for name in values.awaited:
        target = named[name]
        full = torch.empty(target.shape, dtype=target.dtype, device=device)
        if name in awaited:
            full.copy_(awaited[name])
        dist.broadcast(full.reshape(-1).view(torch.uint8), src=0)  # gloo knows few types
        if target.is_meta:
            materialize(target)
        with torch.no_grad():
            local_tensor(target).copy_(full[local_box(target).within(Box.full(target.shape))])
    if not values.empty:
        return

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
