"""Options as objects, under the names that users of similar libraries pass to `Accelerator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from accel_trainer.errors import ConfigError

__all__ = [
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "ProjectConfiguration",
]


class KwargsHandler:
    """Base of the option objects that `Accelerator(kwargs_handlers=[...])` takes, at most one of each class."""

    def given(self) -> dict[str, Any]:
        """Return the options that were set, the ones set to a default value included; None means not set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}  # type: ignore[arg-type]


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel; what is None is left to the configuration."""

    dim: int | None = None
    broadcast_buffers: bool | None = None
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool | None = None
    check_reduction: bool | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of torch's GradScaler, used with fp16."""

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`."""

    backend: str | None = None
    timeout: Any = None
    """A datetime.timedelta; it reaches every group of the job, on the CPU too."""


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share their data over the ranks. Field by field: `config.DataConfig`."""

    split_batches: bool | None = None
    dispatch_batches: bool | None = None
    even_batches: bool | None = None
    use_seedable_sampler: bool | None = None
    data_seed: int | None = None
    non_blocking: bool | None = None
    use_stateful_dataloader: bool | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that were set, by dotted path."""
        return {f"data.{f.name}": getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@dataclass
class GradientAccumulationPlugin:
    """How many micro-batches make an update, and when gradients are exchanged."""

    num_steps: int = 1
    sync_with_dataloader: bool = True
    """Whether the last batch of a loader ends a window."""
    sync_each_batch: bool = False
    """Exchange gradients on every micro-batch: more communication, less memory when sharded."""

    def options(self) -> dict[str, Any]:
        """Return the options by dotted path."""
        return {f"accumulation.{f.name}": getattr(self, f.name) for f in fields(self)}


_FSDP_OPTION = {"transformer_cls_names_to_wrap": "wrap_classes", "cpu_offload": "offload_params"}


@dataclass
class FullyShardedDataParallelPlugin:
    """Shard the model with FSDP2: giving one chooses strategy "fsdp2". None leaves an option as configured."""

    reshard_after_forward: bool | None = None
    auto_wrap_policy: str | Callable[[nn.Module], bool] | None = None
    """A name ("transformer_based_wrap", "size_based_wrap", "no_wrap"), or a callable, true for modules to be units."""
    transformer_cls_names_to_wrap: Iterable[str] | None = None
    min_num_params: int | None = None
    cpu_offload: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    state_dict_type: str | None = None
    ignored_modules: Iterable[str] | None = None
    forward_prefetch: bool | None = None
    replicate_size: int | None = None
    fsdp_version: int = 2

    def __post_init__(self) -> None:
        if self.fsdp_version != 2:
            raise ConfigError(
                f"FullyShardedDataParallelPlugin(fsdp_version={self.fsdp_version}): only FSDP2 is offered; pass 2"
            )

    @property
    def wrap_function(self) -> Callable[[nn.Module], bool] | None:
        """The callable given as `auto_wrap_policy`, if one was."""
        policy = self.auto_wrap_policy
        return policy if callable(policy) else None

    def options(self) -> dict[str, Any]:
        """Return the options that were set, by dotted path."""
        options: dict[str, Any] = {"strategy": "fsdp2"}
        for option in fields(self):
            value = getattr(self, option.name)
            if value is None or option.name == "fsdp_version" or option.name == "auto_wrap_policy":
                continue
            if option.name in ("transformer_cls_names_to_wrap", "ignored_modules"):
                value = (value,) if isinstance(value, str) else tuple(value)
            options[f"fsdp.{_FSDP_OPTION.get(option.name, option.name)}"] = value
        if isinstance(self.auto_wrap_policy, str):
            options["fsdp.wrap_policy"] = _wrap_policy_name(self.auto_wrap_policy)
        return options


def _wrap_policy_name(name: str) -> str:
    known = {"transformer_based_wrap": "transformer", "size_based_wrap": "size", "no_wrap": "none"}
    return known.get(name.lower(), name.lower())


@dataclass
class ProjectConfiguration:
    """Where states are saved, and how many are kept."""

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    """Save to `project_dir/checkpoints/checkpoint_N` when `save_state` is called without a directory."""
    total_limit: int | None = None
    """Automatically named checkpoints to keep; None keeps all."""
    iteration: int = 0
    """Number of the next automatically named checkpoint."""
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
