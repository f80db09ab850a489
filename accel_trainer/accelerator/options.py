"""Arguments of `Accelerator(...)` as configuration paths, and the strategy that the configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from accel_trainer.config import LossDivision, MixedPrecision, Resolved, RunConfig, Source, field_specs, resolve
from accel_trainer.config.validation import show_plain
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin
from accel_trainer.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
from accel_trainer.plugins.kwargs import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    OptionObject,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accel_trainer.plugins.parallelism import ParallelismConfig
from accel_trainer.precision import Float8Recipe
from accel_trainer.registry import load_strategy
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import Capabilities, Strategy, WrapPolicyFunction
from accel_trainer.strategies.comm_hooks import CommHook
from accel_trainer.tracking import mask_secrets

_PLUGINS: Mapping[str, type[OptionObject]] = {
    "dataloader_config": DataLoaderConfiguration,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
    "parallelism_config": ParallelismConfig,
}
"""Classes of the objects among the arguments."""
_HANDLERS = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


class SetOption(NamedTuple):
    """An option, its value for people, and who set it."""

    name: str
    value: str
    source: Source
    is_set: bool
    """Whether the value is other than the default."""


@dataclass
class AcceleratorOptions:
    """Explicit options by dotted path, and the objects that no configuration file can hold."""

    explicit: dict[str, Any] = field(default_factory=dict)
    given_by: dict[str, str] = field(default_factory=dict)
    """The argument of an object's option, by dotted path."""
    plugin_kwargs: dict[str, Any] = field(default_factory=dict)
    wrap_policy: WrapPolicyFunction | None = None
    ddp_options: dict[str, Any] = field(default_factory=dict)
    comm_hook: CommHook | None = None
    scaler_options: dict[str, Any] = field(default_factory=dict)
    autocast: dict[str, bool] = field(default_factory=dict)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)
    compile_options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None
    handlers: dict[type[KwargsHandler], Any] = field(default_factory=dict)
    """Those of `kwargs_handlers`, by their class."""

    @classmethod
    def build(
        cls, scalars: Mapping[str, Any], *, kwargs_handlers: Sequence[KwargsHandler] = (), **plugins: Any
    ) -> AcceleratorOptions:
        """Bring the constructor's arguments to dotted paths; `scalars` are by theirs, None for one that is not set."""
        options = cls({path: value for path, value in scalars.items() if value is not None})
        options._choose_accumulation(plugins.get("gradient_accumulation_plugin"))
        backend = options.explicit.get("compile.backend")
        if plugins.get("dynamo_plugin") is not None and backend is not None:
            raise ConfigError(
                f"dynamo_backend={backend!r} and a TorchDynamoPlugin were both given; pass only "
                "TorchDynamoPlugin(backend=...)"
            )
        for name, plugin in plugins.items():
            options._take(name, plugin, _PLUGINS[name])
        options._take_handlers(kwargs_handlers)
        return options

    def with_plugin(self, plugin: DeepSpeedPlugin | None) -> AcceleratorOptions:
        """Return these options and those of a plugin."""
        options = replace(self, explicit=dict(self.explicit), given_by=dict(self.given_by))
        options._take("deepspeed_plugin", plugin, DeepSpeedPlugin)
        return options

    def _take(self, name: str, given: OptionObject | None, wanted: type[OptionObject]) -> None:
        """Add the options of an argument; they may repeat another argument, and not contradict it."""
        if given is None:
            return
        if not isinstance(given, wanted):
            kind = type(given)
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}; pass accel_trainer's own {wanted.__name__}"
            )
        options = given.explicit()
        for path, value in options.items():
            if self.explicit.get(path, value) != value:
                keyword = "gradient_accumulation_steps" if path == "accumulation.num_steps" else path.rpartition(".")[2]
                raise ConfigError(
                    f"{name} sets {keyword}={value!r}, and Accelerator({keyword}={self.explicit[path]!r}) was given "
                    "beside it; pass one of them"
                )
        self.given_by.update(dict.fromkeys(options.keys() - self.explicit.keys(), name))
        self.explicit.update(options)
        for field_name, value in given.objects().items():
            setattr(self, field_name, value)

    def _choose_accumulation(self, plugin: GradientAccumulationPlugin | None) -> None:
        """Leave the steps to the plugin if it has any; its number may stand beside gradient_accumulation_steps=1."""
        num_steps = getattr(plugin, "num_steps", None)
        given = self.explicit.get("accumulation.num_steps")
        if num_steps and given not in (None, 1, num_steps):
            raise ConfigError(
                f"gradient_accumulation_steps={given} and GradientAccumulationPlugin(num_steps={num_steps}) were both "
                "given; pass one of them"
            )
        if num_steps is not None:
            self.explicit.pop("accumulation.num_steps", None)

    def _take_handlers(self, handlers: Sequence[KwargsHandler]) -> None:
        if isinstance(handlers, KwargsHandler):
            raise ConfigError(f"kwargs_handlers is a {type(handlers).__name__}; pass a list of them")
        for handler in handlers:
            if type(handler) in self.handlers:
                raise ConfigError(f"kwargs_handlers holds two {type(handler).__name__}; pass one")
            if not isinstance(handler, _HANDLERS):
                raise ConfigError(
                    f"kwargs_handlers holds a {type(handler).__name__}; known: "
                    f"{', '.join(known.__name__ for known in _HANDLERS)}"
                )
            self.handlers[type(handler)] = handler
            self._take("kwargs_handlers", handler, KwargsHandler)

    def float8_recipe(self, config: RunConfig) -> Float8Recipe | None:
        """Return which layers compute in fp8, and how; None in other precisions."""
        if config.mixed_precision != MixedPrecision.FP8:
            return None
        given = self.handlers.get(AORecipeKwargs, AORecipeKwargs())
        return Float8Recipe.build(config.fp8, given.config, given.module_filter_func)

    def check(self, resolved: Resolved, facts: Capabilities) -> None:
        """Refuse a communication hook of DDP where something else sends the gradients, and a recipe without fp8."""
        if AORecipeKwargs in self.handlers and resolved.config.mixed_precision != MixedPrecision.FP8:
            raise ConfigError(
                f"kwargs_handlers holds an AORecipeKwargs, and {resolved.describe('mixed_precision')}; pass "
                "mixed_precision='fp8', or take the recipe out"
            )
        if self.comm_hook is not None and facts.distributed_type not in ("NO", "MULTI"):
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_hook={str(self.comm_hook.hook)!r}) is for strategy 'ddp', and "
                f"{resolved.describe('strategy')} sends gradients in its own way; take comm_hook out, or use 'ddp'"
            )


def resolve_options(
    options: AcceleratorOptions, environ: Mapping[str, str], config: str | Path | Mapping[str, Any] | Resolved | None
) -> Resolved:
    """Resolve the configuration of an Accelerator; one that is resolved already is taken as it is."""
    if isinstance(config, Resolved):
        if options.explicit:
            raise ConfigError(
                f"config is resolved already, and {', '.join(sorted(options.explicit))} came too; resolve them together"
            )
        return config
    resolved = resolve(explicit=options.explicit, environ=environ, file=config, explicit_objects=options.given_by)
    check_division(resolved, LossDivision.ACCELERATE, "an Accelerator")
    given = [path for path in options.explicit if path.startswith("compile.") and path != "compile.backend"]
    if options.compile_options:
        given.append("options")
    if given and resolved.config.compile.backend == "no":
        raise ConfigError(
            f"TorchDynamoPlugin sets {', '.join(path.removeprefix('compile.') for path in given)}, and "
            f"{resolved.describe('compile.backend')} does not compile; pass TorchDynamoPlugin(backend='inductor'), or "
            "take the plugin out"
        )
    return resolved


def check_division(resolved: Resolved, own: LossDivision, whose: str) -> None:
    """Refuse the rules of the other library: `own` are those that the losses of an Accelerator, or a Trainer, know."""
    other = ({LossDivision.ACCELERATE, LossDivision.TRANSFORMERS} - {own}).pop()
    for path in ("compat", "accumulation.loss_division"):
        if str(resolved.value(path)) == other:
            raise ConfigError(
                f"{resolved.describe(path)} was given to {whose}, which can take losses as {own} does; give "
                f"{path.rpartition('.')[2]}={str(own)!r}, or leave it out"
            )


def check_num_processes(resolved: Resolved, world_size: int) -> None:
    """Refuse a world size that the configuration contradicts."""
    stated, fewest = resolved.config.launch.num_processes, resolved.config.launch.min_processes
    if stated is not None and not (stated if fewest is None else fewest) <= world_size <= stated:
        raise ConfigError(
            f"{resolved.describe('launch.num_processes')}, and {world_size} process(es) run this job. Start it with "
            f"`accel-trainer launch --num_processes {stated} SCRIPT`, or set num_processes to {world_size} there"
        )


def keep_global_batch(resolved: Resolved, world_size: int) -> Resolved:
    """Return a configuration whose updates have as many samples, where it asks for that, on fewer processes."""
    accumulation, first = resolved.config.accumulation, resolved.config.launch.num_processes
    if not accumulation.keep_global_batch or first is None or first == world_size:
        return resolved
    num_steps, rest = divmod(accumulation.num_steps * first, world_size)
    if rest:
        raise ConfigError(
            f"{resolved.describe('accumulation.keep_global_batch')}: an update has {accumulation.num_steps} x {first} "
            f"batches (micro-batches x processes), and the {world_size} processes that are left cannot share them out. "
            "Choose accumulation steps that all numbers of processes divide, or give num_processes another MIN:MAX"
        )
    accumulation = replace(accumulation, num_steps=num_steps)
    return replace(resolved, config=replace(resolved.config, accumulation=accumulation))


def build_strategy(resolved: Resolved, process: ProcessContext) -> Strategy:
    """Return the strategy of the job: the configured one, or `single` / `ddp` by the number of processes for "auto"."""
    name = resolved.config.strategy
    if name == "auto":
        name = "ddp" if process.world_size > 1 else "single"
    strategy: Strategy = load_strategy(name)
    facts, origin = strategy.capabilities, resolved.describe("strategy")
    if facts.max_world_size is not None and process.world_size > facts.max_world_size:
        raise ConfigError(
            f"{origin}: strategy {name!r} is for {facts.max_world_size} process and this job has {process.world_size}, "
            "which would each train alone; use 'ddp' or 'fsdp2', or start one process"
        )
    check_num_processes(resolved, process.world_size)
    return strategy


def set_options(resolved: Resolved) -> list[SetOption]:
    """Return every option of a configuration, those of the DeepSpeed block last; tokens and keys are masked."""
    specs = field_specs()
    options = [
        SetOption(path, show_option(path, value), source, is_set=value != specs[path].default)
        for path, value, source in resolved.explain()
        if not isinstance(value, Mapping)  # an engine's block: it follows, key by key
    ]
    with suppress(ConfigError):  # its file is no longer there
        block = resolved.explain_block()
        options += [SetOption(path, show_option(path, value), source, is_set=True) for path, value, source in block]
    return options


def show_option(path: str, value: Any) -> str:
    """Return an option's value in words, masked where its name is that of a secret."""
    name = path.rpartition(".")[2]
    return show_plain(mask_secrets({name: value})[name]) or "''"
