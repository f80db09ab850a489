"""Which stored tensor goes into which of a module's own, and in words what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

__all__ = ["EXTRA_STATE", "describe_names", "plan_model_load", "shape_of"]

EXTRA_STATE = "_extra_state"
"""What torch calls the state that a module makes itself, with get_extra_state(); of any shape."""


def describe_names(names: Sequence[str]) -> str:
    """Return the first ten names, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:10])
    return f"{shown} and {len(names) - 10} more" if len(names) > 10 else shown


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor that is whole, or of a DTensor's whole."""
    return tuple(tensor.shape)


def plan_model_load(
    module: nn.Module,
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    strict: bool,
    shape_of: Callable[[Tensor], tuple[int, ...]] = shape_of,
) -> list[tuple[str, str]] | str:
    """Return (own name, stored name) for each distinct tensor to load, or the message of what does not fit.

    Args:
        own: tensors of `module` by name; those of one object are tied, and one of their names is enough.
        state: stored tensors by name; only their shapes are looked at.
        shape_of: the whole shape of one of `own`, for an engine that keeps only a part of it.
    """
    aliases: dict[int, list[str]] = {}
    for name, tensor in own.items():
        aliases.setdefault(id(tensor), []).append(name)
    found = [(names[0], next((name for name in names if name in state), None)) for names in aliases.values()]
    missing = [name for name, stored in found if stored is None]
    unexpected = [name for name in state if name not in own]
    plan = [(name, stored) for name, stored in found if stored is not None]
    problems = [
        f"{name} is {tuple(state[stored].shape)} in the checkpoint and {shape_of(own[name])} in the model"
        for name, stored in plan
        if tuple(state[stored].shape) != shape_of(own[name]) and name.rpartition(".")[2] != EXTRA_STATE
    ][:10]
    if strict and missing:
        problems.append(f"missing in the checkpoint: {describe_names(missing)}")
    if strict and unexpected:
        problems.append(f"not in the model: {describe_names(unexpected)}")
    if problems:
        return (
            f"the checkpoint does not fit {type(module).__name__}: {'; '.join(problems)}. "
            "Build the model that was saved, or load with strict=False where names may differ"
        )
    return plan
