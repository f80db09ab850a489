"""Import paths of release 0.1 and earlier, and of similar libraries: scripts and pickles still find the modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED_MODULES", "find_moved_modules"]

_MOVED = {
    "": (
        "absent:unsupported accumulation:accelerator.accumulation checkpointing:accelerator.checkpointing "
        "commands:launch.entry_points "
        "deepspeed_plugin:plugins.deepspeed_plugin described:accelerator.preparing "
        "engine_plugins:plugins.deepspeed_plugin exchange:accelerator.gathering fsdp_plugin:plugins.fsdp_plugin "
        "gathering:accelerator.gathering hooks:big_models operations:accelerator.gathering options:accelerator.options "
        "pairing:accelerator.prepared preparing:accelerator.preparing progress:logging "
        "launchers:launch.notebook local_sgd:accelerator.local_sgd memory_utils:utils "
        "inference:unsupported parallelism_config:plugins.parallelism "
        "reporting:accelerator.trackers saving:accelerator.checkpointing stepping:accelerator.stepping "
        "token_mean:accelerator.token_mean units:accelerator.prepared windows:accelerator.checkpointing"
    ),
    "checkpoint": (
        "background:checkpoint.commit.background codec:checkpoint.format.json_codec dcp:checkpoint.interop.dcp "
        "directory:checkpoint.commit.publication disk:checkpoint.commit.disk empty:checkpoint.weights.meta_device "
        "export:checkpoint.interop.export files:checkpoint.weights.reading "
        "foreign:checkpoint.interop.accelerate_state hashing:checkpoint.format.checksums "
        "initial:checkpoint.weights.into_model layout:checkpoint.format.placement "
        "loading:checkpoint.weights.into_model lock:checkpoint.commit.lock manifest:checkpoint.format.manifest "
        "parts:checkpoint.shards persistence:checkpoint.commit.retry registry:checkpoint.checkpointer "
        "replacing:checkpoint.commit.rename retention:checkpoint.commit.retention slices:checkpoint.format.boxes "
        "spool:checkpoint.weights.writing staged:checkpoint.commit.staging state:checkpoint.train_state "
        "stock:checkpoint.interop.export stored:checkpoint.reader "
        "tensor_file:checkpoint.format.safetensors_file verification:checkpoint.format.verification"
    ),
    "config": (
        "accelerate_dialect:config.dialects.accelerate deepspeed_block:config.deepspeed.block "
        "deepspeed_fsdp:launch.convert deepspeed_keys:config.deepspeed.keys "
        "deepspeed_levels:config.deepspeed.levels document:config.readers.document "
        "environment:config.dialects.environment fsdp_dialect:config.dialects.fsdp "
        "json_reader:config.readers.config_source loading:config.readers.config_source render:config.files "
        "settings:config.layer sources:config.resolve yaml_reader:config.readers.yaml_reader"
    ),
    "commands": (
        "accelerate_cli:launch.cli config:launch.entry_points config.config_args:launch.entry_points "
        "config.default:launch.entry_points env:launch.entry_points estimate:launch.estimate "
        "launch:launch.entry_points merge:launch.entry_points test:launch.entry_points to_fsdp2:launch.convert"
    ),
    "data": (
        "build:data.loader sources:data.index_source splitting:runtime.tensor_trees stream:data.iterable_reader "
        "streaming:data.iterable_source"
    ),
    "integrations": (
        "deepspeed_arguments:integrations.deepspeed.trainer_arguments "
        "deepspeed_building:integrations.deepspeed.strategy "
        "deepspeed_checkpoint:integrations.deepspeed.checkpoint_io deepspeed_config:integrations.deepspeed.config "
        "deepspeed_facts:integrations.deepspeed.config deepspeed_loading:integrations.deepspeed.checkpoint_io "
        "deepspeed_partitions:integrations.deepspeed.partitions deepspeed_resolver:integrations.deepspeed.config "
        "deepspeed_runtime:integrations.deepspeed.runtime deepspeed_schema:integrations.deepspeed.config "
        "deepspeed_state:integrations.deepspeed.checkpoint_io "
        "deepspeed_strategy:integrations.deepspeed.strategy deepspeed_unit:integrations.deepspeed.unit "
        "mlflow_tracker:integrations.trackers.mlflow_tracker "
        "tensorboard_tracker:integrations.trackers.tensorboard_tracker "
        "trackio_tracker:integrations.trackers.wandb_tracker wandb_tracker:integrations.trackers.wandb_tracker"
    ),
    "launch": "testing:launch.job weights:launch.checkpoints",
    "runtime": (
        "agreement:runtime.collective_checks faults:runtime.fault_injection health:runtime.shared_errors "
        "mesh:strategies.parallel.meshes ragged:runtime.uneven_gather regroup:runtime.memory "
        "structures:runtime.tensor_trees wire:runtime.transport"
    ),
    "strategies": (
        "described:strategies.optimizer_placeholder elastic_state:strategies.parameter_state.torch_io "
        "fitting:strategies.parameter_state.matching held_gradients:strategies.single native:strategies.single "
        "recompute:strategies.fsdp2.strategy sequence_parallel:strategies.parallel.sequence_parallel "
        "stored_unit:strategies.parameter_state.base_io sync:strategies.broadcast_values "
        "tensor_parallel:strategies.parallel.tensor_parallel torch_state:strategies.parameter_state.torch_io "
        "values:strategies.fsdp2.initial_values whole_gradients:strategies.fsdp2.unit "
        "whole_weights:strategies.fsdp2.unit wrapping:strategies.fsdp2.wrapping"
    ),
    "trainer": (
        "accelerator_setup:trainer.preparation "
        "best:trainer.checkpoint.best_model checkpoint_methods:trainer.checkpoint.methods "
        "checkpointing:trainer.checkpoint.upstream_files "
        "deepspeed_arguments:trainer.arguments.deepspeed_arguments figures:trainer.checkpoint.run_checkpoints "
        "fsdp_arguments:trainer.arguments.fsdp_arguments gathering:trainer.evaluation layout:trainer.preparation "
        "loss_scale:trainer.epoch publishing:trainer.checkpoint.methods reading:trainer.epoch "
        "resuming:trainer.checkpoint.resuming"
    ),
    "utils": (
        "ao:utils dataclasses:utils deepspeed:utils environment:utils fsdp_utils:utils imports:utils memory:utils "
        "modeling:utils offload:utils operations:utils other:utils random:utils versions:utils"
    ),
}
"""By package of old: `NAME:NEW_PATH` of each module."""

MOVED_MODULES = {
    f"{package}.{old}".removeprefix("."): new
    for package, moves in _MOVED.items()
    for old, _, new in (move.partition(":") for move in moves.split())
}
"""New paths by old ones, both below `accel_trainer`."""

_PACKAGE = __name__.rpartition(".")[0]


class _MovedModules(MetaPathFinder, Loader):
    """Finds a module under its old path, as the very module that stands at the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == _PACKAGE and name in MOVED_MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system: `exec_module` puts another one in its place."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        # The import system returns the entry of sys.modules when the loader is done, not the module that it made.
        sys.modules[old] = importlib.import_module(f"{_PACKAGE}.{MOVED_MODULES[old.removeprefix(f'{_PACKAGE}.')]}")


def find_moved_modules() -> None:
    """Let old paths be imported; behind all other finders, so that it costs nothing where a module is found."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
