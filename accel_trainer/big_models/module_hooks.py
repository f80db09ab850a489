"""Hooks around the forward of a module, which may change it when they are added and taken off; and ready-made ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from accel_trainer.big_models.module_tensors import Device, find_tied_parameters, retie_parameters
from accel_trainer.checkpoint.weights.offloaded import HOOK
from accel_trainer.runtime.memory import clear_device_cache
from accel_trainer.runtime.process import with_index
from accel_trainer.runtime.tensor_trees import send_to_device

# Under this name other libraries look for a module's forward without its hook.
_FORWARD = "_old_forward"


class ModelHook:
    """Code that runs when it is added to a module, around each forward, and when it is taken off: none by itself."""

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

    def outlines(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each tensor that comes in for forward only, its placeholder, and it as it is stored."""
        yield from ()


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

    def outlines(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield what each of them brings in."""
        for hook in self.hooks:
            yield from hook.outlines()


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """Return the hooks of a module, those of a `SequentialHook` one by one."""
    found: list[ModelHook] = []
    waiting = [hook] if (hook := getattr(module, HOOK, None)) is not None else []
    while waiting:
        hook = waiting.pop(0)
        if isinstance(hook, SequentialHook):
            waiting[:0] = hook.hooks
        else:
            found.append(hook)
    return found


def _run(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    with torch.no_grad() if hook.no_grad else nullcontext():
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def _set_forward(module: nn.Module, forward: Any) -> None:
    # A traced module has a class of its own, whose forward is made anew when its graph changes: one that is kept by the
    # instance would hide it.
    (type(module) if isinstance(module, fx.GraphModule) else module).forward = forward


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run a hook around a module's forward, in the place of its present one or after it, and return the module."""
    present: ModelHook | None = getattr(module, HOOK, None)
    if append and present is not None:
        watched = {name: value for name, value in vars(module).items() if isinstance(value, _WatchedMove)}
        remove_hook_from_module(module)
        vars(module).update(watched)
        hook = SequentialHook(present, hook)
    forward = getattr(module, _FORWARD, None) if hasattr(module, HOOK) else None
    if forward is None:
        forward = module.forward
        setattr(module, _FORWARD, forward)
    module = hook.init_hook(module)
    setattr(module, HOOK, hook)
    # A partial, not a closure: a deep copy of the module calls the copy's forward.
    _set_forward(module, functools.update_wrapper(functools.partial(_run, module), forward))
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook off a module, with `recurse` off those inside, too, and return the module as it was before."""
    tied = find_tied_parameters(module) if recurse else []
    for inner in list(module.modules()) if recurse else [module]:
        _remove_own_hook(inner)
    retie_parameters(module, tied)  # each module has its weights back by itself
    return module


def _remove_own_hook(module: nn.Module) -> None:
    if hasattr(module, HOOK):
        getattr(module, HOOK).detach_hook(module)
        delattr(module, HOOK)
    if hasattr(module, _FORWARD):
        forward = getattr(module, _FORWARD)
        if getattr(forward, "__func__", None) is type(module).forward and not isinstance(module, fx.GraphModule):
            vars(module).pop("forward", None)
        else:
            _set_forward(module, forward)
        delattr(module, _FORWARD)
    for name in [name for name, value in vars(module).items() if isinstance(value, _WatchedMove)]:
        delattr(module, name)


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


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward; it stays on the device then, until `init_hook` is called again."""

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        """Describe the hook: None as `execution_device` is the accelerator, or the host where there is none.

        Args:
            prev_module_hook: of the model that leaves the device before this one comes.
        """
        if execution_device is None:
            execution_device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.execution_device = with_index(execution_device)
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        return module.to("cpu")

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the previous model out, and this one and its inputs in."""
        previous = self.prev_module_hook
        if previous is not None and _device_of(previous.model) != torch.device("cpu"):
            previous.offload()
            clear_device_cache()
        if _device_of(module) == self.execution_device:
            return args, kwargs
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


def _device_of(module: nn.Module) -> torch.device:
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


class UserCpuOffloadHook:
    """A model with its `CpuOffload` hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model, which stays where it is."""
        remove_hook_from_module(self.model)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS_TO_CAST = (*_CONVOLUTIONS, nn.Linear)


class LayerwiseCastingHook(ModelHook):
    """Casts a module's weights to one dtype for its forward, and to another one, which loses precision, afterwards."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cast to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep linear layers and convolutions in `storage_dtype` and compute in another; skipped ones stay as they are."""
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    waiting = [("", module)]
    while waiting:
        name, found = waiting.pop()
        if isinstance(found, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            continue
        if isinstance(found, LAYERS_TO_CAST):
            add_hook_to_module(found, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            waiting.extend((f"{name}.{child}" if name else child, inner) for child, inner in found.named_children())
