"""R16 in a loop: a state of a run with other samples in an update, or with another seed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.errors import IncompatibleCheckpointError
from tests.ranks import run_ranks

SAMPLES = 48


def build(seed: int, batch_size: int, num_steps: int, **config: Any) -> tuple[Accelerator, nn.Linear, Any]:
    """Return an Accelerator with a model of its own weights and a shuffled loader."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=num_steps,
        config={"data.data_seed": seed, **config},
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )
    torch.manual_seed(seed)
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)[:, None]), batch_size, shuffle=True)
    return accelerator, model, accelerator.prepare(model, loader)[1]


def save(directory: Path, batch_size: int, num_steps: int) -> torch.Tensor:
    """Save a state after one micro-batch, with seed 0; return a number that the loop draws next."""
    accelerator, _, loader = build(0, batch_size, num_steps)
    for _ in loader:
        accelerator.save_state(directory)
        return torch.rand(1)
    raise AssertionError


def load(directory: Path, batch_size: int, num_steps: int, *, seed: int = 1, **config: Any) -> dict[str, Any]:
    """Load the state into a run of another seed, and return what came of it, and what the loop has next."""
    accelerator, model, loader = build(seed, batch_size, num_steps, **config)
    before, hooked, error = model.weight.detach().clone(), list[str](), ""
    accelerator.register_load_state_pre_hook(lambda models, path: hooked.append(path))
    try:
        accelerator.load_state(directory)
    except IncompatibleCheckpointError as raised:
        error = str(raised)
    noise = torch.rand(1)
    rows = [accelerator.gather_for_metrics(batch)[:, 0] for (batch,) in loader]
    is_loaded = not torch.equal(before, model.weight)
    return {"error": error, "loaded": (is_loaded, bool(hooked)), "noise": noise, "rows": torch.cat(rows).tolist()}


def order(seed: int) -> list[int]:
    """Return the order of the first epoch."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist()


def test_r16_updates_of_other_samples_are_refused_on_request_before_anything_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "s", 4, 2)

    refused = load(tmp_path / "s", 4, 3, on_changed_run="refuse")

    assert re.search(
        r"^on_changed_run: warn in the config dict goes on with this run's options; on_changed_run=refuse "
        r"\(from the config dict\) refuses this:\n"
        r".*/s is of a run whose updates had 8 samples = 4 x 2 x 1 \(micro-batch x accumulation x ranks\) from "
        r"loader 0, and this run's have 12 samples = 4 x 3 x 1 .*: from here on it would be another run\. The same "
        r"one goes on with as many samples in an update: set gradient_accumulation_steps=2 \(now 3\)$",
        refused["error"],
    )
    assert refused["loaded"] == (False, False)
    assert refused["rows"] == order(1)
    for action in ("auto", "warn"):
        caplog.clear()
        warned = load(tmp_path / "s", 4, 3, on_changed_run=action)
        assert (warned["error"], warned["loaded"]) == ("", (True, True))
        assert "set gradient_accumulation_steps=2 (now 3) for updates of as many samples" in caplog.text
    # Other factors of the same number are the same run.
    assert load(tmp_path / "s", 2, 4, on_changed_run="refuse")["loaded"] == (True, True)


def test_r16_the_newest_state_is_refused_and_stays(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "checkpoint_0", 4, 2)
    accelerator, _, _ = build(1, 4, 1, on_changed_run="refuse")
    accelerator.project_configuration.project_dir = str(tmp_path)

    with pytest.raises(IncompatibleCheckpointError, match=r"checkpoint_0 is of a run whose updates had 8 samples"):
        accelerator.load_state()
    assert [path.name for path in (tmp_path / "checkpoints").glob("*checkpoint*")] == ["checkpoint_0"]


@pytest.mark.multirank
def test_r16_ranks_refuse_a_state_alike_and_name_the_setting_for_as_many_samples(tmp_path: Path) -> None:
    save(tmp_path / "s", 4, 4)

    for result in run_ranks(load, 2, tmp_path / "s", 4, 4, on_changed_run="refuse"):
        assert "and this run's have 32 samples = 4 x 4 x 2 (micro-batch" in result["error"]
        assert "set gradient_accumulation_steps=2 (now 4) or batch_size=2 (now 4)" in result["error"]
        assert result["loaded"] == (False, False)
    for result in run_ranks(load, 2, tmp_path / "s", 4, 4):
        assert (result["error"], result["loaded"]) == ("", (True, True))
        assert result["rows"] == order(0)[4:]


def test_r16_the_order_and_the_streams_of_a_state_go_on_whatever_the_seed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise = save(tmp_path / "s", 4, 2)

    result = load(tmp_path / "s", 4, 2, on_changed_run="refuse")

    assert result["rows"] == order(0)[4:] != order(1)[4:]
    assert torch.equal(result["noise"], noise)
    assert "otherwise: data.data_seed: 0 -> 1 (without effect, the run goes on with the checkpoint's)" in caplog.text
