"""What a rank that joins a job, or is an update behind, takes from one of the others: all that training goes on with.

It travels over the process group, from one rank to another; the others do not wait. Tensors keep dtype and values
bit by bit, but for random streams, which are made of those of rank 0 and of the number of the new rank. Of a sharded
tensor the shard travels, to a rank that has the same one in another replica. Who gives to whom follows from where all
ranks say that they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit, TokenWindow
from accel_trainer.checkpoint.run_state import decode, encode
from accel_trainer.checkpoint.shards import local_tensor
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rng import get_rng_state, take_streams
from accel_trainer.runtime.torch_private import between_two_ranks
from accel_trainer.strategies.broadcast_values import buckets_of, split_like

if TYPE_CHECKING:
    from accel_trainer import Accelerator


@between_two_ranks()
def send(value: Any, to_rank: int, device: torch.device) -> int:
    """Send a state of plain data and tensors to a rank, which calls `receive`; return the bytes of the tensors."""
    tensors: dict[str, Tensor] = {}
    outline = encode(value, tensors)
    layouts = {name: (t.placements, t.shape, t.stride()) for name, t in tensors.items() if isinstance(t, DTensor)}
    own = {name: local_tensor(tensor) for name, tensor in tensors.items()}
    kinds = {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in own.items()}
    dist.send_object_list([(outline, kinds, layouts)], dst=to_rank, device=device)
    for bucket in buckets_of(own.values()):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.send(flat.view(torch.uint8), dst=to_rank)  # gloo knows few types
    return sum(tensor.nbytes for tensor in own.values())


@between_two_ranks()
def receive(from_rank: int, device: torch.device, units: Sequence[PreparedUnit] = ()) -> Any:
    """Return what a rank has sent by `send`. `units`: on whose mesh sharded tensors are."""
    received: list[Any] = [None]
    dist.recv_object_list(received, src=from_rank, device=device)
    outline, kinds, layouts = received[0]
    # The steps of an optimizer lie on the host, for instance.
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device if device.type == kind else kind)
        for name, (shape, dtype, kind) in kinds.items()
    }
    for bucket in buckets_of(tensors.values()):
        flat = torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype, device=device)
        dist.recv(flat.view(torch.uint8), src=from_rank)
        for tensor, values in zip(bucket, split_like(flat, bucket), strict=True):
            tensor.copy_(values)
    for name, (placements, shape, stride) in layouts.items():
        tensors[name] = DTensor.from_local(
            tensors[name], _mesh_of(units), placements, run_check=False, shape=shape, stride=stride
        )
    return decode(outline, tensors)


def _mesh_of(units: Sequence[PreparedUnit]) -> DeviceMesh:
    return next(p.device_mesh for each in units for p in each.unit.module.parameters() if isinstance(p, DTensor))


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


def collect_gradients(accelerator: Accelerator) -> list[dict[str, Any]]:
    """Return the gradients of an update that is complete but for its step, by unit. Not collective; no copies."""
    return [
        {
            "values": {name: p.grad for name, p in each.unit.module.named_parameters() if p.grad is not None},
            "tokens": None if each.tokens is None else each.tokens.state_dict(),
        }
        for each in accelerator._prepared.units
    ]


def take_gradients(accelerator: Accelerator, given: Sequence[Mapping[str, Any]]) -> None:
    """Have copies of the `collect_gradients` of another rank for the present update, whose window is complete."""
    for prepared, own in zip(accelerator._prepared.units, given, strict=True):
        for name, parameter in prepared.unit.module.named_parameters():
            gradient = own["values"].get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        _take_tokens(prepared, own, accelerator.readers)
        prepared.corrected = True


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
        "values": dict(_values(unit.module)),
        "averages": {name: average.detach() for name, average in found.items() if average is not None},
        "tokens": None if prepared.tokens is None else prepared.tokens.state_dict(),
    }


@torch.no_grad()
def _take_unit(prepared: PreparedUnit, given: Mapping[str, Any], readers: ProcessContext) -> None:
    unit = prepared.unit
    for name, value in _values(unit.module):
        value.copy_(given["values"][name])
    if unit.averages is not None:
        parameters = dict(unit.module.named_parameters())
        unit.averages.resume({parameters[name]: average for name, average in given["averages"].items()})
    _take_tokens(prepared, given, readers)


def _take_tokens(prepared: PreparedUnit, given: Mapping[str, Any], readers: ProcessContext) -> None:
    if given["tokens"] is not None:
        prepared.tokens = prepared.tokens or TokenWindow(readers)
        prepared.tokens.load_state_dicts([given["tokens"]], is_own=True)


def _collect_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return groups, and the state of each parameter in their order; `load_state_dict` would cast it."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return {"groups": groups, "states": [None if state is None else dict(state) for state in states]}


def _take_optimizer(optimizer: Optimizer, states: Sequence[Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, state in zip(parameters, states, strict=True):
        if state is not None:
            optimizer.state[parameter] = state


class Handover(Protocol):
    """What a loop has beside the Accelerator, as plain data and tensors, for ranks that join."""

    def give(self) -> Any:
        """Return it on a rank that has it."""

    def take(self, given: Any) -> None:
        """Go on with what `give` of another rank has returned."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the ranks of a group stood when they met: updates, collectives of the loop, and micro-batches begun."""

    places: list[list[int]]
    """Of each rank. Those of a replica that has all gradients of an update that others have completed are behind it."""
    number: int
    """Of this rank in the group."""
    size: int
    """Of a replica."""
    lacks_update: bool
    """Whether others have completed an update, and this rank has yet to step."""
    norm: float
    """Of the last gradients that those ahead have clipped."""

    @classmethod
    def of(cls, said: Mapping[int, dict[str, Any]], members: Sequence[int], rank: int, size: int) -> Places:
        """Return the places by each rank's word, as `rank` sees them; some that have met may be no `members` by now."""
        foremost = max(said.values(), key=lambda each: each["place"])
        updates, places = foremost["place"][0], []
        for replica in _replicas([said[member] for member in members if member in said], size):  # the last may join
            is_complete = _has_gradients(replica, updates)
            places += [_complete(each["place"], updates) if is_complete else each["place"] for each in replica]
        # Where all that were ahead are lost by now, and nobody has their gradients, the others begin together again.
        lacks_update = said[rank]["place"][0] < max(places)[0]
        return cls(places, members.index(rank), size, lacks_update, foremost["norm"])

    @property
    def own(self) -> list[int]:
        """That of this rank."""
        return self.places[self.number]

    @property
    def ahead(self) -> list[int]:
        """The foremost."""
        return max(self.places)

    @property
    def must_step(self) -> bool:
        """Whether this rank has the gradients of the update that it lacks."""
        return self.lacks_update and not self.is_late

    @property
    def late(self) -> list[int]:
        """Those that have to be given what others have: an update, or the result of a collective."""
        return [number for number, place in enumerate(self.places) if place[:2] < self.ahead[:2]]

    @property
    def is_late(self) -> bool:
        """Whether this rank is."""
        return self.number in self.late

    @property
    def sources(self) -> dict[int, int]:
        """Which rank gives it to each that is late: of the first replica that has it, the one with the same shards."""
        late = self.late
        able = [number for number in range(len(self.places)) if number not in late]
        return {number: able[number % self.size % len(able)] for number in late}  # of a collective all have the result


def _complete(place: list[int], updates: int) -> list[int]:
    """Return the place of a rank at `place` behind its step of an update."""
    return place if place[0] == updates else [updates, place[1], *(0 for _ in place[2:])]


def _replicas(said: Sequence[dict[str, Any]], size: int) -> list[Sequence[dict[str, Any]]]:
    return [said[first : first + size] for first in range(0, len(said), size)]


def _has_gradients(replica: Sequence[dict[str, Any]], updates: int) -> bool:
    """Whether each rank of a replica has completed so many updates, or has all gradients of the last of them."""
    return all(each["place"][0] == updates or each["has_voted"] for each in replica)


def find_reason(said: list[dict[str, Any]], size: int) -> str:
    """Return why ranks cannot go on, by the answers of all; empty where they can. The same on all of them."""
    reason: str = next((each["reason"] for each in said if each["reason"]), "")
    places = {tuple(each["place"]) for each in said}
    if reason or len(places) == 1 or _are_near(said, len(places), size):
        return reason
    return "some had completed an update, or a collective, that others had not"


def _are_near(said: list[dict[str, Any]], num_places: int, size: int) -> bool:
    """Whether those behind are one update behind, or one collective of the loop, and can take it."""
    # All ranks have to come to each: nobody can be two ahead.
    updates, calls, *_ = max(each["place"] for each in said)
    behind = [each for each in said if each["place"][:2] != [updates, calls]]
    steps = {(updates - each["place"][0], calls - each["place"][1]) for each in behind}
    # Replicas of shards need not have begun the same micro-batch of an update.
    if not said[0]["votes"] and num_places > 2 - (not steps):
        return False
    if any(_is_torn(replica, updates) for replica in _replicas(said, size)):
        return False
    return len(steps) <= 1 and steps <= {(0, 1), (1, 0)} and all(each["can_take"] for each in behind)


def _is_torn(replica: Sequence[dict[str, Any]], updates: int) -> bool:
    """Whether some ranks of a replica have completed an update and others cannot: none of those has their shards."""
    return max(each["place"][0] for each in replica) == updates and not _has_gradients(replica, updates)
