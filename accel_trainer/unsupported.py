"""Options and names of similar libraries that are not offered: refused by name, with the way to go on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from accel_trainer.errors import ConfigError, did_you_mean

__all__ = ["explain_missing", "explain_options"]

F = TypeVar("F", bound=Callable[..., Any])

REFUSED_OPTIONS = {
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism in a form of old, now ParallelismConfig(tp_size=...)",
}
"""Arguments of accelerate's Accelerator that are refused, and their subjects."""

_FP8 = "TransformerEngine and MS-AMP are not offered; fp8 is torchao's: mixed_precision='fp8', with AORecipeKwargs"
_RECIPES = ("FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs")

_NAMES = {
    **dict.fromkeys(_RECIPES, _FP8),
    "MegatronLMPlugin": "Megatron-LM is not offered",
    "TorchTensorParallelPlugin": "pass ParallelismConfig(tp_size=...)",
    "deepspeed_required": "compare accelerator.distributed_type with DistributedType.DEEPSPEED",
    "disable_fsdp_ram_efficient_loading": "pass FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)",
    "enable_fsdp_ram_efficient_loading": "pass FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)",
    "prepare_pippy": "pipeline-parallel inference is not offered; use torch.distributed.pipelining",
}


def __getattr__(name: str) -> Any:
    # `aliases.py` lets this module stand for `inference`, of which nothing is offered.
    raise explain_missing("accel_trainer.inference", name)


def explain_options(init: F) -> F:
    """Decorate a constructor so that it refuses options by name, with the way to go on.

    Its signature, which type checkers and editors read, stays: no `**kwargs` hides a misspelt argument.

    Raises:
        ConfigError: when called: an option that is not offered is given; None is no value.
        TypeError: when called: a name is unknown, as of any function.
    """
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def run(self: Any, *args: Any, **options: Any) -> None:
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
            if name in REFUSED_OPTIONS and value is not None:
                raise ConfigError(
                    f"Accelerator({name}=...) asks for {REFUSED_OPTIONS[name]}, which this version does not offer; "
                    "leave it out, and shard with FullyShardedDataParallelPlugin or DeepSpeedPlugin where the model "
                    "does not fit"
                )
        init(self, *args, **options)

    return run  # type: ignore[return-value]


def explain_missing(module: str, name: str) -> Exception:
    """Return the error that a module's `__getattr__` raises for a name that it does not have."""
    # An import statement shows the text of an ImportError; that of an AttributeError it replaces by its own.
    if name in _NAMES:
        return ImportError(f"{module} has no {name!r}: {_NAMES[name]}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")
