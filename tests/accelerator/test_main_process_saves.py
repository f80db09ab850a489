"""`save_state` and `save_model` under `if accelerator.is_main_process`: what rank 0 can save alone, and what not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, set_seed
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.runtime import rank_watch
from accel_trainer.runtime.own_watch import stop_watch
from accel_trainer.utils import DataLoaderConfiguration
from tests.loops import take_update
from tests.ranks import RankFailure, map_jobs, preload, run_ranks

preload("accel_trainer.accelerator")
NUM_SAMPLES = 44
"""Of batches of 4 on two ranks: in the last step of an epoch one of them has none, as it is not filled up."""


def noted(accelerator_logger: str = "accel_trainer") -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger(accelerator_logger)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return said


def train(folder: Path, saves_at: int | None, resumes: bool) -> tuple[Any, ...]:
    """Train two epochs; return the samples of each update, the weights, a draw after the load, and what was said."""
    rank_watch._STUCK_SECONDS = 1.0
    said = noted()
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, strategy="ddp", dataloader_config=stateful, config={"meters": True})
    set_seed(3 if saves_at is None else 4)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = torch.arange(float(NUM_SAMPLES))[:, None]
    loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    drawn, update, samples = [], 0, []
    if resumes:
        accelerator.load_state(folder / "checkpoint-8")
        drawn, update = torch.rand(3).tolist(), 8
    for _ in range(1 if resumes else 2):  # the rest of the second epoch
        for (batch,) in loader:
            with accelerator.accumulate(model):
                take_update(model(batch / NUM_SAMPLES).square().mean(), optimizer, accelerator)
                schedule.step()
            samples.append(sorted(accelerator.gather_for_metrics(batch).flatten().tolist()))
            update += 1
            if update == saves_at and accelerator.is_main_process:
                accelerator.save_state(folder / f"checkpoint-{update}")
    accelerator.wait_for_everyone()
    weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    return samples, weights, drawn, said


def test_a_run_goes_on_from_a_state_of_the_main_process_alone_with_the_next_samples(ended: Callable[[str], Any]):
    saved, folder = ended("whole")
    resumed = run_ranks(train, 2, folder, None, True)

    samples = saved[0][0]
    for epoch in (samples[:6], samples[6:]):
        assert sorted(chain(*epoch)) == [float(sample) for sample in range(NUM_SAMPLES)]
    assert all(run[0] == samples[8:] for run in resumed)
    for name, value in saved[0][1].items():
        torch.testing.assert_close(resumed[0][1][name], value, rtol=0, atol=0)
    assert resumed[0][2] != resumed[1][2], "a stream for each rank"
    manifest = Manifest.read(folder / "checkpoint-8")
    assert manifest.metadata["main_process_of"] == 2
    assert {name for name in manifest.files if name.startswith("random_")} == {"random_0.safetensors", "random_0.json"}
    told = [line for line in saved[0][3] if "on the main process alone" in line]
    assert len(told) == 1
    assert "save_state() is called on the main process alone, train (test_main_process_saves.py:" in told[0]
    assert "the state has its random streams, and none of the other ranks'" in told[0]
    assert "saved by the main process alone, of 2, and loaded by 2: random streams new" in "".join(resumed[0][3])


def save_in_turns(folder: Path, config: dict[str, Any]) -> list[str]:
    """Save alone and with all, in turns, with a comparison of calls right behind; return the states' random streams."""
    rank_watch._STUCK_SECONDS = 1.0
    accelerator = Accelerator(cpu=True, strategy="ddp", config=config)
    model, _ = accelerator.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters()))
    for number in range(4):
        if number % 2 or accelerator.is_main_process:
            accelerator.save_state(folder / f"state_{number}")
        total = accelerator.reduce(torch.ones(1))
        assert total.item() == 2
        accelerator.backward(model(torch.ones(1, 2)).sum())
    manifests = [Manifest.read(folder / f"state_{number}") for number in range(4)]
    return [str(sum(name.startswith("random_") for name in manifest.files) // 2) for manifest in manifests]


@pytest.mark.parametrize("name", ["plain", "debug"])
def test_saves_of_the_main_process_and_of_all_ranks_take_turns(ended: Callable[[str], Any], name: str):
    assert ended(name)[0] == [["1", "2", "1", "2"]] * 2


def test_a_save_of_the_main_process_behind_one_of_all_in_the_background_is_refused(ended: Callable[[str], Any]):
    failed, folder = ended("save_async")
    assert "DesyncError: rank 0 is about to call save_state" in str(failed)
    assert "state_1" not in str(failed)
    assert Manifest.read(folder / "state_0").metadata["main_process_of"] == 2


def save_and_leave(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, strategy="ddp")
    accelerator.prepare(nn.Linear(2, 1))
    if accelerator.is_main_process:
        accelerator.save_state(folder / "state")
    else:
        stop_watch()  # what the interpreter does at exit, which these ranks leave out


def test_the_main_process_saves_alone_once_the_others_have_left(ended: Callable[[str], Any]):
    results, folder = ended("leave")
    assert results == [None, None]
    assert Manifest.read(folder / "state").metadata["main_process_of"] == 2


class Savable(nn.Linear):
    """Writes itself, as models of diffusers and transformers do."""

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), Path(folder, "own.pt"))


def save_by_hooks(folder: Path) -> list[float]:
    """Save on the main process with a script's own hooks, and load; return the weights, which were changed between."""
    accelerator = Accelerator(cpu=True, strategy="ddp")

    def save(models: list[Savable], weights: list[dict[str, Any]], output_dir: str) -> None:
        if accelerator.is_main_process:
            for model in models:
                model.save_pretrained(output_dir)
                weights.pop()

    def load(models: list[Savable], input_dir: str) -> None:
        while models:
            models.pop().load_state_dict(torch.load(Path(input_dir, "own.pt")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    model, _ = accelerator.prepare(model := Savable(2, 1), torch.optim.SGD(model.parameters()))
    nn.init.constant_(accelerator.unwrap_model(model).weight, 3.0)
    if accelerator.is_main_process:
        accelerator.save_state(folder / "state")
    accelerator.wait_for_everyone()
    nn.init.zeros_(accelerator.unwrap_model(model).weight)
    accelerator.load_state(folder / "state")
    return accelerator.unwrap_model(model).weight.tolist()


def test_hooks_get_the_models_without_the_wrapper_of_ddp(ended: Callable[[str], Any]):
    results, folder = ended("hooks")
    assert results == [[[3.0, 3.0]]] * 2
    assert not any(".model." in name for name in Manifest.read(folder / "state").files)


def save_weights_in_turns(folder: Path, strategy: str, config: dict[str, Any]) -> list[float]:
    """Save weights alone and with all, in turns, behind an update each; return the first weight at each save."""
    rank_watch._STUCK_SECONDS = 1.0
    accelerator = Accelerator(cpu=True, strategy=strategy, config=config)
    model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for number in range(4):
        take_update(model(torch.ones(1, 2)).sum(), optimizer, accelerator)
        if number % 2 or accelerator.is_main_process:
            accelerator.save_model(model, folder / f"weights_{number}")
        assert accelerator.reduce(torch.ones(1)).item() == 2
        seen.append(accelerator.unwrap_model(model).weight[0, 0].item())
    return seen


@pytest.mark.parametrize("name", ["weights", "weights, debug", "outlived weights"])
def test_weights_are_saved_by_the_main_process_and_by_all_ranks_in_turns(ended: Callable[[str], Any], name: str):
    results, folder = ended(name)
    saved = [load_file(folder / f"weights_{number}" / "model.safetensors")["weight"][0, 0] for number in range(4)]
    assert saved == results[0] == results[1]


def test_weights_that_ranks_share_are_not_saved_by_one_alone(ended: Callable[[str], Any]):
    failed, folder = ended("shards of weights")
    assert "DesyncError: rank 0 is about to call save_model, save_weights_in_turns (test_main" in failed.failures[0]
    assert "All ranks call save_model(): take it out of `if accelerator.is_main_process`." in failed.failures[0]
    assert not (folder / "weights_0").exists()


def save_what_ranks_share(folder: Path, strategy: str, kind: str) -> None:
    rank_watch._STUCK_SECONDS = 1.0
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    model, _ = accelerator.prepare(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters()))
    if kind == "window":
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    if accelerator.process_index == int(kind == "rank"):
        accelerator.save_state(folder / "state")
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    accelerator.wait_for_everyone()


JOBS: dict[str, tuple[Any, ...]] = {
    "whole": (train, 8, False),
    "plain": (save_in_turns, {}),
    "debug": (save_in_turns, {"debug": True}),
    "save_async": (save_in_turns, {"save_async": True}),
    "leave": (save_and_leave,),
    "hooks": (save_by_hooks,),
    "weights": (save_weights_in_turns, "ddp", {}),
    "weights, debug": (save_weights_in_turns, "ddp", {"debug": True}),
    "shards of weights": (save_weights_in_turns, "fsdp2", {}),
    "shards": (save_what_ranks_share, "fsdp2", "shards"),
    "window": (save_what_ranks_share, "ddp", "window"),
    "rank": (save_what_ranks_share, "ddp", "rank"),
    "outlived weights": (save_weights_in_turns, "ddp", {}),
    "outlived": (save_what_ranks_share, "ddp", "outlived"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Run jobs that wait for most of their time, three at once; return of each its results, or failure, and folder."""
    folders = {name: tmp_path_factory.mktemp(name) for name in JOBS}

    def run(name: str) -> Any:
        function, *options = JOBS[name]
        try:
            env = {"ACCEL_TRAINER_LAUNCH__ON_RANK_LOSS": "continue"} if name.startswith("outlived") else {}
            return run_ranks(function, 2, folders[name], *options, env=env, timeout=60, grace_seconds=1)
        except RankFailure as failed:
            return failed

    results = map_jobs(run, JOBS)
    return lambda name: (results[name], folders[name])


@pytest.mark.parametrize("kind", ["shards", "window", "rank", "outlived"])
def test_a_save_of_one_rank_that_has_not_all_is_refused_with_both_lines(ended: Callable[[str], Any], kind: str):
    failed, folder = ended(kind)
    saves = int(kind == "rank")
    told = failed.failures[saves]
    assert f"DesyncError: rank {saves} is about to call save_state, save_what_ranks_share (test_main_process" in told
    assert f"and rank {1 - saves} waits for it in" in told
    assert told.count("save_what_ranks_share (test_main_process") == 2, "the lines of both"
    assert "All ranks call save_state(): take it out of `if accelerator.is_main_process`. The main process can" in told
    assert not (folder / "state").exists()
