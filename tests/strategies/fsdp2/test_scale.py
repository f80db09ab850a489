"""Layouts of 64, 512 and 4,096 ranks: hybrid shards x sp x tp, and x sp x ep, by the real strategy in a fake group."""

from __future__ import annotations

import functools
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

from accel_trainer.checkpoint.shards import local_box, local_tensor, own_share
from accel_trainer.config import resolve
from accel_trainer.contrib.planner import fake_job
from accel_trainer.data.plan import RoundRule, plan_rounds
from accel_trainer.data.sampler import ShardedBatchSampler
from accel_trainer.precision import build_precision
from accel_trainer.strategies.api import TrainJob
from accel_trainer.strategies.broadcast_values import Values
from accel_trainer.strategies.fsdp2 import strategy
from tests.cells import beyond, crossed


class Layout(NamedTuple):
    """Ranks along the axes of a job; those of a sequence share shards, too, as those of experts do."""

    replicas: int
    shards: int
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The options that ask for it."""
        sizes = {"dp_replicate": self.replicas, "dp_shard": self.shards // self.sp}
        sizes |= {"sp": self.sp, "tp": self.tp, "ep": self.ep}
        return {f"parallel.{axis}_size": size for axis, size in sizes.items()}


# Rows divide by the number of shards nowhere or not everywhere: shards are uneven, and some empty.
LAYOUTS = {
    (64, "sp x tp"): Layout(2, 8, sp=2, tp=4),
    (512, "sp x tp"): Layout(8, 16, sp=2, tp=4),
    (4096, "sp x tp"): Layout(64, 16, sp=2, tp=4),
    (64, "sp x ep"): Layout(2, 32, sp=2, ep=4),
    (512, "sp x ep"): Layout(8, 64, sp=2, ep=4),
    (4096, "sp x ep"): Layout(64, 64, sp=2, ep=4),
}


def build_model(layout: Layout) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 60, "num_hidden_layers": 1, "vocab_size": 100}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    with torch.device("meta"):
        if layout.ep > 1:
            return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8))
        return LlamaForCausalLM(LlamaConfig(**sizes))


class Placed(NamedTuple):
    """How a parameter lies on a mesh: replicas, shards, and parts of layers or experts if there are any."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    def part(self, rank: int) -> Tensor:
        """Return the numbers of the elements that a rank holds: its part of the layer, and of that its shard."""
        place = np.unravel_index(rank, self.mesh)
        elements = torch.arange(int(np.prod(self.shape))).view(self.shape)
        inner = getattr(self.placements[-1], "dim", None) if len(self.mesh) == 3 else None
        if inner is not None:
            elements = elements.chunk(self.mesh[2], inner)[place[2]]
        dim = self.placements[1].dim
        parts = elements.chunk(self.mesh[1], dim)
        return parts[place[1]] if place[1] < len(parts) else elements.narrow(dim, 0, 0)


class Prepared(NamedTuple):
    """Facts of a rank that the strategy has prepared."""

    reader: tuple[int, int]
    readers: tuple[int, ...]
    boxes: dict[str, Any]
    placed: dict[str, Placed]
    shares: list[str]


def prepare(rank: int, world_size: int, layout: Layout) -> Prepared:
    resolved = resolve(explicit=layout.sizes, environ={})
    with fake_job(world_size, 8, rank) as process:
        fsdp2 = strategy.FSDP2Strategy()
        readers = fsdp2.readers(resolved, process)
        model = build_model(layout)
        fsdp2.prepare(TrainJob(model, [], resolved), build_precision("no", process.device), process)
        named: dict[str, Any] = dict(model.named_parameters())
        return Prepared(
            (readers.rank, readers.world_size),
            readers.ranks or (),
            {name: (local_box(p).offsets, tuple(local_tensor(p).shape)) for name, p in named.items()},
            {name: Placed(tuple(p.shape), tuple(p.device_mesh.shape), p.placements) for name, p in named.items()},
            own_share(named, rank, range(world_size)),
        )


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh without groups, for `share_of` to see as each rank does: making thousands would take the time."""
    ranks = torch.arange(int(np.prod(shape))).view(shape)
    names = ("replicate", "shard", "part")[: len(shape)]
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def share_of(rank: int, world_size: int, prepared: Prepared) -> tuple[list[str], dict[str, Tensor]]:
    """Return what a rank writes of a checkpoint, and its shards, laid out as the strategy has laid out another's."""
    for shape in {placed.mesh for placed in prepared.placed.values()}:
        mesh_of(shape)._coordinate_on_dim = tuple(map(int, np.unravel_index(rank, shape)))
    held: dict[str, Tensor] = {}
    for name, placed in prepared.placed.items():
        strides = torch.empty(placed.shape, device="meta").stride()
        held[name] = DTensor.from_local(
            placed.part(rank).to("meta"),
            mesh_of(placed.mesh),
            placed.placements,
            run_check=False,
            shape=torch.Size(placed.shape),
            stride=strides,
        )
    return own_share(held, rank, range(world_size)), held


@pytest.fixture(autouse=True)
def rank_0_has_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a fake group tells nobody of its model; it is the same one."""

    def all_empty(model: nn.Module, *args: Any, **options: Any) -> Values:
        return Values([], [], [name for name, _ in (*model.named_parameters(), *model.named_buffers())])

    monkeypatch.setattr(strategy, "compare_values", all_empty)


# 4,096 ranks go the way of 512, and take 5 s of a core for each layout.
@pytest.mark.parametrize(
    ("name", "world_size"),
    [*crossed(["sp x ep", "sp x tp"], [64, 512]), beyond(("sp x ep", 4096)), beyond(("sp x tp", 4096))],
)
def test_every_element_is_held_and_written_once_and_every_sample_read_once(name: str, world_size: int):
    layout = LAYOUTS[world_size, name]
    num_readers, num_alike = layout.replicas * layout.shards // layout.sp, layout.tp * layout.sp
    for rank in (0, world_size // 2 + 5, world_size - 1):
        prepared = prepare(rank, world_size, layout)
        assert prepared.reader == (rank // num_alike, num_readers)
        assert prepared.readers == tuple(range(rank % num_alike, world_size, num_alike))  # one of each reader's
        for parameter, placed in prepared.placed.items():
            offsets, sizes = prepared.boxes[parameter]
            index = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            elements = torch.arange(int(np.prod(placed.shape))).view(placed.shape)
            assert elements[index].equal(placed.part(rank)), parameter
        assert prepared.shares == share_of(rank, world_size, prepared)[0]
    has_parts = {parameter: placed for parameter, placed in prepared.placed.items() if len(placed.mesh) == 3}
    assert all(placed.mesh[2] == max(layout.tp, layout.ep) for placed in has_parts.values())
    assert len(has_parts) == (2 if layout.ep > 1 else len(prepared.placed))
    # Of each layout one parameter, on every rank.
    by_layout = {(placed.mesh, placed.placements): name for name, placed in prepared.placed.items()}
    prepared = prepared._replace(placed={name: prepared.placed[name] for name in by_layout.values()})
    writers = {name: np.zeros(placed.shape, dtype=int) for name, placed in prepared.placed.items()}
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
