"""What the stock Trainer resumes from under FSDP comes out of our checkpoints, and torch's own calls load it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state

from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.interop.huggingface import export_hf_fsdp
from accel_trainer.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from accel_trainer.launch.cli import main
from tests.publishing import flip
from tests.ranks import preload, run_ranks
from tests.sharded import assert_same

preload("accel_trainer.accelerator")


class Tied(nn.Module):
    """An embedding whose weights are the output layer's, a buffer, and a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.arange(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens)))


def prepare(seed: int) -> tuple[Any, Any, Any]:
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, strategy="fsdp2")
    torch.manual_seed(seed)
    model = Tied()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:1], "weight_decay": 0.1}, {"params": trained[1:], "weight_decay": 0.0}]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.01))


def whole(model: Any, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what torch's own calls make of a sharded model and its optimizer; on rank 0."""
    options = torch_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return (
        torch_state.get_model_state_dict(model, options=options),
        torch_state.get_optimizer_state_dict(model, optimizer.optimizer, options=options),
    )


def save_and_load(folder: Path) -> list[Any]:
    """Save a state, and load each export of it as Hugging Face accelerate does, into another model."""
    accelerator, model, optimizer = prepare(seed=0)
    for _ in range(2):
        accelerator.backward(model(torch.arange(6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder / "state")
    saved = whole(model, optimizer)
    if accelerator.is_main_process:
        export_hf_fsdp(folder / "state", folder / "full", is_sharded=False)
        export_hf_fsdp(folder / "state", folder / "sharded", is_sharded=True)
    accelerator.wait_for_everyone()

    _, model, optimizer = prepare(seed=1)
    own = optimizer.optimizer
    options = torch_state.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    state = [{}, None]
    if accelerator.is_main_process:
        names = ("pytorch_model_fsdp.bin", "optimizer.bin")
        state = [torch.load(folder / "full" / name, weights_only=True) for name in names]
    torch_state.set_model_state_dict(model, state[0], options=options)
    torch_state.set_optimizer_state_dict(model, own, state[1], options=options)
    from_full = whole(model, optimizer)

    _, model, optimizer = prepare(seed=2)
    own = optimizer.optimizer
    weights = {"model": torch_state.get_model_state_dict(model)}
    dcp.load(weights, checkpoint_id=folder / "sharded" / "pytorch_model_fsdp_0")
    torch_state.set_model_state_dict(model, weights["model"])
    held = {"optimizer": torch_state.get_optimizer_state_dict(model, own)}
    dcp.load(held, checkpoint_id=folder / "sharded" / "optimizer_0")
    torch_state.set_optimizer_state_dict(model, own, held["optimizer"])
    return [saved, from_full, whole(model, optimizer)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def states(folder: Path) -> list[Any]:
    """What was saved, and what torch's calls have loaded of the exports."""
    return run_ranks(save_and_load, 2, folder)[0]


def test_torch_loads_both_forms_into_a_sharded_model(states: list[Any]):
    saved, *loaded = states
    assert saved[1]["state"]["inner.weight"]["step"] == 2
    assert saved[1]["param_groups"][0]["weight_decay"] == 0.1
    for each in loaded:
        assert_same(each, saved)


def test_files_hold_what_torch_would_have_saved(folder: Path, states: list[Any]):
    weights, optimizer = states[0]
    full = folder / "full"
    assert sorted(path.name for path in full.iterdir()) == ["optimizer.bin", "pytorch_model_fsdp.bin"]
    stored = torch.load(full / "pytorch_model_fsdp.bin", weights_only=True)
    assert_same(stored, weights)
    assert stored["head.weight"].data_ptr() == stored["embedding.weight"].data_ptr(), "written once"
    assert_same(torch.load(full / "optimizer.bin", weights_only=True), optimizer)
    shards = DcpDirectory(folder / "sharded" / "pytorch_model_fsdp_0")
    assert_same(shards.nested("model"), dict(weights))
    held = DcpDirectory(folder / "sharded" / "optimizer_0").nested("optimizer")
    assert_same(held["state"], dict(optimizer["state"]))
    assert not list(folder.glob(".*.incomplete"))


def test_the_command_line_exports_them(folder: Path, states: list[Any], tmp_path: Path, capsys: Any):
    for kind, count in (("fsdp-full", 2), ("fsdp-sharded", 4)):
        assert main(["ckpt", "export", str(folder / "state"), str(tmp_path / kind), "--format", kind]) == 0
        assert f"{kind}: {count} file(s), " in capsys.readouterr().out
    words = ["--format", "fsdp-full", "--max_shard_size", "1B", "--unsafe_serialization"]
    assert main(["ckpt", "export", str(folder / "state"), str(tmp_path / "more"), *words]) == 2
    assert (
        "--max_shard_size, --unsafe_serialization: of --format weights, and this is fsdp-full"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "more").exists()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(folder: Path, states: list[Any], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"full is there already; give a new directory, or an empty one"):
        export_hf_fsdp(folder / "state", folder / "full", is_sharded=True)
    with pytest.raises(CheckpointNotFoundError, match="no weights in"):
        export_hf_fsdp(tmp_path, tmp_path / "out", is_sharded=True)
    damaged = shutil.copytree(folder / "state", tmp_path / "damaged")
    flip(damaged / "unit_0.optimizer.00000.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"unit_0\.optimizer\.00000"):
        export_hf_fsdp(damaged, tmp_path / "out", is_sharded=True)
    model = nn.Linear(2, 2)
    torch.save(torch.optim.AdamW(model.parameters()).state_dict(), tmp_path / "optimizer.pt")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(IncompatibleCheckpointError, match="its optimizer numbers its parameters, as on one process"):
        export_hf_fsdp(tmp_path, tmp_path / "out", is_sharded=False)
    torch.save({"state": {}, "param_groups": [{"params": ["other"]}]}, tmp_path / "optimizer.bin")
    with pytest.raises(
        IncompatibleCheckpointError, match=r"1 parameter\(s\) of the optimizer are not among the weights"
    ):
        export_hf_fsdp(tmp_path, tmp_path / "out", is_sharded=False)
    torch.save({"state": {}, "param_groups": [{"params": ["weight"], "own_state": {}}]}, tmp_path / "optimizer.bin")
    with pytest.raises(IncompatibleCheckpointError, match="a state that belongs to no parameter"):
        export_hf_fsdp(tmp_path, tmp_path / "out", is_sharded=False)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.incomplete").exists()
