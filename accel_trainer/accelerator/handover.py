"""What a rank takes from another where they meet: everything where it joins, an update where it is behind.

It travels over the process group, from rank 0 to the last rank, or between the ranks of two replicas that have the same
shards; the others do not wait. Tensors keep dtype and values bit by bit, but for random streams, which are made of
those of the rank that sends and of the number of the new one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit, TokenWindow
from accel_trainer.checkpoint.run_state import decode, encode
from accel_trainer.checkpoint.shards import local_tensor, wrap_local_like
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rng import get_rng_state, take_streams
from accel_trainer.runtime.torch_private import between_two_ranks, group_timeout
from accel_trainer.strategies.broadcast_values import buckets_of, split_like

if TYPE_CHECKING:
    from accel_trainer import Accelerator


@dataclass(frozen=True, slots=True)
class Places:
    """Where the ranks of a group stood when they met: updates, collectives of the loop, and micro-batches begun."""

    own: list[int]
    ahead: list[int]
    behind: dict[int, list[int]]
    have_voted: bool
    """Whether all had come to the vote of their update."""
    num_owed: int
    """Micro-batches that this rank gives up, for others have begun or read them, or it has read one itself."""

    @classmethod
    def of(cls, said: Mapping[int, dict[str, Any]], rank: int) -> Places:
        """Return the places by each rank's word, as `rank` sees them."""
        ahead = max(each["place"] for each in said.values())
        behind = {rank: each["place"] for rank, each in said.items() if each["place"] != ahead}
        own = said[rank]["place"]
        begun = [max(each["place"][2:]) + each["in_hand"] for each in said.values() if each["place"][0] == ahead[0]]
        num_owed = max(begun) - (0 if own[0] < ahead[0] else max(own[2:]))
        return cls(own, ahead, behind, all(each["has_voted"] for each in said.values()), num_owed)

    @property
    def is_behind_update(self) -> bool:
        """Whether others have completed an update that this rank has not."""
        return self.own[0] < self.ahead[0]


def why_not_level(said: list[dict[str, Any]]) -> str:
    """Return why ranks cannot go on, by the answers of all; empty where they can. The same on all of them."""
    reason: str = next((each["reason"] for each in said if each["reason"]), "")
    places = {tuple(each["place"]) for each in said}
    if reason or len(places) == 1 or _are_near(said, len(places)):
        return reason
    return "some had completed an update, or a collective, that others had not"


def _are_near(said: list[dict[str, Any]], num_places: int) -> bool:
    """Whether those behind are one update behind, or one collective of the loop, and can take it."""
    # All ranks have to come to each: nobody can be two ahead.
    updates, calls, *_ = max(each["place"] for each in said)
    behind = [each for each in said if each["place"][:2] != [updates, calls]]
    steps = {(updates - each["place"][0], calls - each["place"][1]) for each in behind}
    # Replicas of shards need not have begun the same micro-batch of an update.
    if not said[0]["votes"] and num_places > 2 - (not steps):
        return False
    return len(steps) <= 1 and steps <= {(0, 1), (1, 0)} and all(each["can_take"] for each in behind)


def _wait(work: dist.Work | None) -> None:
    """Wait to the group's timeout: by itself gloo waits as long as it had to connect, to the bound of a loss there."""
    assert work is not None
    work.wait(group_timeout())


@between_two_ranks()
def send(value: Any, to_rank: int, device: torch.device) -> int:
    """Send a state of plain data and tensors to a rank, which calls `receive`; return the bytes of the tensors."""
    tensors: dict[str, Tensor] = {}
    outline = encode(value, tensors)
    kinds = {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in tensors.items()}
    text = torch.frombuffer(bytearray(pickle.dumps((outline, kinds))), dtype=torch.uint8)
    _wait(dist.isend(torch.tensor([len(text)]), to_rank))
    _wait(dist.isend(text, to_rank))
    for bucket in buckets_of(tensors.values()):
        flat = torch.cat([tensor.detach().reshape(-1).to(device) for tensor in bucket])
        _wait(dist.isend(flat.view(torch.uint8), to_rank))  # gloo knows few types
    return sum(tensor.nbytes for tensor in tensors.values())


@between_two_ranks()
def receive(from_rank: int, device: torch.device) -> Any:
    """Return what a rank has sent by `send`."""
    _wait(dist.irecv(size := torch.empty(1, dtype=torch.int64), from_rank))
    _wait(dist.irecv(text := torch.empty(int(size), dtype=torch.uint8), from_rank))
    outline, kinds = pickle.loads(text.numpy().tobytes())
    # The steps of an optimizer lie on the host, for instance.
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device if device.type == kind else kind)
        for name, (shape, dtype, kind) in kinds.items()
    }
    for bucket in buckets_of(tensors.values()):
        flat = torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype, device=device)
        _wait(dist.irecv(flat.view(torch.uint8), from_rank))
        for tensor, values in zip(bucket, split_like(flat, bucket), strict=True):
            tensor.copy_(values)
    return decode(outline, tensors)


def collect_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return what an Accelerator has between two updates. Not collective; tensors are its own, and no copies."""
    if accelerator._loss_scale is not None:
        accelerator._loss_scale.flush()
    prepared, guard = accelerator._prepared, accelerator.nonfinite_guard
    return {
        "units": [_collect_unit(each) for each in prepared.units],
        "optimizers": [_collect_optimizer(each.optimizer) for each in prepared.optimizers],
        "schedulers": [each.state_dict() for each in prepared.schedulers],
        "objects": {name: each.state_dict() for name, each in accelerator._registered.objects.items()},
        "loaders": [each.hand_over() for each in prepared.dataloaders],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "streams": get_rng_state(),
        "updates": (PROGRESS.updates, 0 if guard is None else guard.update),
    }


def take_state(accelerator: Accelerator, state: Mapping[str, Any], number: int) -> None:
    """Go on with the `collect_state` of another rank, as rank `number` of the job."""
    prepared = accelerator._prepared
    _require_same({kind: (len(state[kind]), len(getattr(prepared, kind))) for kind in _COUNTED})
    take_update(accelerator, state)
    for optimizer, given in zip(prepared.optimizers, state["optimizers"], strict=True):
        for group, values in zip(optimizer.optimizer.param_groups, given["groups"], strict=True):
            group.update(values)
    for scheduler, given in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(given)
    for name, item in accelerator._registered.objects.items():
        item.load_state_dict(state["objects"][name])
    # The others may have prepared more since they began, for an evaluation.
    for loader, given in zip(prepared.dataloaders, state["loaders"], strict=False):
        loader.take_over(given)
    take_streams(state["streams"], number)
    accelerator._pass_start.has_loaded_state = True


def take_update(accelerator: Accelerator, state: Mapping[str, Any]) -> None:
    """Take what the last update has changed, of the `collect_state` of another rank: no schedules, nor their rates."""
    prepared, guard = accelerator._prepared, accelerator.nonfinite_guard
    for unit, given in zip(prepared.units, state["units"], strict=True):
        _take_unit(unit, given, accelerator.readers)
    for optimizer, given in zip(prepared.optimizers, state["optimizers"], strict=True):
        _take_optimizer(optimizer.optimizer, given["states"])
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    PROGRESS.updates, num_looked_at = state["updates"]
    if guard is not None:
        guard.update = num_looked_at


_COUNTED = ("units", "optimizers", "schedulers")


def _require_same(counts: Mapping[str, tuple[int, int]]) -> None:
    differing = [f"{given} {kind} there, {own} here" for kind, (given, own) in counts.items() if given != own]
    if differing:
        raise ConfigError(
            f"the other ranks have prepared other things than this one ({'; '.join(differing)}); prepare all of them "
            "before load_state(), by which a rank joins the others"
        )


def _values(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from ((f"buffer {name}", value) for name, value in module.named_buffers())


def _collect_unit(prepared: PreparedUnit) -> dict[str, Any]:
    unit, averages = prepared.unit, prepared.unit.averages
    found = {} if averages is None else {name: averages.of(p) for name, p in unit.module.named_parameters()}
    return {
        "values": {name: local_tensor(value) for name, value in _values(unit.module)},
        "averages": {name: local_tensor(average) for name, average in found.items() if average is not None},
        "tokens": None if prepared.tokens is None else prepared.tokens.state_dict(),
    }


@torch.no_grad()
def _take_unit(prepared: PreparedUnit, given: Mapping[str, Any], readers: ProcessContext) -> None:
    unit = prepared.unit
    for name, value in _values(unit.module):
        local_tensor(value).copy_(given["values"][name])
    if unit.averages is not None:
        parameters = dict(unit.module.named_parameters())
        averages = {parameters[name]: average for name, average in given["averages"].items()}
        unit.averages.resume({p: wrap_local_like(p, average) for p, average in averages.items()})
    if given["tokens"] is not None:
        prepared.tokens = prepared.tokens or TokenWindow(readers)
        prepared.tokens.load_state_dicts([given["tokens"]], is_own=True)


def _collect_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return groups, and the state of each parameter in their order; `load_state_dict` would cast it."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return {"groups": groups, "states": [None if state is None else _collect_shards(state) for state in states]}


def _collect_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    shards = [name for name, value in state.items() if isinstance(value, DTensor)]
    values = {name: local_tensor(value) if isinstance(value, Tensor) else value for name, value in state.items()}
    return {"values": values, "shards": shards}


def _take_optimizer(optimizer: Optimizer, states: Sequence[Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, state in zip(parameters, states, strict=True):
        if state is not None:
            shards = {name: wrap_local_like(parameter, state["values"][name]) for name in state["shards"]}
            optimizer.state[parameter] = state["values"] | shards
