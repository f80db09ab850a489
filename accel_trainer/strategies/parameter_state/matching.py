"""Matching of saved names, shapes and parameter groups with those of a module and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_trainer.checkpoint.format.json_codec import OWN_STATE
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE

__all__ = ["EXTRA_STATE", "group_options", "match_groups", "match_model", "uncompiled_name"]

EXTRA_STATE = "_extra_state"
"""Last part of the name under which torch saves what a module's get_extra_state() returns; of any shape."""


def uncompiled_name(name: str) -> str:
    """Return the name in the user's own module: `torch.compile(module)` is a wrapper that puts its own in between."""
    return name.replace(f"{ORIGINAL_MODULE}.", "")


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's parameter group, or of a saved one."""
    return {key: value for key, value in group.items() if key not in ("params", OWN_STATE)}


def _describe_names(names: Sequence[str]) -> str:
    """Return the first ten names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:10])
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def match_model(
    module: nn.Module,
    own: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    strict: bool,
    shape_of: Callable[[Tensor], tuple[int, ...]],
) -> list[tuple[str, str]] | str:
    """Return (own name, saved name) for each distinct tensor to load, or the message of the differences.

    Args:
        own: tensors of `module` by name; one object under several names is tied, and one saved name is enough for it.
        saved: tensors by name, of which only the shapes are read.
        shape_of: the unsharded shape of one of `own`.
    """
    aliases: dict[int, list[str]] = {}
    for name, tensor in own.items():
        aliases.setdefault(id(tensor), []).append(name)
    found = [(names[0], next((name for name in names if name in saved), None)) for names in aliases.values()]
    pairs = [(name, stored) for name, stored in found if stored is not None]
    problems = [
        f"{name} is {tuple(saved[stored].shape)} in the checkpoint and {shape_of(own[name])} in the model"
        for name, stored in pairs
        if tuple(saved[stored].shape) != shape_of(own[name]) and name.rpartition(".")[2] != EXTRA_STATE
    ][:10]
    if strict:
        missing = [name for name, stored in found if stored is None]
        unexpected = [name for name in saved if name not in own]
        problems += [f"missing in the checkpoint: {_describe_names(missing)}"] if missing else []
        problems += [f"not in the model: {_describe_names(unexpected)}"] if unexpected else []
    if problems:
        return (
            f"the checkpoint does not fit {type(module).__name__}: {'; '.join(problems)}. "
            "Build the model that was saved, or load with strict=False where names may differ"
        )
    return pairs


def match_groups(saved: Mapping[str, Any], own_groups: Sequence[Sequence[str]]) -> list[Any] | str:
    """Return the saved parameter groups in the order of `own_groups`, or the message of the differences.

    Args:
        saved: an optimizer's state, whose groups list the names of their parameters.
        own_groups: the names of the parameters of each group.
    """
    remaining = list(saved.get("param_groups", []))
    saved_groups = [list(group["params"]) for group in remaining]
    if sorted(saved_groups) != sorted(list(names) for names in own_groups):
        saved_names = {name for names in saved_groups for name in names}
        own_names = {name for names in own_groups for name in names}
        missing, unexpected = sorted(own_names - saved_names), sorted(saved_names - own_names)
        differences = [f"missing in the state: {_describe_names(missing)}"] if missing else []
        differences += [f"not in this optimizer: {_describe_names(unexpected)}"] if unexpected else []
        return (
            f"the optimizer state was saved for {len(saved_groups)} group(s) of {len(saved_names)} parameter(s), and "
            f"this optimizer has {len(own_groups)} group(s) of {len(own_names)}; "
            f"{'; '.join(differences) or 'they are the same, in other groups or another order'}. "
            "Build the optimizer that was saved"
        )
    ordered = []
    for names in own_groups:
        index = next(i for i, group in enumerate(remaining) if list(group["params"]) == list(names))
        ordered.append(remaining.pop(index))
    return ordered
