from __future__ import annotations

import dataclasses
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.accelerator.single_files import load, save
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from tests.ranks import preload, run_ranks
from tests.scenarios import refused

preload("accel_trainer.accelerator", "torch.distributed.checkpoint")


def on_rank(rank: int, local_rank: int) -> ProcessContext:
    return ProcessContext(
        rank=rank, world_size=4, local_rank=local_rank, local_world_size=2, device=torch.device("cpu"), backend="gloo"
    )


@pytest.mark.parametrize("save_on_each_node", [False, True])
def test_one_rank_of_the_job_or_of_each_node_writes(save_on_each_node: bool, tmp_path: Path):
    for rank in range(4):
        save([rank], tmp_path / f"{rank}", save_on_each_node, process=on_rank(rank, rank % 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == (["0", "2"] if save_on_each_node else ["0"])
    assert load(tmp_path / "0") == [0]


def test_tied_tensors_are_written_once_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    layer = nn.Linear(3, 3)
    model = nn.ModuleDict({"a": layer, "b": layer})
    Accelerator(cpu=True).save(model.state_dict(), tmp_path / "model.safetensors", safe_serialization=True)
    assert "Removed shared tensor ['b.bias', 'b.weight']" in caplog.text
    assert sorted(load_file(tmp_path / "model.safetensors")) == ["a.bias", "a.weight"]


def test_plain_data_and_arrays_are_read_and_code_is_not(tmp_path: Path):
    state = OrderedDict(step=3, array=np.arange(3, dtype=np.uint32), tensor=torch.ones(2))
    Accelerator(cpu=True).save(state, tmp_path / "state.bin")
    loaded = load(tmp_path / "state.bin", map_location="cpu")
    assert loaded["step"] == 3
    assert loaded["array"].tolist() == [0, 1, 2]
    buffer = io.BytesIO()
    torch.save(Path("code"), buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="pathlib"):
        load(buffer)


# --- the state of a model or an optimizer -----------------------------------------------------------------------------

KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def prepare(strategy: str, seed: int) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = small(seed)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def contents(accelerator: Any, model: nn.Module) -> Any:
    io = accelerator.unit_of(model).checkpoint_io()
    optimizer = {name: entry["exp_avg"] for name, entry in io.full_optimizer_state().get("state", {}).items()}
    return io.full_model_state(), optimizer


def save_and_load(folder: str) -> Any:
    """Save by each strategy in each kind of files, load by the other; return what was saved and what was loaded."""
    saved, loaded = {}, {}
    for strategy, reader in (("fsdp2", "ddp"), ("ddp", "fsdp2")):
        accelerator, model, optimizer = prepare(strategy, 0)
        accelerator.backward(model(torch.linspace(-1, 1, 12).reshape(4, 3)).square().mean())
        optimizer.step()
        saved[strategy] = contents(accelerator, model)
        others = prepare(reader, 1)
        for kind in KINDS:
            plugin = accelerator.state.fsdp_plugin or SimpleNamespace(state_dict_type=None)
            if strategy == "fsdp2":
                plugin.set_state_dict_type(kind)
            else:
                plugin.state_dict_type = kind
            out = Path(folder, strategy, kind)
            save_fsdp_model(plugin, accelerator, model, out)
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, out)
            keys = load_fsdp_model(others[0].state.fsdp_plugin, *others[:2], out)
            load_fsdp_optimizer(others[0].state.fsdp_plugin, others[0], others[2], others[1], out)
            loaded[strategy, kind] = contents(*others[:2])
            assert not keys.missing_keys
    merge_fsdp_weights(Path(folder, "fsdp2", KINDS[1], "pytorch_model_fsdp_0"), Path(folder, "merged"))
    accelerator, model, optimizer = prepare("fsdp2", 0)
    plugin, out = accelerator.state.fsdp_plugin, Path(folder, "fsdp2", KINDS[0])
    words = refused(lambda: plugin.set_state_dict_type("LOCAL_STATE_DICT"))
    plugin.set_state_dict_type(KINDS[1])
    words += refused(lambda: save_fsdp_model(plugin, accelerator, model, folder, use_dcp=False))
    with pytest.raises(CheckpointNotFoundError, match=r"neither optimizer_1.bin nor optimizer_1/ is in .*FULL"):
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, out, 1)
    wider = accelerator.prepare(nn.Linear(3, 6))
    with pytest.raises(IncompatibleCheckpointError, match="weight"):
        load_fsdp_model(plugin, accelerator, wider, out)
    words += refused(lambda: save_fsdp_optimizer(plugin, accelerator, optimizer, wider, folder))
    return saved, loaded, words


def test_only_shards_are_removed_once_they_are_merged(tmp_path: Path):
    shards = tmp_path / "checkpoint" / "pytorch_model_fsdp_0"
    dcp.save({"model": {"w": torch.ones(4)}}, storage_writer=dcp.FileSystemWriter(shards), no_dist=True)
    (tmp_path / "checkpoint" / "notes.txt").touch()

    with pytest.raises(ConfigError, match=r"removes \S+checkpoint, which holds more than shards: it has no \.metadata"):
        merge_fsdp_weights(shards.parent, tmp_path / "merged", remove_checkpoint_dir=True)
    with pytest.raises(ConfigError, match=r"removes \S+fsdp_0, which \S+merged is in; give"):
        merge_fsdp_weights(shards, shards / "merged", remove_checkpoint_dir=True)
    assert not (tmp_path / "merged").exists()
    merge_fsdp_weights(shards, tmp_path / "merged", remove_checkpoint_dir=True)

    assert load_file(tmp_path / "merged" / "model.safetensors")["w"].tolist() == [1.0] * 4
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["notes.txt"]


def test_files_of_accelerates_functions_for_fsdp_are_written_and_read_by_any_layout(tmp_path: Path):
    saved, loaded, words = run_ranks(save_and_load, 2, str(tmp_path))[0]
    for (strategy, _), found in loaded.items():
        for own, there in zip(saved[strategy], found, strict=True):
            assert own
            torch.testing.assert_close(there, own, rtol=0, atol=0)
    folder = tmp_path / "fsdp2"
    plain = small(2)
    plain.load_state_dict(torch.load(folder / KINDS[0] / "pytorch_model_fsdp.bin", weights_only=True))
    torch.testing.assert_close(plain.state_dict(), saved["fsdp2"][0], rtol=0, atol=0)
    torch.testing.assert_close(load_file(tmp_path / "merged" / "model.safetensors"), saved["fsdp2"][0], rtol=0, atol=0)
    names = [{path.name for path in (folder / kind).iterdir()} for kind in KINDS]
    assert names == [{"pytorch_model_fsdp.bin", "optimizer.bin"}, {"pytorch_model_fsdp_0", "optimizer_0"}]
    for part in ("expected one of FULL_STATE_DICT", "use_dcp=False would", "AdamW holds no parameters of "):
        assert part in words


def save_on_two_nodes(directory: Path) -> tuple[list[str], list[str], list[str]]:
    configuration = ProjectConfiguration(save_on_each_node=True)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    own = directory / str(accelerator.process_index)
    accelerator.process = dataclasses.replace(accelerator.process, local_rank=0)  # each on a machine of its own
    accelerator.save_model(model, own)
    names = [list(accelerator.get_state_dict(model, unwrap=unwrap)) for unwrap in (True, False)]
    return sorted(path.name for path in own.iterdir()), *names


def test_a_model_is_saved_on_each_node_and_its_state_may_have_the_wrappers_names(tmp_path: Path):
    for found in run_ranks(save_on_two_nodes, 2, tmp_path):
        assert found == (["model.safetensors"], ["weight"], ["module.weight"])
