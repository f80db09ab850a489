"""Full weights that the thread of a background save gathers: those of a save that waits, and no rank holds them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accel_trainer import Trainer
from accel_trainer.checkpoint.background import GatheredLater
from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.safetensors_file import StagingMemory
from accel_trainer.runtime.process import init_process, read_environment
from accel_trainer.trainer.checkpoint import upstream_files
from tests.ranks import run_ranks
from tests.trainer_jobs import build_trainer, on_ranks


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(7, 3, generator=generator),
        "columns": torch.randn(3, 8, generator=generator).to(torch.bfloat16),
        "few": torch.randn(1, 5, generator=generator),
        "counter": torch.tensor(3),
        "nothing": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


def save(directory: Path, mesh_shape: tuple[int, ...], is_full: bool = False) -> list[str]:
    """Write sharded tensors whose values change once the save is staged; return what failed before it came true."""
    process = init_process(read_environment(), use_cpu=True)
    mesh = init_device_mesh("cpu", mesh_shape)
    laid_out = [Replicate()] * (len(mesh_shape) - 1)
    full = values()
    tensors = {
        **{name: distribute_tensor(full[name], mesh, [*laid_out, Shard(0)]) for name in ("rows", "few", "nothing")},
        "columns": distribute_tensor(full["columns"], mesh, [*laid_out, Shard(1)]),
        "flags": distribute_tensor(full["flags"], mesh, [Replicate()] * len(mesh_shape)),
        "counter": full["counter"] + process.rank,  # rank 0's counts
    }
    memory, group = StagingMemory(torch.device("cpu")), dist.new_group(backend="gloo")
    publication = Publication(directory / "found", process, memory=memory, group=group)
    with publication as staged:
        later = GatheredLater(tensors, staged, process.rank)
        if process.is_main:
            given = later.placeholders()
            later.write("one.safetensors", {"renamed": given["rows"], "few": given["few"]}, {"format": "pt"})
            rest = {name: given[name] for name in ("columns", "counter", "nothing", "flags")}
            later.write("two.safetensors", rest, None)
        later.register()
        staged.write_json(f"{process.rank}.json", process.rank)
    publication.vote()
    for tensor in tensors.values():
        tensor.zero_()
    written, failures = staged.write_tensors_now, []

    def fail(name: str, *args: Any) -> None:
        if name == "two.safetensors" and not failures:
            next(iter(args[0].values()))()  # in the middle of it
            raise OSError(errno.ENOSPC, "the disk is full")
        written(name, *args)

    if is_full and process.is_main:
        staged.write_tensors_now = fail  # type: ignore[method-assign]
    for _ in range(2 if is_full else 1):
        try:
            publication.commit(keeps=True)
        except Exception as error:
            failures.append(str(error))
    return failures


@pytest.mark.multirank
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_the_files_have_the_values_at_the_time_of_the_save(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    run_ranks(save, torch.Size(mesh_shape).numel(), tmp_path, mesh_shape)
    check(tmp_path / "found")


def check(directory: Path) -> None:
    expected = values()
    found = load_file(directory / "one.safetensors") | load_file(directory / "two.safetensors")
    found["rows"] = found.pop("renamed")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.multirank
def test_a_disk_that_fails_in_the_middle_fails_on_all_ranks_and_can_be_tried_again(tmp_path: Path) -> None:
    main, other = run_ranks(save, 2, tmp_path, (2,), is_full=True, timeout=60)
    assert main == ["[Errno 28] the disk is full"]
    assert other == ["rank 0 failed to write the full weights: OSError: [Errno 28] the disk is full"]
    check(tmp_path / "found")


class Doubling(Trainer):
    """Saves other values than the model's."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, {name: 2 * value for name, value in (state_dict or {}).items()})


def gathered(directory: Path, *, strategy: str, cls: type[Trainer] = Trainer, **changes: Any) -> tuple[int, int]:
    """Train with saves in the background; return how many gathered in the foreground, and later."""
    counts = [0, 0]
    now, later = upstream_files.gather_to_file, GatheredLater.register

    def count(place: int, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[place] += 1
            return call(*args, **kwargs)

        return counted

    upstream_files.gather_to_file, GatheredLater.register = count(0, now), count(1, later)  # type: ignore[method-assign]
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_async": True}
    trainer = build_trainer(directory, strategy=strategy, **{**options, **changes})
    trainer.__class__ = cls
    trainer.train()
    return counts[0], counts[1]


def gathered_and_waited(directory: Path, **changes: Any) -> tuple[int, int]:
    """Train so, and once more with saves that are waited for."""
    counts = gathered(directory / "found", **changes)
    gathered(directory / "waited", **{**changes, "save_async": False})
    return counts


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, (0, 2)),
        ({"model": "mixtral"}, (2, 0)),  # its experts are one tensor, and are stored one by one
        ({"cls": Doubling}, (2, 0)),  # reads what it is given
        ({"save_async": False}, (2, 0)),
    ],
)
def test_values_are_gathered_at_once_only_for_who_reads_them(tmp_path: Path, changes: Any, counts: Any) -> None:
    assert on_ranks("fsdp", gathered_and_waited, tmp_path, **changes) == [counts, counts]
    for step in (2, 4):
        ours, theirs = (
            load_file(tmp_path / name / f"checkpoint-{step}" / "model.safetensors") for name in ("found", "waited")
        )
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
