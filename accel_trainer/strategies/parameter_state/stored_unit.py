"""A stored unit, for those who load it: its outline, how it fits a module, and which of its files a rank needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accel_trainer.checkpoint.format.boxes import Box
from accel_trainer.checkpoint.format.json_codec import decode
from accel_trainer.checkpoint.format.manifest import Manifest, TensorEntry
from accel_trainer.checkpoint.reader import StoredCheckpoint
from accel_trainer.checkpoint.shards import StoredShards
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.strategies.parameter_state.matching import plan_model_load, shape_of

__all__ = ["ENGINE", "Pending", "decode_optimizer", "files_with", "fit_model", "read_outline"]

ENGINE = "torch"
_STATE = "optimizer.state"

Held = Mapping[str, tuple[tuple[int, ...], Sequence[Box]]]
"""Whole shapes of tensors by name, and the boxes that a rank has of them."""


class Pending:
    """A tensor of the optimizer's state that is still in its file."""

    def __init__(self, name: str, as_array: bool = False) -> None:
        self.name = name
        self.as_array = as_array

    def numpy(self) -> Pending:
        """Return what becomes an array."""
        return Pending(self.name, as_array=True)


def read_outline(stored: StoredCheckpoint, prefix: str, module: nn.Module, engine: str) -> Any:
    """Return what PREFIX.json holds.

    Args:
        engine: what trains `module`, for the message.

    Raises:
        IncompatibleCheckpointError: the state has another layout.
    """
    outline = stored.json(f"{prefix}.json")
    if outline["engine"] != ENGINE:
        raise IncompatibleCheckpointError(
            f"{stored.path.absolute()} was saved by {outline['engine']!r}, whose state has a layout of its own, and "
            f"this run trains {type(module).__name__} with {engine}; load it with the strategy that saved it, or load "
            f"the weights that `accel-trainer ckpt export {stored.path} OUT` makes of it"
        )
    return outline


def decode_optimizer(stored: StoredCheckpoint, outline: Any, parts: StoredShards, module: nn.Module) -> Any:
    """Return the state that an outline of PREFIX.json describes, its tensors pending.

    Raises:
        IncompatibleCheckpointError: there is none.
    """
    if outline is None:
        raise IncompatibleCheckpointError(
            f"{stored.path.absolute()} holds no optimizer state for {type(module).__name__}, which has an "
            "optimizer; an optimizer is never reset silently: load the weights alone to start it anew"
        )
    pending: Any = {name: Pending(name) for name in parts}
    return decode(outline, pending)


def fit_model(
    stored: StoredCheckpoint,
    parts: StoredShards,
    tied: Mapping[str, str],
    module: nn.Module,
    own: Mapping[str, Tensor],
    shape_of: Callable[[Tensor], tuple[int, ...]] = shape_of,
) -> list[tuple[str, str]]:
    """Return (own name, stored name) for each distinct tensor of a module; see `matching.plan_model_load`.

    Raises:
        IncompatibleCheckpointError: names or shapes differ.
    """
    known = {name: torch.empty(parts.shape(name), device="meta") for name in parts}
    known |= {alias: known[name] for alias, name in tied.items()}
    plan = plan_model_load(module, own, known, True, shape_of)
    if isinstance(plan, str):
        raise IncompatibleCheckpointError(f"{stored.path.absolute()}: {plan}")
    return [(name, tied.get(found, found)) for name, found in plan]


def files_with(manifest: Manifest, prefix: str, weights: Held, state: Held) -> set[str]:
    """Return the files of a unit that a rank may need.

    Args:
        weights: what it has of the model.
        state: of which parts of parameters it has the optimizers' state; that is laid out as they are.
    """
    files = {f"{prefix}.json"} & manifest.files.keys()
    for file, entries in manifest.tensors.items():
        held = weights if file.startswith(f"{prefix}.model.") else state
        if file.startswith(f"{prefix}.") and any(_is_needed(name, entry, held) for name, entry in entries.items()):
            files.add(file)
    return files


def _is_needed(stored_name: str, entry: TensorEntry, held: Held) -> bool:
    name = stored_name
    if name.startswith(f"{_STATE}."):
        # optimizer.state.NAME.KEY, where a name has dots, and a key seldom
        name = name.removeprefix(f"{_STATE}.").rpartition(".")[0]
    if name not in held or held[name][0] != entry.shape:
        return True
    part = Box.full(entry.shape) if entry.offsets is None else Box(entry.offsets, entry.sizes or ())
    return any(box.intersect(part) is not None for box in held[name][1])
