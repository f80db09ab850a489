"""Mesh shapes and meshes, at sizes that only a fake process group can have here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext, init_process
from accel_trainer.strategies.fsdp2.strategy import build_mesh_shape, init_mesh


@pytest.fixture
def job_of_64() -> Iterator[ProcessContext]:
    """Rank 21 of 64, on nodes of 8."""
    dist.init_process_group("fake", rank=21, world_size=64, store=FakeStore())
    yield ProcessContext(21, 5, 64, 8, torch.device("cpu"), "fake")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "replicas", "shape"),
    [(1, 1, (1,)), (64, 1, (64,)), (64, 2, (2, 32)), (64, 8, (8, 8)), (64, 32, (32, 2)), (6, 3, (3, 2))],
)
def test_replicas_times_shards_are_the_world(world_size: int, replicas: int, shape: tuple[int, ...]):
    assert build_mesh_shape(world_size, replicas) == shape


@pytest.mark.parametrize(("world_size", "replicas"), [(64, 3), (64, 64), (64, 128), (2, 2)])
def test_replicas_that_leave_nothing_to_shard_are_refused(world_size: int, replicas: int):
    message = rf"fsdp.replicate_size={replicas} does not fit {world_size} processes: .* at least 2 shards.*'ddp'"
    with pytest.raises(ConfigError, match=message):
        build_mesh_shape(world_size, replicas)


def test_one_axis_holds_every_rank(job_of_64: ProcessContext):
    mesh = init_mesh(job_of_64, (64,))
    assert mesh.mesh_dim_names == ("shard",)
    assert dist.get_process_group_ranks(mesh.get_group("shard")) == list(range(64))


def test_shards_of_a_replica_are_neighbours(job_of_64: ProcessContext):
    # 8 replicas of 8 shards on nodes of 8: parameters are gathered inside of a node, only gradients leave it.
    mesh = init_mesh(job_of_64, build_mesh_shape(64, 8))
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert dist.get_process_group_ranks(mesh.get_group("shard")) == list(range(16, 24))
    assert dist.get_process_group_ranks(mesh.get_group("replicate")) == list(range(5, 64, 8))


def test_a_group_that_the_user_made_is_used(job_of_64: ProcessContext):
    process = init_process({}, use_cpu=True)
    assert (process.rank, process.world_size, process.backend) == (21, 64, "fake")


def test_a_meshs_group_of_the_whole_job_is_the_jobs_own(job_of_64: ProcessContext):
    assert init_mesh(job_of_64, (64,)).get_group("shard") is dist.group.WORLD
