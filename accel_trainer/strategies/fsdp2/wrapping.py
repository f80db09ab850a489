"""Blocks of a model: the choice of those that are sharded as units of their own, and their recomputation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_trainer import logging
from accel_trainer.config import Resolved, WrapPolicy
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.strategies.api import WrapPolicyFunction

__all__ = [
    "CheckpointedForward",
    "apply_activation_checkpointing",
    "drop_tied_blocks",
    "find_blocks",
    "find_ignored_modules",
    "warn_of_one_unit",
]

logger = logging.get_logger(__name__)


def _blocks_by_class(model: nn.Module, class_names: Iterable[str], origin: str) -> list[nn.Module]:
    """Return the submodules of the named classes."""
    present = {type(module).__name__ for module in model.modules()}
    for name in class_names:
        if name not in present:
            leaves_last = sorted(present - {type(m).__name__ for m in model.modules() if not any(m.children())})
            raise ConfigError(
                f"{origin}: no module of class {name!r} in {type(model).__name__}{did_you_mean(name, present) or '.'} "
                f"Its module classes: {', '.join(leaves_last)}"
            )
    wanted = set(class_names)
    return [module for module in model.modules() if type(module).__name__ in wanted]


def _declared_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the submodules of the classes in the `_no_split_modules` of the model and its submodules."""
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in declared]


def _blocks_by_function(model: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the submodules for which `policy(module)` is true.

    The policies of `torch.distributed.fsdp.wrap` are called as FSDP1 calls them, deepest modules first: whether to go
    into a module, and whether to make a unit of its parameters that are in no unit yet.
    """
    if "recurse" not in inspect.signature(policy).parameters:
        return [module for module in model.modules() if policy(module)]
    chosen: list[nn.Module] = []
    taken: set[int] = set()

    def num_left(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in taken)

    def visit(module: nn.Module) -> None:
        if policy(module=module, recurse=True, nonwrapped_numel=num_left(module)):
            for child in module.children():
                visit(child)
            if module is not model and policy(module=module, recurse=False, nonwrapped_numel=num_left(module)):
                chosen.append(module)
                taken.update(map(id, module.parameters()))

    visit(model)
    return chosen


def find_blocks(model: nn.Module, resolved: Resolved, policy: WrapPolicyFunction | None) -> list[nn.Module]:
    """Return the submodules to shard as units of their own, in the order of `model.modules()`, without the root.

    A callable wins; then the configuration: class names, else the model's own `_no_split_modules`; by size; or none.

    Raises:
        ConfigError: a class name of the configuration matches nothing.
    """
    config = resolved.config.fsdp
    if policy is not None:
        chosen = _blocks_by_function(model, policy)
    elif config.wrap_policy == WrapPolicy.NONE:
        chosen = []
    elif config.wrap_policy == WrapPolicy.SIZE:
        # Enough parameters that are in no deeper unit; every module is gone into.
        chosen = _blocks_by_function(
            model, lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel >= config.min_num_params
        )
    elif config.wrap_classes:
        chosen = _blocks_by_class(model, config.wrap_classes, resolved.describe("fsdp.wrap_classes"))
    else:
        chosen = _declared_blocks(model)
    picked = {id(module) for module in chosen}
    # ModuleList and ModuleDict have no forward, so a unit made of one would never gather its parameters.
    return [
        module
        for module in model.modules()
        if id(module) in picked and module is not model and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]


def drop_tied_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out blocks that share a parameter with a module outside: both users must be gathered by one unit."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    kept = []
    for block in blocks:
        inside = {id(module) for module in block.modules()}
        if all(users[id(parameter)] <= inside for parameter in block.parameters()):
            kept.append(block)
        else:
            logger.info(
                "%s shares a parameter with another module and is sharded with its parent", type(block).__name__
            )
    return kept


def warn_of_one_unit(model: nn.Module, blocks: Sequence[nn.Module], resolved: Resolved) -> None:
    """Warn that the model is one unit, where the configuration left the choice of blocks to the model."""
    config = resolved.config.fsdp
    if not blocks and config.wrap_policy == WrapPolicy.TRANSFORMER and not config.wrap_classes:
        logger.warning(
            "%s declares no _no_split_modules and fsdp.wrap_classes is empty: the whole model is one unit of "
            "sharding. Name its block classes in fsdp.wrap_classes to gather less memory at once",
            type(model).__name__,
        )


def find_ignored_modules(model: nn.Module, resolved: Resolved) -> list[nn.Module]:
    """Return the submodules whose full names match `fsdp.ignored_modules`; refuse an expression that matches none."""
    found = []
    for pattern in resolved.config.fsdp.ignored_modules:
        origin = resolved.describe("fsdp.ignored_modules")
        matches = [module for name, module in model.named_modules() if name and re.fullmatch(pattern, name)]
        if not matches:
            raise ConfigError(f"{origin}: {pattern!r} matches the name of no submodule of {type(model).__name__}")
        found.extend(matches)
    return found


# --- activation checkpointing ----------------------------------------------------------------------------------------


class CheckpointedForward:
    """A module's forward whose activations are recomputed in the backward.

    Random state is preserved, so that dropout draws the same mask twice. Lives in the module's `forward` attribute, as
    `precision.AutocastForward` does, so parameter names carry no prefix and the module pickles. A forward that somebody
    has put on the instance before is the one that runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def _forward(self) -> Callable[..., Any]:
        return self.inner or partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, keeping only its inputs for the backward."""
        if not torch.is_grad_enabled():
            return self._forward()(*args, **kwargs)
        args = tuple(None if _is_cache(value) else value for value in args)
        kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(self._forward(), *args, use_reentrant=False, **kwargs)


def _is_cache(value: Any) -> bool:
    """Whether `value` holds the keys and values of earlier tokens: a block that runs twice would add its own twice."""
    is_cache = callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))
    if is_cache:
        logger.warning_once("activation checkpointing leaves caches of keys and values out of the forward in training")
    return is_cache


def apply_activation_checkpointing(blocks: Sequence[nn.Module]) -> None:
    """Recompute the activations of each block in the backward; a block that already does so is left alone."""
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), CheckpointedForward):
            block.forward = CheckpointedForward(block)
