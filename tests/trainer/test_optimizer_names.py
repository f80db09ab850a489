"""The table of docs/optimizers.md is true: each name of `optim` trains as one process does, or is refused, as it says.

Names whose package is not installed are left to tests/ecosystem, where these functions run for them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.training_args import OptimizerNames

from accel_trainer import Accelerator
from accel_trainer.accelerator.accelerated_optimizer import check_in_backward
from accel_trainer.config import MixedPrecision, RunConfig
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.api import Capabilities
from tests.ranks import preload, run_ranks
from tests.strategy_configs import HAS_DEEPSPEED
from tests.trainer_jobs import SaveAt, build_trainer, weights_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
MODULES = {
    "apollo-torch": "apollo_torch",
    "bitsandbytes": "bitsandbytes",
    "galore-torch": "galore_torch",
    "grokadamw": "grokadamw",
    "lomo-optim": "lomo_optim",
    "schedulefree": "schedulefree",
    "torch-optimi": "optimi",
    "torchao": "torchao",
}
if HAS_DEEPSPEED:
    preload("deepspeed")


@dataclass(frozen=True)
class Row:
    """One name, and what the table says of it."""

    name: str
    package: str
    one: str
    fsdp: str
    zero: str
    saved: str

    @property
    def is_here(self) -> bool:
        return not self.package or importlib.util.find_spec(MODULES.get(self.package, "torch_xla")) is not None


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and not line.startswith("| `optim`") and len(cells) == 6:
            yield from (Row(name, *cells[1:]) for name in re.findall(r"`(\w+)`", cells[0]))


TABLE = {row.name: row for row in rows()}


def options(name: str) -> dict[str, Any]:
    low_rank = name.startswith(("galore", "apollo"))
    more = {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=2"} if low_rank else {}
    return {"optim": name, "max_steps": 3, **more}


def run(folder: str, name: str, strategy: str, **changes: Any) -> Any:
    """Return losses and weights, or the message of the refusal."""
    if strategy == "zero":
        changes |= {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}}
    kind = "fsdp" if strategy == "fsdp" else "single"
    batch = 4 if strategy == "one" else 2
    try:
        trainer = build_trainer(
            folder, strategy=kind, samples=12, per_device_train_batch_size=batch, **options(name), **changes
        )
        trainer.train()
    except ConfigError as error:
        return str(error)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights_of(trainer)


def run_on_ranks(folder: str, names: list[str], strategies: list[str]) -> dict[tuple[str, str], Any]:
    return {(name, strategy): run(folder, name, strategy) for name in names for strategy in strategies}


def compare(names: list[str], folder: str) -> None:
    """Train with each name on one process and on two ranks; compare with the table."""
    strategies = ["ddp", "fsdp", *(["zero"] if HAS_DEEPSPEED else [])]
    found = run_ranks(run_on_ranks, 2, folder, names, strategies, timeout=200)[0]
    # In a process of its own, too: what some packages compile leaves variables behind.
    found |= run_ranks(run_on_ranks, 1, folder, names, ["one"], timeout=200)[0]
    for name in names:
        one = found[name, "one"]
        # Rounded in blocks, which are not the same: the losses are near, single weights need not be.
        is_rounded = re.search("[48]bit", name) is not None
        for strategy in strategies:
            expected = {"ddp": TABLE[name].one, "fsdp": TABLE[name].fsdp, "zero": TABLE[name].zero}[strategy]
            seen = found[name, strategy]
            if expected == "no":
                assert isinstance(seen, str), (name, strategy)
                assert "use" in seen, seen
                continue
            assert not isinstance(seen, str), (name, strategy, seen)
            np.testing.assert_allclose(seen[0], one[0], rtol=1e-2 if is_rounded else 1e-5, err_msg=f"{name} {strategy}")
            for parameter, weights in ({} if is_rounded else one[1]).items():
                np.testing.assert_allclose(seen[1][parameter], weights, atol=1e-4, err_msg=f"{name} {strategy}")


HERE = sorted(row.name for row in TABLE.values() if not row.package and row.one == "yes")


def test_every_name_of_transformers_is_in_the_table():
    assert set(TABLE) == {member.value for member in OptimizerNames} | {"muon"}


@pytest.mark.multirank
def test_names_of_torch_and_transformers_train_as_the_table_says(tmp_path):
    compare(HERE, str(tmp_path))


IN_BACKWARD = [row.name for row in TABLE.values() if "lomo" in row.name or "layerwise" in row.name]
WAITS: dict[str, dict[str, Any]] = {
    r"all micro-batches have given theirs \(gradient_accumulation_steps=4\)": {"gradient_accumulation_steps": 4},
    r"their norm is known \(max_grad_norm=0.5; 0 clips nothing\)": {"max_grad_norm": 0.5},
    r"an attempt is known to fit \(auto_find_batch_size\)": {"auto_find_batch_size": True},
    "on_nonfinite='skip_step' can leave an update out": {"on_nonfinite": "skip_step"},
}


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_what_an_update_in_the_backward_cannot_wait_for_is_refused(tmp_path, name):
    assert len(IN_BACKWARD) == 6
    for waits, changes in WAITS.items():
        with pytest.raises(
            ConfigError, match=rf"optim='{name}' updates each parameter in the backward, before {waits}"
        ):
            build_trainer(tmp_path, **options(name), **changes)
    with pytest.raises(
        ConfigError, match=r"\(gradient_accumulation_steps=2\) and their norm is known .*on one process"
    ):
        build_trainer(tmp_path, **options(name), gradient_accumulation_steps=2, max_grad_norm=2.0)


def test_an_update_in_the_backward_of_scaled_gradients_is_refused():
    config = RunConfig(mixed_precision=MixedPrecision.FP16)
    alone = Accelerator(cpu=True).process
    with pytest.raises(
        ConfigError, match="Lomo updates each parameter in the backward, before fp16 is unscaled; train"
    ):
        check_in_backward("Lomo", config, alone, Capabilities())


def refuse_on_ranks(folder: str, *strategies: str) -> list[str]:
    return [run(folder, name, strategy) for name in IN_BACKWARD for strategy in strategies]


@pytest.mark.multirank
def test_an_update_in_the_backward_of_several_processes_is_refused(tmp_path):
    for message in run_ranks(refuse_on_ranks, 2, str(tmp_path), "ddp", "fsdp")[0]:
        assert re.search(r"updates each parameter in the backward, before all processes have given", message)
    assert "the shards of a gradient are together" in run_ranks(refuse_on_ranks, 1, str(tmp_path), "fsdp")[0][0]


@pytest.mark.parametrize("name", [row.name for row in TABLE.values() if row.one == "yes" and row.saved == "no"])
def test_checkpoints_that_could_not_be_resumed_are_refused_before_training(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"optim='{name}' keeps its state in .*set save_only_model=True or save_str"):
        build_trainer(tmp_path, **options(name), save_strategy="steps")
    build_trainer(tmp_path, **options(name), save_strategy="steps", save_only_model=True)


def refused_shards(folder: str) -> None:
    for name in [row.name for row in TABLE.values() if row.saved == "not of shards"]:
        with pytest.raises(ConfigError, match=rf"optim='{name}' keeps its state in blocks .*checkpoint of shards"):
            build_trainer(folder, strategy="fsdp", **options(name), save_strategy="epoch")
        build_trainer(folder, strategy="single", **options(name), save_strategy="epoch")


@pytest.mark.multirank
def test_checkpoints_of_quantised_shards_are_refused_before_training(tmp_path):
    run_ranks(refused_shards, 2, str(tmp_path))


def test_torchaos_offload_is_refused_by_name():
    model = torch.nn.Linear(2, 2)
    kind = type("CPUOffloadOptimizer", (torch.optim.SGD,), {"__module__": "torchao.optim.cpu_offload"})
    with pytest.raises(
        ConfigError, match=r"torchao\.optim\.cpu_offload\.CPUOffloadOptimizer cannot .*fsdp.offload_params"
    ):
        Accelerator(cpu=True).prepare(model, kind(model.parameters(), lr=0.1))


def resume(folder: str, name: str, strategy: str) -> list[list[float]]:
    """Return the losses of a run, and of one that goes on from its checkpoint, which is half way."""
    found = []
    for checkpoint in (None, f"{folder}/{name}/checkpoint-2"):
        trainer = build_trainer(
            f"{folder}/{name}", strategy="fsdp" if strategy == "fsdp" else "single", samples=16, optim=name,
            per_device_train_batch_size=4 if strategy == "one" else 2,
            options={"callbacks": [SaveAt(2)] if checkpoint is None else []},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def resume_all(folder: str, names: list[str], strategy: str) -> dict[str, list[list[float]]]:
    return {name: resume(folder, name, strategy) for name in names}


def compare_resumed(names: list[str], tmp_path: Path) -> None:
    """Resume with each name, on one process and on shards."""
    sharded = [name for name in names if TABLE[name].fsdp == "yes" and TABLE[name].saved == "yes"]
    unsharded = [name for name in names if TABLE[name].saved != "no"]
    runs = run_ranks(resume_all, 1, str(tmp_path / "one"), unsharded, "one", timeout=200)[0]
    shards = run_ranks(resume_all, 2, str(tmp_path / "two"), sharded, "fsdp", timeout=200)[0]
    for name, (whole, again) in (*runs.items(), *shards.items()):
        assert again == whole, name


@pytest.mark.multirank
def test_a_resumed_run_is_the_interrupted_run(tmp_path):
    compare_resumed(HERE, tmp_path)


def refuse_classes(folder: str) -> None:
    for name, way_out in {"Adafactor": "use that of transformers", "Rprop": "use another optimizer"}.items():
        given = {"optimizer_cls_and_kwargs": (getattr(torch.optim, name), {"lr": 1e-3})}
        trainer = build_trainer(folder, strategy="fsdp", options=given)
        with pytest.raises(ConfigError, match=rf"\.{name} cannot train with strategy 'fsdp2': it .*{way_out}"):
            trainer.train()
        model = torch.nn.Linear(4, 4)
        with pytest.raises(ConfigError, match=rf"\.{name} cannot train with strategy 'fsdp2'"):
            Accelerator(cpu=True, strategy="fsdp2").prepare(model, getattr(torch.optim, name)(model.parameters()))


@pytest.mark.multirank
def test_classes_that_cannot_update_shards_are_refused_whoever_made_them(tmp_path):
    run_ranks(refuse_classes, 2, str(tmp_path))
