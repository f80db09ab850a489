"""What scripts import from the modules of similar libraries is found in ours, under the same paths."""

from __future__ import annotations

import importlib

import pytest

import accel_trainer

# By module, the names that scripts use; a name of the package itself is the same object there.
FAMILIAR = {
    "accelerator": "Accelerator",
    "big_modeling": (
        "cpu_offload dispatch_model infer_auto_device_map init_empty_weights init_on_device "
        "load_checkpoint_and_dispatch"
    ),
    "data_loader": "SeedableRandomSampler prepare_data_loader skip_first_batches",
    "hooks": "AlignDevicesHook ModelHook UserCpuOffloadHook add_hook_to_module remove_hook_from_module",
    "logging": "get_logger",
    "optimizer": "AcceleratedOptimizer",
    "scheduler": "AcceleratedScheduler",
    "state": "AcceleratorState DistributedType GradientState PartialState is_initialized",
    "tracking": "GeneralTracker TensorBoardTracker on_main_process",
    "utils": (
        "AutocastKwargs DataLoaderConfiguration DeepSpeedPlugin DistributedDataParallelKwargs DistributedType "
        "DummyOptim DummyScheduler FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin "
        "InitProcessGroupKwargs KwargsHandler ProfileKwargs ProjectConfiguration TorchDynamoPlugin broadcast "
        "broadcast_object_list concatenate find_batch_size find_executable_batch_size gather gather_object "
        "honor_type load_checkpoint_in_model pad_across_processes recursively_apply reduce release_memory "
        "send_to_device set_module_tensor_to_device set_seed synchronize_rng_states tqdm wait_for_everyone"
    ),
}
FAMILIAR_NAMES = {module: names.split() for module, names in FAMILIAR.items()}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in FAMILIAR_NAMES.items() for name in names]
)
def test_a_familiar_import_works(module: str, name: str):
    found = getattr(importlib.import_module(f"accel_trainer.{module}"), name)
    assert found is getattr(accel_trainer, name, found)


@pytest.mark.parametrize("module", sorted(set(FAMILIAR) - {"tracking"}))
def test_what_a_familiar_module_says_it_has_it_has(module: str):
    found = importlib.import_module(f"accel_trainer.{module}")
    assert all(hasattr(found, name) for name in found.__all__)
    assert {*FAMILIAR_NAMES[module]} <= {*found.__all__}


@pytest.mark.parametrize(
    ("module", "name", "way_out"),
    [
        ("utils", "MSAMPRecipeKwargs", "TransformerEngine and MS-AMP are not offered"),
        ("utils", "MegatronLMPlugin", "Megatron-LM is not offered"),
        ("inference", "prepare_pippy", "pipeline-parallel inference is not offered"),
    ],
)
def test_a_familiar_name_that_is_absent_says_what_to_use(module: str, name: str, way_out: str):
    with pytest.raises(ImportError, match=f"accel_trainer.{module} has no '{name}': {way_out}"):
        exec(f"from accel_trainer.{module} import {name}")
    assert not hasattr(importlib.import_module(f"accel_trainer.{module}"), "no_such_name")


def test_a_refused_name_of_the_package_says_why():
    with pytest.raises(ImportError, match="accel_trainer has no 'prepare_pippy': pipeline-parallel inference is not"):
        from accel_trainer import prepare_pippy  # noqa: F401
