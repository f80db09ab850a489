"""What was passed to `Accelerator(...)`, brought to configuration paths, and the checks before anything is laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from accel_trainer.config import Resolved, field_specs, resolve
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.deepspeed_plugin import DeepSpeedPlugin
from accel_trainer.plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accel_trainer.registry import load_strategy
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.strategies.api import Capabilities, Strategy, WrapPolicyFunction
from accel_trainer.strategies.comm_hooks import CommHook

__all__ = ["AcceleratorOptions", "FSDPDescription", "build_strategy", "resolve_options"]


@dataclass
class FSDPDescription:
    """The sharding in force, under the attribute names that transformers reads from `state.fsdp_plugin`."""

    fsdp_version: int
    reshard_after_forward: bool
    state_dict_type: str
    cpu_offload: bool
    activation_checkpointing: bool
    transformer_cls_names_to_wrap: list[str]


@dataclass
class AcceleratorOptions:
    """Explicit options by dotted path, and the objects that no configuration file can hold."""

    explicit: dict[str, Any] = field(default_factory=dict)
    plugin_kwargs: dict[str, Any] = field(default_factory=dict)
    wrap_policy: WrapPolicyFunction | None = None
    ddp_options: dict[str, Any] = field(default_factory=dict)
    comm_hook: CommHook | None = None
    scaler_options: dict[str, Any] = field(default_factory=dict)
    autocast: dict[str, bool] = field(default_factory=dict)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)
    compile_options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None

    @classmethod
    def build(
        cls,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        *,
        split_batches: bool | None,
        mixed_precision: str | None,
        gradient_accumulation_steps: int | None,
        cpu: bool | None,
        dataloader_config: DataLoaderConfiguration | None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None,
        kwargs_handlers: Sequence[KwargsHandler],
        dynamo_backend: str | None,
        dynamo_plugin: TorchDynamoPlugin | None,
        strategy: str | None,
    ) -> AcceleratorOptions:
        """Bring the constructor's arguments to dotted paths.

        Raises:
            ConfigError: two arguments say different things, or one is of another class.
        """
        _check_classes(
            {
                "dataloader_config": (dataloader_config, DataLoaderConfiguration),
                "fsdp_plugin": (fsdp_plugin, FullyShardedDataParallelPlugin),
                "gradient_accumulation_plugin": (gradient_accumulation_plugin, GradientAccumulationPlugin),
                "dynamo_plugin": (dynamo_plugin, TorchDynamoPlugin),
            }
        )
        plugin = gradient_accumulation_plugin
        if plugin is not None and plugin.num_steps and gradient_accumulation_steps not in (None, 1, plugin.num_steps):
            raise ConfigError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} and GradientAccumulationPlugin(num_steps="
                f"{plugin.num_steps}) were both given; pass one of them"
            )
        options = cls()
        scalars = {
            "data.split_batches": split_batches,
            "mixed_precision": mixed_precision,
            "accumulation.num_steps": gradient_accumulation_steps,
            "use_cpu": cpu,
            "compile.backend": dynamo_backend,
            "strategy": strategy,
        }
        options.explicit.update({path: value for path, value in scalars.items() if value is not None})
        if dataloader_config is not None:
            options._add(dataloader_config.options(), "dataloader_config")
        if plugin is not None:
            options.explicit.update(plugin.options())
            if plugin.num_steps is not None:
                options.plugin_kwargs["num_steps"] = plugin.num_steps
            if plugin.sync_each_batch:
                options.plugin_kwargs["sync_each_batch"] = True
        if fsdp_plugin is not None:
            options._add(fsdp_plugin.options(), "fsdp_plugin")
            options.wrap_policy = fsdp_plugin.wrap_function
        if deepspeed_plugin is not None:
            options._add(deepspeed_plugin.options(), "deepspeed_plugin")
        if dynamo_plugin is not None:
            options._take_dynamo(dynamo_plugin, dynamo_backend)
        options._take_handlers(kwargs_handlers)
        return options

    def _add(self, given: Mapping[str, Any], name: str) -> None:
        """Add what an object of options sets; it may repeat an argument, and not contradict it."""
        for path, value in given.items():
            if self.explicit.get(path, value) != value:
                keyword = "gradient_accumulation_steps" if path == "accumulation.num_steps" else path.rpartition(".")[2]
                raise ConfigError(
                    f"{name} sets {keyword}={value!r}, and Accelerator({keyword}={self.explicit[path]!r}) was given "
                    "beside it; pass one of them"
                )
        self.explicit.update(given)

    def _take_dynamo(self, plugin: TorchDynamoPlugin, backend: str | None) -> None:
        if backend is not None:
            raise ConfigError(
                f"dynamo_backend={backend!r} and a TorchDynamoPlugin were both given; pass only "
                "TorchDynamoPlugin(backend=...)"
            )
        self.explicit.update(plugin.explicit())
        self.compile_options = dict(plugin.options or {})

    def _take_handlers(self, handlers: Sequence[KwargsHandler]) -> None:
        if isinstance(handlers, KwargsHandler):
            raise ConfigError(f"kwargs_handlers is a {type(handlers).__name__}; pass a list of them")
        seen: set[type] = set()
        for handler in handlers:
            if type(handler) in seen:
                raise ConfigError(f"kwargs_handlers holds two {type(handler).__name__}; pass one")
            seen.add(type(handler))
            if isinstance(handler, DistributedDataParallelKwargs):
                self._take_ddp(handler)
            elif isinstance(handler, GradScalerKwargs):
                self.scaler_options = handler.given()
            elif isinstance(handler, AutocastKwargs):
                self.autocast = handler.autocast_options()
                if handler.output_dtype is not None:
                    self.explicit["output_dtype"] = handler.output_dtype
            elif isinstance(handler, ProfileKwargs):
                self.profile = handler
            elif isinstance(handler, InitProcessGroupKwargs):
                self.backend = handler.backend
                if handler.timeout is not None:
                    self.explicit["timeout_seconds"] = _seconds_of(handler.timeout)
            else:
                raise ConfigError(
                    f"kwargs_handlers holds a {type(handler).__name__}; known: AutocastKwargs, "
                    "DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs"
                )

    def _take_ddp(self, handler: DistributedDataParallelKwargs) -> None:
        """Bring what the configuration knows of DDP to its paths, so that it says where each value came from."""
        self.comm_hook = handler.hook()
        for name, value in handler.given().items():
            path = f"ddp.{name}"
            if path in field_specs():
                self.explicit[path] = value
            else:
                self.ddp_options[name] = value

    def check(self, resolved: Resolved, facts: Capabilities) -> None:
        """Refuse objects that the strategy has no use for, and whose effect would be missed.

        Raises:
            ConfigError: gradients are to be sent by a hook of DDP, and something else sends them.
        """
        if self.comm_hook is not None and facts.distributed_type not in ("NO", "MULTI"):
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_hook={str(self.comm_hook.hook)!r}) is for strategy 'ddp', and "
                f"{resolved.describe('strategy')} sends gradients in its own way; take comm_hook out, or use 'ddp'"
            )

    def build_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the fp16 loss scaler of an Accelerator."""
        return torch.amp.GradScaler(device.type, **self.scaler_options)

    @staticmethod
    def describe_fsdp(resolved: Resolved, facts: Capabilities) -> FSDPDescription | None:
        """Return the sharding in force as transformers reads it; None where something else shards, or nothing."""
        if facts.distributed_type != "FSDP":
            return None
        fsdp = resolved.config.fsdp
        return FSDPDescription(
            fsdp_version=2,
            reshard_after_forward=fsdp.reshard_after_forward,
            state_dict_type=f"{fsdp.state_dict_type.upper()}_STATE_DICT",
            cpu_offload=fsdp.offload_params,
            activation_checkpointing=fsdp.activation_checkpointing,
            transformer_cls_names_to_wrap=list(fsdp.wrap_classes),
        )


def _check_classes(given: Mapping[str, tuple[Any, type]]) -> None:
    for name, (value, wanted) in given.items():
        if value is not None and not isinstance(value, wanted):
            kind = type(value)
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}; pass accel_trainer's own {wanted.__name__}"
            )


def _seconds_of(timeout: Any) -> float:
    if not isinstance(timeout, timedelta):
        raise ConfigError(
            f"InitProcessGroupKwargs(timeout={timeout!r}) is a {type(timeout).__name__}; pass a datetime.timedelta, "
            "timedelta(seconds=...) for instance"
        )
    return timeout.total_seconds()


def resolve_options(
    options: AcceleratorOptions, environ: Mapping[str, str], config: str | Path | Mapping[str, Any] | Resolved | None
) -> Resolved:
    """Resolve the configuration of an Accelerator; one that is resolved already is taken as it is.

    Raises:
        ConfigError: an option is wrong, or explicit options were given beside a resolved configuration.
    """
    if not isinstance(config, Resolved):
        resolved = resolve(explicit=options.explicit, environ=environ, file=config)
        _check_compiles(options, resolved)
        return resolved
    if options.explicit:
        raise ConfigError(
            f"config is resolved already, and {', '.join(sorted(options.explicit))} came too; resolve them together"
        )
    return config


def _check_compiles(options: AcceleratorOptions, resolved: Resolved) -> None:
    """Refuse options of a compilation that does not take place."""
    given = [path for path in options.explicit if path.startswith("compile.") and path != "compile.backend"]
    if options.compile_options:
        given.append("options")
    if given and resolved.config.compile.backend == "no":
        raise ConfigError(
            f"TorchDynamoPlugin sets {', '.join(path.removeprefix('compile.') for path in given)}, and "
            f"{resolved.describe('compile.backend')} does not compile; pass TorchDynamoPlugin(backend='inductor'), or "
            "take the plugin out"
        )


def check_num_processes(resolved: Resolved, world_size: int) -> None:
    """Refuse a world size that the configuration contradicts.

    Raises:
        ConfigError: `launch.num_processes` is another number.
    """
    stated = resolved.config.launch.num_processes
    if stated is not None and stated != world_size:
        raise ConfigError(
            f"{resolved.describe('launch.num_processes')}, and {world_size} process(es) run this job. Start it with "
            f"`accel-trainer launch --num_processes {stated} SCRIPT`, or set num_processes to {world_size} there"
        )


def build_strategy(resolved: Resolved, process: ProcessContext) -> Strategy:
    """Return the strategy of the job: the configured one, or `single` / `ddp` by the number of processes for "auto".

    Raises:
        ConfigError: the strategy is unknown, or cannot do its work on this number of processes.
    """
    name = resolved.config.strategy
    if name == "auto":
        name = "ddp" if process.world_size > 1 else "single"
    strategy: Strategy = load_strategy(name)
    facts = strategy.capabilities
    origin = resolved.describe("strategy")
    if process.world_size < facts.min_world_size:
        wanted = max(facts.min_world_size, resolved.config.launch.num_processes or 0)
        raise ConfigError(
            f"{origin}: strategy {name!r} needs at least {facts.min_world_size} processes and this job has "
            f"{process.world_size}; training unsharded in its place is not an option. Start the script with "
            f"`accel-trainer launch --num_processes {wanted} SCRIPT` (with --cpu where no GPU is), "
            "or take the strategy out"
        )
    if facts.max_world_size is not None and process.world_size > facts.max_world_size:
        raise ConfigError(
            f"{origin}: strategy {name!r} is for {facts.max_world_size} process and this job has {process.world_size}, "
            "which would each train alone; use 'ddp' or 'fsdp2', or start one process"
        )
    check_num_processes(resolved, process.world_size)
    return strategy
