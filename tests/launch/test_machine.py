"""TPUs without one: what is planned where a machine has chips, and what runs where `tpu` is torch's accelerator."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accel_trainer.errors import ConfigError
from accel_trainer.launch import machine, notebook
from accel_trainer.launch.job import plan_job, read_options, run_launch
from tests import stand_in
from tests.ranks import run_ranks


@pytest.fixture
def chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chips of a v5e beside a network card of the same vendor, and one device of another."""
    devices = [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x8086", "0x0063")]
    for index, (vendor, device) in enumerate(devices):
        folder = tmp_path / "pci" / f"0000:00:0{index}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    monkeypatch.setattr(machine, "_PCI_DEVICES", tmp_path / "pci")


@pytest.fixture
def torch_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages" / "torch_tpu").mkdir(parents=True)
    (tmp_path / "packages" / "torch_tpu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_a_machine_without_chips_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PCI_DEVICES", tmp_path / "none")
    assert machine.count_tpus() == 0


@pytest.mark.usefixtures("chips", "torch_tpu")
def test_there_is_one_process_for_each_chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert run_launch(["--dry_run", "--strategy", "ddp", str(script)]) == 0
    out = capsys.readouterr().out
    assert "processes here: 2 " in out
    assert (
        "variables: TORCH_TPU_SLICEBUILDER_ADDRESSES, TORCH_TPU_TOPOLOGY, TORCH_TPU_XPROF_SESSION_ID, unless they are "
        "set, as torch.tpu.distributed.set_tpu_launch_env(nnodes=1, nproc_per_node=2) finds them"
    ) in out
    words = ["--cpu", str(script)]
    assert plan_job(read_options(words, "accel-trainer launch", {}), {}).num_local_processes == 1


@pytest.mark.usefixtures("chips")
def test_chips_without_torch_tpu_are_no_silent_run_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=r"2 TPU device\(s\), and torch-tpu is not installed: .*or pass --cpu"):
        run_launch(["--dry_run", str(tmp_path / "train.py")])


def train_on_tpu() -> dict[str, Any]:
    """Prepare a tied model where a move makes new parameters, train it on ragged batches; set a job's variables."""
    import torch

    stand_in.install("tpu", keeps_parameters=False)
    from accel_trainer import Accelerator
    from accel_trainer.runtime.side_stream import logger

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
            self.last.weight = self.first.weight

    said: list[str] = []
    logger.warning_once = said.append  # type: ignore[method-assign]
    model = Tied()
    before = model.first.weight.detach().clone()
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader([torch.ones(size, 2) for size in (3, 3, 1)], batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for batch in loader:
        accelerator.backward((model.first.weight * batch.sum()).sum() + model.last.weight.sum())
        optimizer.step()
        optimizer.zero_grad()
    calls: list[dict[str, int]] = []
    sys.modules["torch.tpu.distributed"] = ModuleType("torch.tpu.distributed")
    sys.modules["torch.tpu.distributed"].set_tpu_launch_env = lambda **given: calls.append(given)  # type: ignore[attr-defined]
    machine.set_tpu_variables(2, 4)
    return {
        "device": str(model.first.weight.device),
        "tied": model.first.weight is model.last.weight,
        "moved": (model.first.weight.detach().cpu() - before).tolist(),
        "calls": calls,
        "said": said,
    }


def test_a_tied_model_stays_tied_and_ragged_batches_are_named() -> None:
    stand_in.build()
    found = run_ranks(train_on_tpu, 1, env=stand_in.ALONE, timeout=120)[0]
    assert found["device"] == "tpu:0"
    assert found["tied"]
    moved = -0.1 * (6 + 6 + 2 + 3)
    assert found["moved"] == [[pytest.approx(moved, rel=1e-5)] * 2] * 2
    assert found["calls"] == [{"nnodes": 2, "nproc_per_node": 4}]
    assert len(found["said"]) == 1
    assert "batches differ in shape (3x2, then 1x2), and tpu compiles a step anew" in found["said"][0]


@pytest.mark.usefixtures("chips", "torch_tpu")
def test_a_notebook_starts_at_most_one_process_for_each_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(notebook, "has_accelerator", lambda: False)  # another test's may live in this process still
    with pytest.raises(ConfigError, match=r"num_processes=3 .* which has 2 TPU device\(s\); start at most"):
        notebook._check_can_fork(3, use_cpu=False)
    has_used = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: has_used)
    with pytest.raises(ConfigError, match="has used a TPU, which it keeps"):
        notebook._check_can_fork(2, use_cpu=False)
