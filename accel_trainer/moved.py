"""Import paths of release 0.1 and earlier: scripts and pickles that name them still find the modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED_MODULES", "find_moved_modules"]

MOVED_MODULES = {
    "absent": "unsupported",
    "accumulation": "accelerator.accumulation",
    "checkpoint.background": "checkpoint.commit.background",
    "checkpoint.codec": "checkpoint.format.json_codec",
    "checkpoint.dcp": "checkpoint.interop.dcp",
    "checkpoint.directory": "checkpoint.commit.publication",
    "checkpoint.disk": "checkpoint.commit.disk",
    "checkpoint.empty": "checkpoint.weights.meta_device",
    "checkpoint.export": "checkpoint.interop.export",
    "checkpoint.files": "checkpoint.weights.reading",
    "checkpoint.foreign": "checkpoint.interop.accelerate_state",
    "checkpoint.hashing": "checkpoint.format.checksums",
    "checkpoint.initial": "checkpoint.weights.into_model",
    "checkpoint.layout": "checkpoint.format.placement",
    "checkpoint.loading": "checkpoint.weights.into_model",
    "checkpoint.lock": "checkpoint.commit.lock",
    "checkpoint.manifest": "checkpoint.format.manifest",
    "checkpoint.parts": "checkpoint.shards",
    "checkpoint.persistence": "checkpoint.commit.retry",
    "checkpoint.registry": "checkpoint.checkpointer",
    "checkpoint.replacing": "checkpoint.commit.rename",
    "checkpoint.retention": "checkpoint.commit.retention",
    "checkpoint.slices": "checkpoint.format.boxes",
    "checkpoint.spool": "checkpoint.weights.writing",
    "checkpoint.staged": "checkpoint.commit.staging",
    "checkpoint.state": "checkpoint.train_state",
    "checkpoint.stock": "checkpoint.interop.hf_fsdp_export",
    "checkpoint.stored": "checkpoint.reader",
    "checkpoint.tensor_file": "checkpoint.format.safetensors_file",
    "checkpoint.verification": "checkpoint.format.verification",
    "checkpointing": "accelerator.checkpointing",
    "config.accelerate_dialect": "config.dialects.accelerate",
    "config.deepspeed_block": "config.deepspeed.block",
    "config.deepspeed_fsdp": "config.deepspeed.to_fsdp",
    "config.deepspeed_keys": "config.deepspeed.keys",
    "config.deepspeed_levels": "config.deepspeed.levels",
    "config.document": "config.readers.document",
    "config.environment": "config.dialects.environment",
    "config.fsdp_dialect": "config.dialects.fsdp",
    "config.json_reader": "config.readers.json_reader",
    "config.loading": "config.readers.config_source",
    "config.render": "config.files",
    "config.settings": "config.layer",
    "config.sources": "config.resolve",
    "config.yaml_reader": "config.readers.yaml_reader",
    "data.build": "data.loader",
    "data.sources": "data.index_source",
    "data.stream": "data.iterable_reader",
    "data.streaming": "data.iterable_source",
    "deepspeed_plugin": "plugins.deepspeed_plugin",
    "described": "accelerator.preparing",
    "engine_plugins": "plugins.deepspeed_plugin",
    "exchange": "accelerator.gathering",
    "fsdp_plugin": "plugins.fsdp_plugin",
    "gathering": "accelerator.gathering",
    "integrations.deepspeed_arguments": "integrations.deepspeed.trainer_arguments",
    "integrations.deepspeed_building": "integrations.deepspeed.strategy",
    "integrations.deepspeed_checkpoint": "integrations.deepspeed.checkpoint_io",
    "integrations.deepspeed_config": "integrations.deepspeed.config",
    "integrations.deepspeed_facts": "integrations.deepspeed.config",
    "integrations.deepspeed_loading": "integrations.deepspeed.partition_shards",
    "integrations.deepspeed_partitions": "integrations.deepspeed.partitions",
    "integrations.deepspeed_resolver": "integrations.deepspeed.config",
    "integrations.deepspeed_runtime": "integrations.deepspeed.runtime",
    "integrations.deepspeed_schema": "integrations.deepspeed.installed_keys",
    "integrations.deepspeed_state": "integrations.deepspeed.partition_shards",
    "integrations.deepspeed_strategy": "integrations.deepspeed.strategy",
    "integrations.deepspeed_unit": "integrations.deepspeed.unit",
    "integrations.mlflow_tracker": "integrations.trackers.mlflow_tracker",
    "integrations.tensorboard_tracker": "integrations.trackers.tensorboard_tracker",
    "integrations.trackio_tracker": "integrations.trackers.wandb_tracker",
    "integrations.wandb_tracker": "integrations.trackers.wandb_tracker",
    "launch.questionnaire": "launch.config_file",
    "launch.testing": "launch.job",
    "launch.weights": "launch.checkpoints",
    "operations": "accelerator.gathering",
    "options": "accelerator.options",
    "pairing": "accelerator.prepared",
    "preparing": "accelerator.preparing",
    "progress": "logging",
    "reporting": "accelerator.trackers",
    "runtime.agreement": "runtime.collective_checks",
    "runtime.faults": "runtime.fault_injection",
    "runtime.health": "runtime.shared_errors",
    "runtime.ragged": "runtime.uneven_gather",
    "runtime.regroup": "runtime.memory",
    "runtime.structures": "runtime.tensor_trees",
    "runtime.wire": "runtime.transport",
    "saving": "accelerator.checkpointing",
    "stepping": "accelerator.stepping",
    "strategies.described": "strategies.optimizer_placeholder",
    "strategies.elastic_state": "strategies.parameter_state.torch_io",
    "strategies.fitting": "strategies.parameter_state.matching",
    "strategies.held_gradients": "strategies.single",
    "strategies.native": "strategies.single",
    "strategies.recompute": "strategies.fsdp2.wrapping",
    "strategies.stored_unit": "strategies.parameter_state.base_io",
    "strategies.sync": "strategies.broadcast_values",
    "strategies.torch_state": "strategies.parameter_state.torch_io",
    "strategies.values": "strategies.fsdp2.initial_values",
    "strategies.whole_gradients": "strategies.fsdp2.unit",
    "strategies.whole_weights": "strategies.fsdp2.unit",
    "strategies.wrapping": "strategies.fsdp2.wrapping",
    "token_mean": "accelerator.token_mean",
    "trainer.accelerator_setup": "trainer.preparation",
    "trainer.batch_size_search": "runtime.memory",
    "trainer.best": "trainer.checkpoint.best_model",
    "trainer.checkpoint_methods": "trainer.checkpoint.methods",
    "trainer.checkpointing": "trainer.checkpoint.upstream_files",
    "trainer.deepspeed_arguments": "trainer.arguments.deepspeed_arguments",
    "trainer.figures": "trainer.checkpoint.run_checkpoints",
    "trainer.fsdp_arguments": "trainer.arguments.fsdp_arguments",
    "trainer.gathering": "trainer.predictions",
    "trainer.layout": "trainer.preparation",
    "trainer.loss_scale": "trainer.loss_normalization",
    "trainer.publishing": "trainer.checkpoint.methods",
    "trainer.reading": "trainer.epoch",
    "trainer.resuming": "trainer.checkpoint.resuming",
    "units": "accelerator.prepared",
    "windows": "accelerator.open_windows",
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
