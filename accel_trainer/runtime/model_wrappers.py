"""The user's own module inside of its wrappers, and facts about modules that wrappers leave behind."""

from __future__ import annotations

import copy
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_trainer.runtime.torch_private import ORIGINAL_MODULE, clear_forward_hooks


class ReplacedForward:
    """Base of objects that stand in a module's `forward` attribute for its own forward, whose signature it shows.

    Not a hook and not a wrapper module: it compiles with fullgraph, pickles and deep-copies with the module. A forward
    that is on the instance already (of kernel libraries, or torch.compile's wrapper) is the one that runs: `inner`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.inner: Callable[..., Any] | None = vars(module).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    @property
    def own(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.inner or partial(type(self.module).forward, self.module)

    @classmethod
    def remove_from(cls, module: nn.Module) -> None:
        """Give a module its own forward back, where an object of this class stands for it."""
        replaced = vars(module).get("forward")
        if isinstance(replaced, cls):
            del module.forward
            if replaced.inner is not None:
                module.forward = replaced.inner


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, every parameter staying the object that it is."""
    # `Module.to` makes new ones on devices behind PrivateUse1, as torch-tpu's: tied weights were tied no longer, and
    # optimizers updated those that were left behind.
    named = list(module.named_parameters(remove_duplicate=False))
    module.to(device)
    for name, parameter in named:
        owner, _, leaf = name.rpartition(".")
        moved = module.get_parameter(name)
        if moved is parameter:
            continue
        if parameter.device != moved.device:  # of a tied one only under its first name
            torch.utils.swap_tensors(parameter, moved)
        setattr(module.get_submodule(owner), leaf, parameter)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is the wrapper of `torch.compile(model)`; `model.compile()` leaves no wrapper."""
    return any(name == ORIGINAL_MODULE for name, _ in module.named_children())


def uncompiled_name(name: str) -> str:
    """Return the name in the user's own module: `torch.compile(module)` is a wrapper that puts its own in between."""
    return name.replace(f"{ORIGINAL_MODULE}.", "")


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether `torch.compile` wrapped a module or one inside of it."""
    return any(is_compiled_module(inner) for inner in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter is a DTensor, of FSDP2 or tensor parallelism."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def find_sharded_at_load(model: Any) -> Any:
    """Return the module that transformers has sharded while it loaded it, with `distributed_config`; None without one.

    The model, or one in it: PEFT's has one.
    """
    mark = "is_distributed_loading_by_transformers"
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if hasattr(type(module), mark) and getattr(module, mark)), None)


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the tensor-parallel degree that transformers loaded a model with; None for none."""
    if (size := getattr(model, "tp_size", None)) is not None:  # transformers 4
        return size
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return a model's modules, each behind the ones that it holds, or pairs of their full names and them."""
    waiting: deque[tuple[str, nn.Module]] = deque([("", model)])
    found: list[tuple[str, nn.Module]] = []
    while waiting:
        name, module = waiting.pop()
        found.append((name, module))
        waiting.extend((f"{name}.{child}" if name else child, inner) for child, inner in module.named_children())
    found.reverse()
    return found if return_fqns else [module for _, module in found]


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or that of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def _holds_replica(module: nn.Module) -> bool:
    """Whether a module only carries another one: torch's data parallel wrappers, and an engine's."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return True
    # DeepSpeedEngine, without an import of DeepSpeed: it keeps the model and delegates attributes to it.
    return hasattr(type(module), "allreduce_gradients") and any(name == "module" for name, _ in module.named_children())


def flattens_parameters(model: nn.Module) -> bool:
    """Whether a module is wrapped by FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`, or one inside is."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    return any(each.__module__ == "torch.distributed.fsdp.fully_sharded_data_parallel" for each in classes)


def unwrap_module(model: nn.Module) -> nn.Module:
    """Return the module inside of data parallel wrappers and `torch.compile`'s, in whatever order they were put on."""
    while True:
        if is_compiled_module(model):
            model = getattr(model, ORIGINAL_MODULE)
        elif _holds_replica(model):
            model = model.module  # type: ignore[assignment]
        else:
            return model


def unsharded_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter before ZeRO-3 has partitioned it; a DTensor has its full shape anyway."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def copy_with(module: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a copy with its classes' forwards, without hooks, and with other tensors in the place of some, by id."""
    memo: dict[int, Any] = dict(tensors)
    memo |= {id(vars(each)["forward"]): None for each in module.modules() if "forward" in vars(each)}
    copied = copy.deepcopy(module, memo)
    for each in copied.modules():
        vars(each).pop("forward", None)
        clear_forward_hooks(each)
    return copied


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name, of a module or of the first one inside that has it; None where none has."""
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of some modules; of a regular expression, those of full names, moved to `device`."""
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [inner.to(device) for name, inner in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules or () for parameter in module.parameters()}
