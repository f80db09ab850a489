"""Matching of saved names, shapes and parameter groups with those of a module and its optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_trainer.checkpoint.json_codec import OWN_STATE
from accel_trainer.runtime.torch_private import ORIGINAL_MODULE

EXTRA_STATE = "_extra_state"
"""Last part of the name under which torch saves what a module's get_extra_state() returns; of any shape."""


def uncompiled_name(name: str) -> str:
    """Return the name in the user's own module: `torch.compile(module)` is a wrapper that puts its own in between."""
    return name.replace(f"{ORIGINAL_MODULE}.", "")


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's parameter group, or of a saved one."""
    return {key: value for key, value in group.items() if key not in ("params", OWN_STATE)}


def _describe(problem: str, names: Sequence[str]) -> list[str]:
    """Return a problem with the first ten of its names; nothing where it has none."""
    shown = ", ".join(repr(name) for name in names[:10])
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return [f"{problem}: {shown}{more}"] if names else []


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
    saved_names = _saved_names(own, saved)
    pairs = [(name, saved_name) for name, saved_name in saved_names.items() if saved_name is not None]
    problems = []
    for name, saved_name in pairs:
        found, expected = tuple(saved[saved_name].shape), shape_of(own[name])
        if found != expected and name.rpartition(".")[2] != EXTRA_STATE:
            problems.append(f"{name} is {found} in the checkpoint and {expected} in the model")
    del problems[10:]
    if strict:
        missing = [name for name, saved_name in saved_names.items() if saved_name is None]
        problems += _describe("missing in the checkpoint", missing)
        problems += _describe("not in the model", [name for name in saved if name not in own])
    if problems:
        return (
            f"the checkpoint does not fit {type(module).__name__}: {'; '.join(problems)}. "
            "Build the model that was saved, or load with strict=False where names may differ"
        )
    return pairs


def _saved_names(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Return, by the first name of each distinct tensor, the first of its names that is saved."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in own.items():
        aliases.setdefault(id(tensor), []).append(name)
    return {names[0]: next((name for name in names if name in saved), None) for names in aliases.values()}


def match_groups(saved: Mapping[str, Any], own_groups: Sequence[Sequence[str]]) -> list[Any] | str:
    """Return the saved parameter groups in the order of `own_groups`, or the message of the differences.

    Groups without parameters need no counterpart: DeepSpeed drops them, and a Trainer of adapters has one where nothing
    is without weight decay. One that has none is returned without options.

    Args:
        saved: an optimizer's state, whose groups list the names of their parameters.
        own_groups: the names of the parameters of each group.
    """
    groups = saved.get("param_groups", [])
    names_saved, names_owned = ([list(names) for names in each] for each in ((g["params"] for g in groups), own_groups))
    if sorted(filter(None, names_saved)) != sorted(filter(None, names_owned)):
        return _describe_groups(names_saved, names_owned)
    # No name is in two groups, so that only those without any are the same.
    remaining = [*zip(names_saved, groups, strict=True)]
    ordered = []
    for names in names_owned:
        index = next((i for i, (found, _) in enumerate(remaining) if found == names), None)
        ordered.append({"params": []} if index is None else remaining.pop(index)[1])
    return ordered


def _describe_groups(saved: Sequence[list[str]], own: Sequence[list[str]]) -> str:
    """Return the message of parameter groups that differ."""
    saved_names, own_names = set(itertools.chain(*saved)), set(itertools.chain(*own))
    differences = _describe("missing in the state", sorted(own_names - saved_names))
    differences += _describe("not in this optimizer", sorted(saved_names - own_names))
    return (
        f"the optimizer state was saved for {len(saved)} group(s) of {len(saved_names)} parameter(s), and this "
        f"optimizer has {len(own)} group(s) of {len(own_names)}; "
        f"{'; '.join(differences) or 'they are the same, in other groups or another order'}. Build the optimizer that "
        "was saved"
    )
