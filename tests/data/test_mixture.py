"""Mixtures: which sample each one is, by seed and index alone; weights, temperatures, schedules, ends; and files."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accel_trainer.data_loader import load_mixture, mix_datasets
from accel_trainer.errors import ConfigError
from tests.number_sets import Numbers, prepare, valid_ids


def numbers(*ranges: range) -> list[datasets.Dataset]:
    return [datasets.Dataset.from_dict({"id": list(each)}) for each in ranges]


def plan(sizes: list[int], weights: Any = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Which data set each sample of a mixture of so many samples is of, and its row there."""
    places = np.array(mix_datasets([range(size) for size in sizes], weights, **options).indices)
    begins = np.cumsum([0, *sizes[:-1]])
    sources = np.searchsorted(begins, places, side="right") - 1
    return sources, places - begins[sources]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    ending=st.sampled_from(["first_exhausted", "all_exhausted"]),
    seed=st.integers(0, 99),
)
def test_each_set_is_read_through_before_it_starts_over(
    sizes: list[int], weights: list[int], ending: str, seed: int
) -> None:
    sources, places = plan(sizes, weights[: len(sizes)], stopping_strategy=ending, seed=seed)

    counts = Counter(sources.tolist())
    for index, size in enumerate(sizes):
        rows = places[sources == index].tolist()
        for begin in range(0, len(rows) // size * size, size):
            assert sorted(rows[begin : begin + size]) == list(range(size))
        assert len(set(rows[len(rows) // size * size :])) == len(rows) % size
    last = sources[-1]
    full = [counts[index] >= size for index, size in enumerate(sizes)]
    before = Counter(sources[:-1].tolist())
    if ending == "first_exhausted":
        assert counts[last] == sizes[last]
        assert not any(before[index] >= size for index, size in enumerate(sizes))
    else:
        assert all(full)
        assert before[last] == sizes[last] - 1


def test_sets_are_drawn_by_their_weights_and_flatter_with_a_temperature() -> None:
    for temperature, expected in ((1.0, 0.9), (2.0, 0.75), (1e9, 0.5)):
        sources, _ = plan([10, 10], [9, 1], temperature=temperature, num_samples=20_000)
        assert np.mean(sources == 0) == pytest.approx(expected, abs=0.01)
    sources, _ = plan([300, 100], num_samples=20_000)
    assert np.mean(sources == 0) == pytest.approx(0.75, abs=0.01)


def test_a_schedule_changes_the_weights_at_its_updates() -> None:
    schedule = {10: [0, 1, 0], 20: [0, 0.5, 0.5]}
    sources, _ = plan([9, 9, 9], [1, 0, 0], schedule=schedule, samples_per_update=100, num_samples=3000)

    assert set(sources[:1000]) == {0}
    assert set(sources[1000:2000]) == {1}
    assert np.mean(sources[2000:] == 2) == pytest.approx(0.5, abs=0.05)
    assert 0 not in sources[1000:]


def test_a_sample_depends_on_the_seed_and_its_index_alone() -> None:
    asked = ((200_000, 3), (70_000, 3), (70_000, 4))
    plans = [plan([50, 70], [1, 2], num_samples=count, seed=seed) for count, seed in asked]

    assert all(np.array_equal(longer[:70_000], shorter) for longer, shorter in zip(plans[0], plans[1], strict=True))
    assert not np.array_equal(plans[1][0], plans[2][0])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_reads_the_same_mixture_and_resumes_it(ranks: int) -> None:
    def build(count: int) -> list[Any]:
        mixture = mix_datasets([Numbers(30), Numbers(50)], [1, 1], seed=1)
        loaders = [DataLoader(mixture, 8 // count) for _ in range(count)]
        return [prepare(each, rank, count, use_stateful_dataloader=True) for rank, each in enumerate(loaders)]

    expected = valid_ids(build(1))
    loaders = build(ranks)
    read = []
    for batches in zip(*loaders, strict=True):
        read += [index for batch in batches for index in batch.tolist()]
        if len(read) == 16:
            break
    resumed = build(2)
    for loader in resumed:
        loader.load_state_dict(loaders[0].state_dict())

    assert read + valid_ids(resumed) == expected


def test_sets_of_datasets_stay_such_and_others_become_a_subset() -> None:
    tables, plain = numbers(range(10), range(10, 30)), [Numbers(10), Numbers(20)]
    mixed, subset = (mix_datasets(sets, [1, 1], seed=2) for sets in (tables, plain))

    assert isinstance(mixed, datasets.Dataset)
    assert [number - 10 if number > 9 else number for number in mixed["id"]] == [subset[n] for n in range(len(subset))]


def tripled(rows: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"id": [3 * number for number in rows["id"]]}


@pytest.mark.parametrize("is_alike", [True, False])
def test_sets_keep_their_transforms_whether_these_are_alike_or_not(is_alike: bool) -> None:
    first, second = numbers(range(10), range(10, 30))
    other = second.with_transform(tripled) if is_alike else second
    mixed = mix_datasets([first.with_transform(tripled), other], [1, 1])
    plain = mix_datasets([first, second], [1, 1])

    expected = [number * 3 if is_alike or number < 10 else number for number in plain["id"]]
    assert [mixed[index]["id"] for index in range(len(mixed))] == expected
    assert isinstance(mixed, datasets.Dataset) == is_alike


def test_tables_of_other_columns_are_one_table_and_their_tensors_stay_tensors() -> None:
    first, second = numbers(range(10), range(10, 30))
    second = second.add_column("size", [1] * 20)

    assert isinstance(mix_datasets([first, second], [1, 1]), datasets.Dataset)
    mixed = mix_datasets([first.with_format("torch"), second.with_format("torch")], [1, 1])
    assert all(isinstance(mixed[index]["id"], torch.Tensor) for index in range(len(mixed)))


def test_streams_are_interleaved_by_datasets() -> None:
    streams = [each.to_iterable_dataset() for each in numbers(range(10), range(10, 30))]
    mixed = mix_datasets(streams, [1, 3], seed=2, stopping_strategy="all_exhausted")

    assert [row["id"] for row in mixed] == [row["id"] for row in datasets.interleave_datasets(
        streams, [0.25, 0.75], seed=2, stopping_strategy="all_exhausted")]  # fmt: skip


@pytest.mark.parametrize("weights", [[1, 0], [0, 1], [1, 0, 2]])
def test_a_set_of_no_weight_is_not_waited_for(weights: list[int]) -> None:
    tables = numbers(*(range(100 * index, 100 * index + 5) for index in range(len(weights))))
    streams = [each.to_iterable_dataset() for each in tables]
    for sets in (tables, streams):
        mixed = mix_datasets(sets, weights, stopping_strategy="all_exhausted")
        found = [row["id"] for row in islice(mixed, 1000)]
        assert len(found) < 1000
        assert {number // 100 for number in found} == {index for index, weight in enumerate(weights) if weight}
        assert len(set(found)) == 5 * np.count_nonzero(weights)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("sets", "options", "message"),
    [
        ([], {}, "a mixture of 0 data sets was asked for"),
        ([Numbers(2)], {"weights": [1, 2]}, r"weights \[1, 2\] were given for 1 data sets; give each a number"),
        ([Numbers(2)], {"weights": [0]}, "and one above 0"),
        ([Numbers(2), Numbers(3)], {"weights": [-1, 2]}, r"weights \[-1, 2\]"),
        ([Numbers(2)], {"temperature": 0}, "temperature=0 was given for the weights of a mixture; use a number"),
        ([Numbers(2)], {"stopping_strategy": "never"}, "'never' is none of first_exhausted, all_exhausted"),
        ([Numbers(0), Numbers(2)], {"weights": [1, 1]}, "data sets of 0, 2 samples was asked for"),
        ([Numbers(2)], {"schedule": {-1: [1]}}, "updates begin at 0"),
        ([Numbers(2), Numbers(2)],
         {"schedule": {5: [0, 1]}, "weights": [1, 1], "stopping_strategy": "all_exhausted"},
         "waits for data set 0, whose weight is 0 at the end of the schedule"),
        ([Stream()], {}, "a mixture of streams has Stream in it, and takes streams of `datasets` alone"),
        ([Stream()], {"schedule": {0: [1]}}, "a mixture of streams has no schedule and no num_samples"),
    ],
)  # fmt: skip
def test_mixtures_that_are_none_are_refused(sets: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mix_datasets(sets, **options)


# --- files ------------------------------------------------------------------------------------------------------------


def write_sets(folder: Path) -> None:
    for name, texts in {"facts": ["good film"] * 30, "chat": ["bad plot"] * 10}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text, "n": 1}) for text in texts))
    datasets.Dataset.from_dict({"input_ids": [[7, 8]] * 20}).save_to_disk(str(folder / "saved"))


FILE = """\
dataset_mixture:
  datasets:
    - {{path: json, name: default, data_files: {folder}/facts.jsonl, columns: [text], weight: 3}}
    - {{path: json, data_files: {folder}/chat.jsonl, weight: 1}}
    - {{path: {folder}/saved, weight: 1}}
  stopping_strategy: all_exhausted
  schedule:
    10: [0, 1, 1]
  num_samples: 400
"""


def test_a_file_describes_a_mixture(tmp_path: Path) -> None:
    from tests.documented_job import build_tokenizer

    write_sets(tmp_path)
    (tmp_path / "mixture.yaml").write_text(FILE.format(folder=tmp_path))
    tokenizer = build_tokenizer()

    mixed = load_mixture(str(tmp_path / "mixture.yaml"), tokenizer, seed=1, samples_per_update=20)

    rows = [tuple(row) for row in mixed["input_ids"]]
    facts = tuple(tokenizer("good film")["input_ids"])
    assert len(rows) == 400
    assert sum(row == facts for row in rows[:200]) == pytest.approx(120, abs=25)
    assert not any(row == facts for row in rows[200:])
    assert (7, 8) in rows


CHAT = "{% for each in messages %}{{ each.content }} {% endfor %}{% if add_generation_prompt %}good{% endif %}"
MARKED = (
    "{% for each in messages %}{% if each.role == 'user' %}{{ each.content }} {% else %}"
    "{%- generation -%}{{ each.content }}{%- endgeneration -%}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "is_marked"),
    [(CHAT, False), ({"default": CHAT, "rag": MARKED}, False), (MARKED, True), ({"default": MARKED}, True)],
)
def test_labels_are_what_a_template_marks_and_all_without_marks(template: Any, is_marked: bool, tmp_path: Path) -> None:
    from tests.documented_job import build_tokenizer

    turns = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "film"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template

    sample = load_mixture({"datasets": [{"path": "json", "data_files": str(tmp_path / "chat.jsonl")}]}, tokenizer)[0]

    bad, film = tokenizer.convert_tokens_to_ids(["bad", "film"])
    assert [token for token in sample["labels"] if token in (bad, film)] == ([film] if is_marked else [bad, film])
    assert (-100 in sample["labels"]) == is_marked


@pytest.mark.parametrize("streaming", [False, True])
def test_text_has_labels_beside_chats(tmp_path: Path, streaming: bool) -> None:
    from tests.documented_job import build_tokenizer

    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "bad"}]}))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "film"}))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    chat, text = ({"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in ("chat", "text"))
    for sample in load_mixture({"datasets": [chat, text], "streaming": streaming}, tokenizer):
        assert sample["labels"] == sample["input_ids"]
    assert all("labels" not in each for each in load_mixture({"datasets": [text], "streaming": streaming}, tokenizer))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dataset": []}, "dataset_mixture holds the unknown key 'dataset'; did you mean 'datasets'"),
        ({"datasets": [{"pth": "x"}]}, r"datasets\[0\] holds the unknown key 'pth'; did you mean 'path'"),
        ({"datasets": [{"weight": 1}]}, "a data set of dataset_mixture has weight, and no path; give one"),
        ({"datasets": [{"path": "a", "weight": 1}, {"path": "b"}]}, r"gives weights \[1, None\] to its data sets"),
        ({"dataset_mixture": 3}, "expected a mapping with datasets, streaming.*; dataset_mixture is 3"),
    ],
)
def test_keys_that_are_none_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_mixture(config)
