"""Layouts of 64, 512 and 4,096 ranks: hybrid shards x sp x tp, by the real strategy in a fake group."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler

from accel_trainer.checkpoint.format.placement import local_box, local_tensor
from accel_trainer.checkpoint.shards import own_share
from accel_trainer.config import resolve
from accel_trainer.data.plan import RoundRule, plan_rounds
from accel_trainer.data.sampler import ShardedBatchSampler
from accel_trainer.launch.planner import fake_job
from accel_trainer.precision import build_precision
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.fsdp2 import strategy
from accel_trainer.strategies.fsdp2.initial_values import Values

TP, SP = 4, 2
# Replicas, and shards, which ranks of a sequence share, too. Rows divide by neither everywhere: shards are uneven, and
# some empty.
LAYOUTS = {64: (2, 8), 512: (8, 16), 4096: (64, 16)}


class Place(NamedTuple):
    """A rank in the mesh; neighbours differ in the last."""

    replicate: int
    shard: int
    tp: int


def place_of(rank: int, world_size: int) -> Place:
    return Place(*map(int, np.unravel_index(rank, (*LAYOUTS[world_size], TP))))


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 24,
        "intermediate_size": 60,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=100))


class Prepared(NamedTuple):
    """Facts of a rank that the strategy has prepared."""

    reader: tuple[int, int]
    readers: tuple[int, ...]
    boxes: dict[str, Any]
    placements: dict[str, Any]
    shares: list[str]


def prepare(rank: int, world_size: int) -> Prepared:
    replicas, shards = LAYOUTS[world_size]
    sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards // SP, "sp_size": SP, "tp_size": TP}
    resolved = resolve(explicit={f"parallel.{name}": size for name, size in sizes.items()}, environ={})
    with fake_job(world_size, 8, rank) as process:
        fsdp2 = strategy.FSDP2Strategy()
        readers = fsdp2.readers(resolved, process)
        model = build_llama()
        fsdp2.prepare(TrainJob(model, [], resolved), build_precision("no", process.device), process)
        named = dict(model.named_parameters())
        return Prepared(
            (readers.rank, readers.world_size),
            readers.ranks or (),
            {name: (local_box(p).offsets, tuple(local_tensor(p).shape)) for name, p in named.items()},
            {name: (tuple(p.shape), p.placements) for name, p in named.items()},
            own_share(named, rank, range(world_size)),
        )


def expected_part(shape: tuple[int, ...], tp_dim: int | None, place: Place, num_shards: int) -> Tensor:
    """Return the numbers of a parameter's elements that a rank holds: its layers' part first, and of that its rows."""
    elements = torch.arange(int(np.prod(shape))).view(shape)
    if tp_dim is not None:
        elements = elements.chunk(TP, tp_dim)[place.tp]
    parts = elements.chunk(num_shards)
    return parts[place.shard] if place.shard < len(parts) else elements[:0]


def tp_dim_of(placements: Any) -> int | None:
    return getattr(placements[-1], "dim", None)


def share_of(rank: int, world_size: int, prepared: Prepared) -> tuple[list[str], dict[str, Tensor]]:
    """Return what a rank writes of a checkpoint, and its shards, laid out as the strategy has laid out another's."""
    replicas, shards = LAYOUTS[world_size]
    ranks = torch.arange(world_size).view(replicas, shards, TP)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard", "tp"), _init_backend=False, _rank=rank)
    held: dict[str, Tensor] = {}
    for name, (shape, placements) in prepared.placements.items():
        part = expected_part(shape, tp_dim_of(placements), place_of(rank, world_size), shards)
        strides = torch.empty(shape, device="meta").stride()
        held[name] = DTensor.from_local(
            part.to("meta"), mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
        )
    return own_share(held, rank, range(world_size)), held


@pytest.fixture(autouse=True)
def rank_0_has_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a fake group tells nobody of its model; it is the same one."""
    empty = [name for name, _ in (*build_llama().named_parameters(), *build_llama().named_buffers())]
    monkeypatch.setattr(strategy, "compare_values", lambda *args, **options: Values([], [], empty))


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_element_is_held_and_written_once_and_every_sample_read_once(world_size: int):
    replicas, shards = LAYOUTS[world_size]
    num_readers, num_alike = replicas * shards // SP, TP * SP
    for rank in (0, world_size // 2 + 5, world_size - 1):
        prepared, place = prepare(rank, world_size), place_of(rank, world_size)
        assert prepared.reader == (rank // num_alike, num_readers)
        assert prepared.readers == tuple(range(rank % num_alike, world_size, num_alike))  # one of each reader's
        for name, (shape, placements) in prepared.placements.items():
            part = expected_part(shape, tp_dim_of(placements), place, shards)
            offsets, sizes = prepared.boxes[name]
            index = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            assert torch.arange(int(np.prod(shape))).view(shape)[index].equal(part), name
        assert prepared.shares == share_of(rank, world_size, prepared)[0]
    # Of each layout one parameter, on every rank.
    by_layout = {placements: name for name, (_, placements) in prepared.placements.items()}
    prepared = prepared._replace(placements={name: prepared.placements[name] for name in by_layout.values()})
    writers = {name: np.zeros(shape, dtype=int) for name, (shape, _) in prepared.placements.items()}
    for rank in range(world_size):
        names, held = share_of(rank, world_size, prepared)
        for name in names:
            box = local_box(held[name])
            writers[name][tuple(slice(b, b + n) for b, n in zip(box.offsets, box.sizes, strict=True))] += 1
    assert all((counts == 1).all() for counts in writers.values())

    samples = BatchSampler(range(5 * num_readers + 3), 2, drop_last=False)
    rule = RoundRule(num_readers, 2, even=False)
    first = list(itertools.islice(samples, num_readers))
    rounds = [(batches, rows.rows) for batches, rows in plan_rounds(first, samples, rule)]
    read = Counter(i for batches, rows in rounds for batch, n in zip(batches, rows, strict=True) for i in batch[:n])
    assert read == Counter(range(5 * num_readers + 3))
    sampler = ShardedBatchSampler(samples, num_readers, 7, even_batches=False, join=True)
    assert list(sampler) == [batches[7] for batches, _ in rounds]
