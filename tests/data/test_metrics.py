from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_trainer.config.schema import DataConfig
from accel_trainer.data import BatchRows, prepare_data_loader, skip_first_batches, trim_gathered
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.process import ProcessContext, init_process, read_environment
from tests.cells import beyond
from tests.number_sets import Batches, Numbers, Sized, Stream, context, keep_valid
from tests.ranks import run_ranks
from tests.scenarios import Scenarios

SCENARIOS = Scenarios()
Output = namedtuple("Output", ["logits", "ids"])


@settings(max_examples=200, deadline=None)
@given(
    shards=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4), per_row=st.integers(1, 3)
)
def test_the_valid_rows_of_every_shard_are_kept_in_order(shards: list[tuple[int, int]], per_row: int) -> None:
    rows = BatchRows(tuple(valid for valid, _ in shards), tuple(max(1, valid + pad) for valid, pad in shards))
    blocks = [
        [10 * shard + row for row in range(size) for _ in range(per_row)] for shard, size in enumerate(rows.sizes)
    ]
    gathered = [value for block in blocks for value in block]
    expected = [value for shard, block in enumerate(blocks) for value in block[: rows.rows[shard] * per_row]]
    is_filled_up = any(0 < valid < size for valid, size in zip(rows.rows, rows.sizes, strict=True))

    if is_filled_up and per_row > 1:  # [a a b b], or [a b a b]: which rows are padding?
        with pytest.raises(ConfigError, match=r"even_batches=True has repeated the others.*one row for each sample"):
            keep_valid(torch.tensor(gathered), rows)
        return
    assert keep_valid(torch.tensor(gathered), rows).tolist() == expected
    assert keep_valid({"x": (gathered,)}, rows) == {"x": (expected,)}


def test_values_per_rank_of_ranks_without_samples_go() -> None:
    rows = BatchRows((4, 1, 0), (4, 4, 4), is_last=True)

    assert keep_valid({"loss": torch.tensor([0.1, 0.2, 0.3])}, rows)["loss"].tolist() == pytest.approx([0.1, 0.2])
    assert keep_valid(7, rows) == 7
    assert keep_valid(torch.tensor(0.5), BatchRows((1,), (2,))).item() == 0.5  # of one process: no rows
    lent = BatchRows((4, 4, 0), (4, 4, 1), is_last=True)
    assert keep_valid(torch.arange(6), lent).tolist() == [0, 1, 2, 3]
    assert keep_valid(torch.arange(5), lent).tolist() == list(range(5))


def test_one_process_has_the_shapes_of_many() -> None:
    process = context()
    data = {"loss": torch.tensor(1.0), "out": Output(torch.ones(2, 3), ["a", "b"]), "n": 3, "none": None}

    result = trim_gathered(data, BatchRows((2,), (2,)), process)

    assert result["loss"].shape == (1,)
    assert result["out"].logits.shape == (2, 3)
    assert result["out"].ids == ["a", "b"]
    assert result["n"] == [3]
    assert result["none"] is None
    assert trim_gathered(["a", "b"], None, process, use_objects=True) == ["a", "b"]


# --- on real ranks -------------------------------------------------------------------------------------------------


def collate(samples: list[int]) -> dict[str, Any]:
    return {"ids": torch.tensor(samples), "text": [f"t{sample}" for sample in samples]}


def build(kind: str, drop_last: bool, size: int) -> DataLoader:
    options: dict[str, Any] = {"collate_fn": collate, "drop_last": drop_last}
    return {
        "sequential": lambda: DataLoader(Numbers(13), size, **options),
        "shuffled": lambda: DataLoader(Numbers(13), size, shuffle=True, **options),
        "tiny": lambda: DataLoader(Numbers(3), size, **options),
        "subset": lambda: DataLoader(Numbers(18), size, sampler=SubsetRandomSampler(range(0, 18, 2)), **options),
        "short": lambda: DataLoader(Numbers(17), size, sampler=SequentialSampler(range(13)), **options),
        "weighted": lambda: DataLoader(Numbers(5), size, sampler=WeightedRandomSampler([0.2] * 5, 18), **options),
        "growing": lambda: DataLoader(Numbers(9), batch_sampler=Batches(1, 2, 3, 2, 1), collate_fn=collate),
        "stream": lambda: DataLoader(Stream(13), size, **options),
        "sized": lambda: DataLoader(Sized(13), size, **options),
        "tiny stream": lambda: DataLoader(Stream(1), size, **options),
        "workers": lambda: DataLoader(Sized(13), size, num_workers=1, **options),
    }[kind]()


KINDS = (
    "sequential", "shuffled", "tiny", "subset", "short", "weighted", "growing", "stream", "sized", "tiny stream",
    "workers",
)  # fmt: skip


def cases() -> list[tuple[str, bool, bool, bool, bool | None, int]]:
    return [
        (kind, drop_last, even, split, dispatch, skip)
        for kind in KINDS
        for drop_last in (False, True)
        for even in (True, False)
        for split in (False, True)
        for dispatch in (None, True, False)
        for skip in (0, 1)
        # False is what None means for these loaders.
        if not (dispatch is False and (split or skip or not even))
        if not (kind == "growing" and drop_last)
        # Rank 0's process starts no workers twice per step; one worker case suffices.
        if not (kind == "workers" and (split or not even or drop_last))
        # tests/data/test_metrics_property.py has those of ranks that read by themselves.
        if not (dispatch is None and (drop_last or skip) and kind not in ("growing", "workers"))
    ]


def run_case(case: tuple[Any, ...], process: ProcessContext, per_rank: int) -> tuple[list[int], list[str]]:
    kind, drop_last, even, split, dispatch, skip = case
    loader = build(kind, drop_last, 4 * per_rank if split else 4)
    config = DataConfig(even_batches=even, split_batches=split, dispatch_batches=dispatch)
    prepared = prepare_data_loader(loader, process=process, config=config, seed=3)
    if skip:
        prepared = skip_first_batches(prepared, skip)
    ids: list[int] = []
    texts: list[str] = []
    for batch in prepared:
        gathered = trim_gathered((batch["ids"], {"text": batch["text"]}), prepared.rows, process)
        ids += gathered[0].tolist()
        texts += gathered[1]["text"]
    return ids, texts


def run_all(world_size: int) -> dict[tuple[Any, ...], tuple[list[int], list[str]]]:
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=30)
    return {case: run_case(case, process, world_size) for case in cases()}


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, beyond(3)])
def test_d8_d9_d10_d36_gathering_is_exact_for_every_kind_of_loader(world_size: int) -> None:
    alone = context()
    if world_size == 1:
        results = [{case: run_case(case, alone, 1) for case in cases()}]
    else:
        results = run_ranks(run_all, world_size, world_size, timeout=110)

    all_ids = {kind: run_case((kind, False, True, False, None, 0), alone, world_size)[0] for kind in KINDS}
    for case in cases():
        kind, drop_last, _, split, _, skip = case
        whole, per_step = all_ids[kind], 4 * world_size
        if kind == "growing":
            sizes = [1, 2, 3, 2, 1]
            per_round = 1 if split else world_size
            expected = whole[sum(sizes[: skip * per_round]) :]
        else:
            end = len(whole) // per_step * per_step if drop_last else len(whole)
            expected = whole[skip * per_step : end]
        for rank, result in enumerate(results):
            assert result[case] == (expected, [f"t{index}" for index in expected]), (case, rank)


@SCENARIOS.add
def gather_kinds() -> dict[str, Any]:
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=30)
    rank = process.rank
    padded = BatchRows((2, 1), (2, 2), is_last=True)
    ragged = BatchRows((2, 1), (2, 1), is_last=True)
    size = ragged.sizes[rank]
    item, lent = BatchRows((1, 1), (1, 1)), BatchRows((1, 0), (1, 1), is_last=True)
    results = {
        "dict": trim_gathered({"a": torch.full((2, 1), rank), "b": [f"{rank}x", f"{rank}y"]}, padded, process),
        "loss": trim_gathered(torch.tensor(float(rank)), ragged, process),
        "three": trim_gathered(torch.full((size * 3,), rank), ragged, process),
        "number": trim_gathered({"n": rank, "none": None}, padded, process),
        "outside": trim_gathered(torch.full((2,), rank), None, process),
        "foreign": trim_gathered(torch.full((2,), rank), BatchRows((1,), (2,)), process),
        "objects": trim_gathered([{"boxes": torch.ones(rank)}, {"boxes": None}], padded, process, use_objects=True),
        "columns": trim_gathered({"text": [f"{rank}x", f"{rank}y"]}, padded, process, use_objects=True),
        "empty last": trim_gathered(torch.full((2,), rank), BatchRows((2, 0), (2, 2)), process),
        "filled": trim_gathered(torch.full((2, 1 + rank), rank), padded, process, pad_index=-1),
        "filled uneven": trim_gathered(
            (torch.full((size, 1 + rank), rank), ["x"] * size), ragged, process, pad_index=9
        ),
        "samples": trim_gathered({"a": torch.full((2, 1 + rank), rank)}, padded, process, as_samples=True),
        "texts": trim_gathered({"text": (f"{rank}x", f"{rank}y"), "pair": ("p", "q", "r")}, padded, process),
        "array": trim_gathered(np.full((2, 1), rank), padded, process).tolist(),
        "array uneven": trim_gathered(np.full((size,), rank), ragged, process).tolist(),
        "rows": list(trim_gathered(np.full((2, 1), rank), padded, process, as_samples=True)),
        "items": trim_gathered(torch.full((2 + rank,), rank), item, process, has_items=True),
        "items of one": trim_gathered((torch.ones(2 + rank, 0), torch.tensor(rank)), lent, process, has_items=True),
        "items filled": trim_gathered(torch.full((2, 1 + rank), rank), lent, process, has_items=True, pad_index=7),
    }
    return {
        name: torch.utils._pytree.tree_map(lambda x: x.tolist() if isinstance(x, torch.Tensor) else x, value)
        for name, value in results.items()
    }


@pytest.mark.multirank
def test_d11_structures_strings_and_objects_are_gathered_whole() -> None:
    for result in SCENARIOS.results("gather_kinds"):
        assert result["dict"] == {"a": [[0], [0], [1]], "b": ["0x", "0y", "1x"]}
        assert result["loss"] == [0.0, 1.0]
        assert result["three"] == [0] * 6 + [1] * 3
        assert result["number"] == {"n": [0, 1], "none": None}
        assert result["outside"] == [0, 0, 1, 1]
        assert result["foreign"] == [0, 0, 1, 1]
        assert result["objects"] == [{"boxes": []}, {"boxes": None}, {"boxes": [1.0]}]
        assert result["columns"] == [{"text": ["0x", "0y"]}, {"text": ["1x"]}]
        assert result["empty last"] == [0, 0]
        assert result["filled"] == [[0, -1], [0, -1], [1, 1]]
        assert result["filled uneven"] == ([[0, 9], [0, 9], [1, 1]], ["x"] * 3)
        assert result["samples"] == {"a": [[0], [0], [1, 1]]}
        pair = (["p", "p"], ["q", "q"], ["r", "r"])
        assert result["texts"] == {"text": ["0x", "0y", "1x"], "pair": pair}
        assert result["array"] == [[0], [0], [1]]
        assert result["array uneven"] == [0, 0, 1]
        assert [row.tolist() for row in result["rows"]] == [[0], [0], [1]]
        assert result["items"] == [0, 0, 1, 1, 1]
        assert result["items of one"] == ([[], []], [0])
        assert result["items filled"] == [[0, 7], [0, 7]]


def test_ragged_tensors_of_one_process_come_as_on_many() -> None:
    process = context()
    rows = BatchRows((2,), (2,))

    samples = trim_gathered({"a": torch.ones(2, 3), "b": ["x", "y"]}, rows, process, as_samples=True)

    assert [row.shape for row in samples["a"]] == [(3,), (3,)]
    assert samples["b"] == ["x", "y"]
    assert trim_gathered(torch.ones(2, 3), rows, process, pad_index=0).shape == (2, 3)
    assert trim_gathered((("x", "y"), np.ones(2)), rows, process)[0] == ["x", "y"]
    assert trim_gathered(np.ones((2, 3)), rows, process).shape == (2, 3)


def test_what_is_sent_as_objects_is_not_filled() -> None:
    process = context()
    with pytest.raises(ConfigError, match=r"use_gather_object=True sends objects as they are, and pad_index=0"):
        trim_gathered(["x"], None, process, use_objects=True, pad_index=0)


COLLATORS: dict[str, Any] = {
    # As trainers of preferences lay them out: all that were chosen, then all that were rejected.
    "pairs": lambda samples: [100 * part + sample for part in range(2) for sample in samples],
    "three": lambda samples: [100 * part + sample for sample in samples for part in range(3)],
    "ragged": lambda samples: [100 * part + sample for sample in samples for part in range(1 + sample % 4)],
}
ROWS = [(name, even, size) for name in COLLATORS for even in (False, True) for size in (3, 4, 9, 10)]


def gather_rows_of(name: str, even: bool, num_samples: int, process: ProcessContext) -> Any:
    """Gather what a collator with several rows for a sample makes; batches of 2."""
    collate = COLLATORS[name]
    loader = DataLoader(Numbers(num_samples), 2, collate_fn=lambda samples: torch.tensor(collate(samples)))
    prepared = prepare_data_loader(loader, process=process, config=DataConfig(even_batches=even), seed=3)
    plain, filled, samples, objects = [], [], [], []
    try:
        for batch in prepared:
            rows = prepared.rows
            if name != "ragged":
                plain += trim_gathered(batch, rows, process).tolist()
                objects += trim_gathered(batch.tolist(), rows, process, use_objects=True)
            filled += trim_gathered({"a": batch[:, None]}, rows, process, pad_index=-1)["a"].flatten().tolist()
            samples += [int(row) for row in trim_gathered(batch[:, None], rows, process, as_samples=True)]
    except ConfigError as error:
        return str(error)
    return plain or samples, filled, samples, objects or samples


def gather_all_rows() -> dict[Any, Any]:
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=30)
    return {case: gather_rows_of(*case, process) for case in ROWS}


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [beyond(2), 3])
def test_several_rows_for_a_sample_are_gathered_exactly_or_refused_on_every_rank(world_size: int) -> None:
    for found in run_ranks(gather_all_rows, world_size):
        for (name, even, num_samples), values in found.items():
            batches = [range(num_samples)[begin : begin + 2] for begin in range(0, num_samples, 2)]
            expected = [row for batch in batches for row in COLLATORS[name](batch)]
            # Filled up within a batch, and not with whole ones alone. Ragged rows may be as many as the samples.
            if even and num_samples % 2 and (name != "ragged" or isinstance(values, str)):
                assert "which rows are theirs is known where there is one for each sample" in values
            else:
                assert values == (expected,) * 4, (name, even, num_samples)


@SCENARIOS.add
def gather_wrong_rows() -> tuple[str, str, list[str]]:
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=30)
    rows = BatchRows((3, 2), (3, 2))
    told = []
    # 4 rows fit one rank, and 6 both, which understand them differently.
    for columns in (torch.ones(4), {"good": torch.ones(3 - process.rank), "bad": torch.ones(6)}):
        with pytest.raises((ConfigError, ProcessGroupError)) as refused:
            trim_gathered(columns, rows, process)
        told.append(f"{type(refused.value).__name__}: {refused.value}")
    with pytest.raises(ConfigError) as caught:
        trim_gathered(torch.ones(5), BatchRows((3, 2), (3, 2)), process)
    tensor = torch.ones(3 - process.rank, 3 + process.rank)
    with pytest.raises(ProcessGroupError) as differing:
        trim_gathered(tensor, BatchRows((3, 2), (3, 2)), process, debug=True)
    return str(caught.value), str(differing.value), told


@pytest.mark.multirank
def test_d36_rows_that_do_not_fit_an_uneven_step_are_refused() -> None:
    (first, both, told), (second, again, other_told) = SCENARIOS.results("gather_wrong_rows")
    assert both == again
    assert "leaf 0 of gather: rank 0 has float32 with 1 row(s) of (3,) for each sample, rank 1 has float32" in both
    assert "a tensor of shape (5,) cannot be gathered: rank 0 has 3 rows in this step" in first
    assert "rank 1 has 2 rows" in second
    assert told[0].startswith("ConfigError: a tensor of shape (4,) cannot be gathered: rank 0 has 3 rows in this step")
    assert other_told[0].startswith(
        "DistributedOperationException: the ranks do not agree on leaf 0 of gather: rank 0 has float32 with 4 row(s) "
        "of () for 3 samples, rank 1 has float32 with 2 row(s) of () for each sample. Nothing was sent"
    )
    assert told[1] == other_told[1]
    assert (
        "leaf 1 of gather: rank 0 has float32 with 2 row(s) of () for each sample, rank 1 has float32 with 3" in told[1]
    )
