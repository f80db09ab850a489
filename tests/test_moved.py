from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer.moved import MOVED_MODULES

PICKLES = Path(__file__).with_name("fixtures") / "pickles_0_1"

# Every import path of 0.1 that README, docs, examples or `accel_trainer.__init__` named.
DOCUMENTED = {
    "accelerator": "Accelerator",
    "big_modeling": "init_empty_weights",
    "data_loader": "prepare_data_loader",
    "deepspeed_plugin": "DeepSpeedPlugin",
    "errors": "ConfigError",
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "integrations.tensorboard_tracker": "TensorBoardTracker",
    "launch.cli": "main",
    "launch.notebook": "notebook_launcher",
    "logging": "get_logger",
    "optimizer": "AcceleratedOptimizer",
    "plugins": "ProjectConfiguration",
    "precision": "PrecisionPolicy",
    "progress": "tqdm",
    "registry": "register_strategy",
    "scheduler": "AcceleratedScheduler",
    "state": "PartialState",
    "strategies.api": "Strategy",
    "strategies.ddp": "DDPStrategy",
    "strategies.fsdp2": "FSDP2Strategy",
    "strategies.native": "SingleStrategy",
    "tracking": "GeneralTracker",
    "trainer": "Trainer",
    "trainer.arguments": "TrainingArguments",
    "tree": "map_leaves",
    "utils": "set_seed",
}


@pytest.mark.parametrize(("module", "name"), DOCUMENTED.items())
def test_documented_paths_of_0_1_still_import(module: str, name: str):
    assert hasattr(importlib.import_module(f"accel_trainer.{module}"), name)


@pytest.mark.parametrize(("old", "new"), MOVED_MODULES.items())
def test_a_moved_module_is_one_module_under_both_paths(old: str, new: str):
    pytest.importorskip("deepspeed" if "deepspeed_" in old else "accel_trainer")
    assert importlib.import_module(f"accel_trainer.{old}") is importlib.import_module(f"accel_trainer.{new}")


def test_no_old_path_hides_a_module_of_today():
    root = Path(__file__).resolve().parents[1]
    folders = {name: root / "accel_trainer" / name.replace(".", "/") for name in MOVED_MODULES}
    assert [name for name, path in folders.items() if path.with_suffix(".py").exists() or path.is_dir()] == []


LOAD = """
import os, pickle, sys, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, transformers.trainer

for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        assert not any(name.startswith("accel_trainer.") for name in sys.modules)
        print(type(pickle.load(open(path, "rb"))).__name__, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""


def test_pickles_of_0_1_load_in_a_process_that_has_imported_nothing_of_ours():
    """They name classes by the paths of 0.1, in TrainingArguments (`training_args.bin`) above all."""
    paths = sorted(map(str, PICKLES.glob("*.pkl")))
    finished = subprocess.run([sys.executable, "-c", LOAD, *paths], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout.split()) == len(paths) == 13


def test_a_pickled_prepared_optimizer_of_0_1_steps():
    optimizer = pickle.loads((PICKLES / "prepared_optimizer.pkl").read_bytes())
    (weight, bias) = optimizer.param_groups[0]["params"]
    before = bias.detach().clone()
    weight.grad, bias.grad = weight.detach().clone(), bias.detach().clone() + 1
    optimizer.step()
    assert bias.detach().sub(before - 0.1 * (before + 1)).abs().max() < 1e-6


def test_pickled_arguments_of_0_1_keep_their_values():
    arguments = pickle.loads((PICKLES / "training_arguments.pkl").read_bytes())
    assert type(arguments).__module__ == "accel_trainer.trainer.arguments.training_arguments"
    assert (arguments.output_dir, arguments.use_cpu, arguments.report_to) == ("run", True, [])
