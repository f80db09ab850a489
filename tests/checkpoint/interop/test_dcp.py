"""Directories of torch.distributed.checkpoint are read as data: evil ones are refused before they run (R15)."""

from __future__ import annotations

import enum
import pickle
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, IncompatibleCheckpointError
from tests.checkpoint.interop.test_accelerate_state import Evil

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = build()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": 7}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_tensors_objects_and_nested_states_come_back(directory: Path):
    model, optimizer = build()
    stored = DcpDirectory(directory)
    assert torch.equal(stored["model.weight"], model.weight)
    assert torch.equal(stored.read_box("model.weight", Box((1, 0), (2, 2))), model.weight[1:3, :2])
    assert stored.value("step") == 7
    state = stored.nested("optimizer")
    assert torch.equal(state["state"]["bias"]["exp_avg"], optimizer.state[model.bias]["exp_avg"])
    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.001]
    assert [group["params"] for group in state["param_groups"]] == [["weight"], ["bias"]]


def rewrite(directory: Path, change: Any) -> None:
    """Change the metadata as torch itself would have written it."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(changed if changed is not None else metadata))


def point_outside(metadata: Any, target: str) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = target


def declare_a_terabyte(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = torch.Size((2**38,))
    entry.chunks[0].sizes, entry.chunks[0].offsets = torch.Size((2**38,)), torch.Size((0,))
    metadata.storage_data = {
        type(index)(index.fqn, (0,) if index.fqn == "model.weight" else index.offset): info
        for index, info in metadata.storage_data.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda metadata: point_outside(metadata, "../outside"), "not a plain file beside it; do not load it"),
        (lambda metadata: point_outside(metadata, "/etc/passwd"), "not a plain file beside it; do not load it"),
        (lambda metadata: point_outside(metadata, "gone"), "which is missing"),
        (declare_a_terabyte, r"1577 bytes cannot hold Box\(offsets=\(0,\), sizes=\(274877906944,\)\)"),
        (lambda metadata: {"not": "metadata"}, "is not the metadata of a checkpoint"),
    ],
)
def test_r15_metadata_that_leads_elsewhere_is_refused(directory: Path, change: Any, message: str):
    rewrite(directory, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(AccelTrainerError, match=message):
        DcpDirectory(directory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_r15_metadata_that_runs_code_is_refused_before_it_runs(directory: Path, tmp_path: Path):
    rewrite(directory, lambda metadata: setattr(metadata, "planner_data", Evil(tmp_path / "marker")))
    with pytest.raises(IncompatibleCheckpointError, match=r"holds more than names and numbers: it names posix\.system"):
        DcpDirectory(directory)
    assert not (tmp_path / "marker").exists()


def as_python_3_11_2(member: enum.Enum, protocol: int) -> Any:
    return getattr, (type(member), member.name)


def test_metadata_of_a_python_that_pickles_enumerations_by_attribute_are_read(directory: Path, monkeypatch):
    encoding = type(dcp.metadata.TensorProperties().__getstate__()[3])
    monkeypatch.setattr(encoding, "__reduce_ex__", as_python_3_11_2)
    rewrite(directory, lambda metadata: None)
    monkeypatch.undo()
    assert b"getattr" in (directory / ".metadata").read_bytes()
    assert torch.equal(DcpDirectory(directory)["model.weight"], build()[0].weight)


class EvilAttribute:
    def __reduce__(self) -> Any:
        return getattr, (OrderedDict, "fromkeys")


def test_r15_attributes_of_what_is_no_record_are_refused(directory: Path):
    rewrite(directory, lambda metadata: setattr(metadata, "planner_data", EvilAttribute()))
    with pytest.raises(IncompatibleCheckpointError, match="it takes attributes of what is no record"):
        DcpDirectory(directory)


def test_r15_an_object_that_runs_code_is_refused_before_it_runs(tmp_path: Path):
    dcp.save({"weight": torch.ones(2), "evil": Evil(tmp_path / "marker")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    stored = DcpDirectory(tmp_path / "dcp")
    with pytest.raises(IncompatibleCheckpointError, match=r"'evil' in .* is more than tensors, numbers and strings"):
        stored.value("evil")
    assert not (tmp_path / "marker").exists()
    assert torch.equal(stored["weight"], torch.ones(2))


def test_r15_a_link_that_leads_outside_is_refused(directory: Path, tmp_path: Path):
    file = next(directory.glob("*.distcp"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IncompatibleCheckpointError, match=r"is a link to .*elsewhere, out of its checkpoint"):
        DcpDirectory(directory)


@pytest.mark.parametrize("damage", ["cut metadata", "cut shard"])
def test_damage_is_an_error_of_ours(directory: Path, damage: str):
    path = directory / ".metadata" if damage == "cut metadata" else next(directory.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(AccelTrainerError, match=r"cannot be read|is too short"):
        DcpDirectory(directory)


def test_a_save_that_never_ended_has_no_metadata(directory: Path):
    (directory / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"no \.metadata in .*dcp: its save has not ended"):
        DcpDirectory(directory)
