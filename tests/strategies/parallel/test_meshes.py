"""Mesh shapes and meshes, at sizes that only a fake process group can have here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_trainer.config import build_config
from accel_trainer.config.parallel import axis_sizes
from accel_trainer.config.schema import get_value
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext, init_process
from accel_trainer.strategies.parallel.meshes import init_mesh


@pytest.fixture
def job_of_64() -> Iterator[ProcessContext]:
    """Rank 21 of 64, on nodes of 8."""
    dist.init_process_group("fake", rank=21, world_size=64, store=FakeStore())
    yield ProcessContext(21, 5, 64, 8, torch.device("cpu"), "fake")
    dist.destroy_process_group()


def sizes_of(world_size: int, num_nodes: int | None = 1, **options: Any) -> tuple[int, ...]:
    config = build_config({"strategy": "fsdp2", **{name.replace("__", "."): value for name, value in options.items()}})
    return axis_sizes(config, lambda path: f"{path}={get_value(config, path)}", world_size, num_nodes)


@pytest.mark.parametrize(
    ("world_size", "options", "sizes"),
    [
        (1, {}, (1, 1, 1, 1, 1)),
        (64, {}, (1, 64, 1, 1, 1)),
        (64, {"fsdp__replicate_size": 8}, (8, 8, 1, 1, 1)),
        (6, {"parallel__dp_replicate_size": 3}, (3, 2, 1, 1, 1)),
        (64, {"fsdp__replicate_per_node": True, "num_nodes": 4}, (4, 16, 1, 1, 1)),
        (64, {"parallel__dp_replicate_size": 2, "parallel__dp_shard_size": 32}, (2, 32, 1, 1, 1)),
        (4, {"strategy": "ddp"}, (4, 1, 1, 1, 1)),
        (4, {"strategy": "deepspeed", "parallel__dp_shard_size": 4}, (1, 4, 1, 1, 1)),
    ],
)
def test_a_size_that_is_not_given_takes_the_rest(world_size: int, options: dict[str, Any], sizes: tuple[int, ...]):
    assert sizes_of(world_size, **options) == sizes


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (64, {"fsdp__replicate_size": 3}, r"^fsdp.replicate_size=3 makes 3 process\(es\), and this job has 64;"),
        (64, {"fsdp__replicate_size": 64}, "leaves nothing to shard on 64 processes; use fewer replicas, or .* 'ddp'"),
        (2, {"parallel__dp_replicate_size": 2}, "^parallel.dp_replicate_size=2 leaves nothing to shard on 2"),
        (8, {"parallel__dp_shard_size": 2}, r"dp_shard_size=2 x fsdp.replicate_size=1 makes 2 process\(es\), .* has 8"),
        (8, {"strategy": "ddp", "parallel__dp_replicate_size": 4}, r"makes 4 process\(es\), and this job has 8"),
        (6, {"fsdp__replicate_per_node": True, "num_nodes": None}, "nodes hold different numbers of the job's 6"),
    ],
)
def test_sizes_that_do_not_make_the_job_are_refused(world_size: int, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        sizes_of(world_size, **options)


def test_one_axis_over_every_rank_is_the_jobs_own_group(job_of_64: ProcessContext):
    mesh = init_mesh(job_of_64.device.type, (64,))
    assert mesh.mesh_dim_names == ("shard",)
    assert mesh.get_group("shard") is dist.group.WORLD


def test_shards_of_a_replica_are_neighbours(job_of_64: ProcessContext):
    # 8 replicas of 8 shards on nodes of 8: parameters are gathered inside of a node, only gradients leave it.
    mesh = init_mesh(job_of_64.device.type, (8, 8))
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert dist.get_process_group_ranks(mesh.get_group("shard")) == list(range(16, 24))
    assert dist.get_process_group_ranks(mesh.get_group("replicate")) == list(range(5, 64, 8))


def test_a_group_that_the_user_made_is_used(job_of_64: ProcessContext):
    process = init_process({}, use_cpu=True)
    assert (process.rank, process.world_size, process.backend) == (21, 64, "fake")
