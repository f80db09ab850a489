"""Hooks around the forward of a module, which may change the module when they are added and taken off."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx, nn

__all__ = [
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "hooks_of",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "watch_moves",
]

# Under these names other libraries look for hooks of a module.
_HOOK, _FORWARD = "_hf_hook", "_old_forward"


class ModelHook:
    """Code that runs when it is added to a module, before and after each forward, and when it is taken off.

    A subclass overrides what it needs; the methods here do nothing.
    """

    no_grad = False
    """Run the module's forward without gradients."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module as it is from now on; called when the hook is added."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the result of the call."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module as it was; called when the hook is taken off."""
        return module


class SequentialHook(ModelHook):
    """Several hooks for one module; each gets the result of the one before it."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Add them in order."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the last one leaves them."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output as the last one leaves it."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Take them off in order."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """Return the hooks of a module, those of a `SequentialHook` one by one."""
    found: list[ModelHook] = []
    waiting = [hook] if (hook := getattr(module, _HOOK, None)) is not None else []
    while waiting:
        hook = waiting.pop(0)
        if isinstance(hook, SequentialHook):
            waiting[:0] = hook.hooks
        else:
            found.append(hook)
    return found


def _run(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward between its hook's methods."""
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def _set_forward(module: nn.Module, forward: Any) -> None:
    # A traced module has a class of its own, whose forward is made anew when its graph changes: one that is kept by the
    # instance would hide it.
    (type(module) if isinstance(module, fx.GraphModule) else module).forward = forward


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around the forward of a module, and return the module.

    Args:
        append: after the hook that the module has; otherwise in its place.
    """
    present: ModelHook | None = getattr(module, _HOOK, None)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    forward = getattr(module, _FORWARD, None) if hasattr(module, _HOOK) else None
    if forward is None:
        forward = module.forward
        setattr(module, _FORWARD, forward)
    module = hook.init_hook(module)
    setattr(module, _HOOK, hook)
    # A partial, not a closure: a deep copy of the module calls the copy's forward.
    _set_forward(module, functools.update_wrapper(functools.partial(_run, module), forward))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module, and return the module as it was before.

    Args:
        recurse: off the modules inside, too.
    """
    if hasattr(module, _HOOK):
        getattr(module, _HOOK).detach_hook(module)
        delattr(module, _HOOK)
    if hasattr(module, _FORWARD):
        forward = getattr(module, _FORWARD)
        is_own = getattr(forward, "__func__", None) is type(module).forward and not isinstance(module, fx.GraphModule)
        if is_own:
            vars(module).pop("forward", None)
        else:
            _set_forward(module, forward)
        delattr(module, _FORWARD)
    for name in [name for name, value in vars(module).items() if isinstance(value, _WatchedMove)]:
        delattr(module, name)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and all modules inside."""
    remove_hook_from_module(module, recurse=True)


class _WatchedMove(functools.partial[Any]):
    """A method that moves a module, with a look at the module before it runs."""


def _move(module: nn.Module, name: str, check: Any, *args: Any, **kwargs: Any) -> Any:
    check(module)
    return getattr(type(module), name)(module, *args, **kwargs)


def watch_moves(module: nn.Module, check: Any) -> None:
    """Have `check(module)` called before `.to()` and its short forms move a module, as long as it has a hook."""
    for name in ("to", "cuda", "xpu", "npu", "mlu", "sdaa", "musa", "neuron"):
        if hasattr(type(module), name):
            setattr(module, name, _WatchedMove(_move, module, name, check))
