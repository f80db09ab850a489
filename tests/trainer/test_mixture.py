"""A Trainer whose training data is a mixture that its arguments describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from accel_trainer import Trainer
from accel_trainer.config import resolve
from accel_trainer.data_loader import load_mixture, mix_datasets
from accel_trainer.errors import ConfigError
from tests.ranks import run_ranks
from tests.trainer_jobs import arguments, build_model


def write_sets(folder: Path) -> list[datasets.Dataset]:
    sets = [datasets.Dataset.from_dict({"input_ids": [[first, n] for n in range(20)]}) for first in (3, 4)]
    for name, each in zip("ab", sets, strict=True):
        each.save_to_disk(str(folder / name))
    return sets


def mixture(folder: Path, **options: Any) -> dict[str, Any]:
    entries = [{"path": str(folder / name), "weight": weight} for name, weight in (("a", 3), ("b", 1))]
    return {"datasets": entries, **options}


def build(folder: Path, *, train_dataset: Any = None, **changes: Any) -> Any:
    args = arguments(folder / "out", **{"padding_free": True, "seed": 7, **changes})
    return Trainer(build_model("llama"), args, train_dataset=train_dataset)


def first_tokens(trainer: Any) -> list[int]:
    return [token for batch in trainer.get_train_dataloader() for token in batch["input_ids"][0, ::2].tolist()]


def test_arguments_describe_the_training_data(tmp_path: Path):
    sets = write_sets(tmp_path)
    trainer = build(tmp_path, dataset_mixture=mixture(tmp_path))

    assert list(trainer.train_dataset["input_ids"]) == list(mix_datasets(sets, [3, 1], seed=7)["input_ids"])
    trainer.train()


def test_a_schedule_counts_updates_of_the_run(tmp_path: Path):
    write_sets(tmp_path)
    described = mixture(tmp_path, schedule={2: [0, 1]})
    described["datasets"][1]["weight"] = 0

    trainer = build(
        tmp_path, dataset_mixture=described, train_sampling_strategy="sequential", max_steps=4,
        gradient_accumulation_steps=3,
    )  # fmt: skip

    # Updates of 3 micro-batches of 4 samples.
    assert first_tokens(trainer) == [3] * 24 + [4] * 24


def scheduled(folder: Path, **changes: Any) -> list[int]:
    described = mixture(folder, schedule={2: [0, 1]})
    described["datasets"][1]["weight"] = 0
    options = {"dataset_mixture": described, "train_sampling_strategy": "sequential", "max_steps": 4, **changes}
    return first_tokens(build(folder, **options))


@pytest.mark.multirank
@pytest.mark.parametrize("splits", [False, True])
def test_a_schedule_counts_the_samples_of_all_ranks(splits: bool, tmp_path: Path):
    write_sets(tmp_path)
    results = run_ranks(scheduled, 2, tmp_path, accelerator_config={"split_batches": splits})
    # Of an update each rank has 4 samples, or half of the 4.
    assert results == [[3] * num_samples + [4] * num_samples for num_samples in (4 if splits else 8,) * 2]


HEADS = {"ours": "strategy: single", "accelerate": "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'"}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_the_file_of_a_run_describes_its_data_and_their_schedule(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_sets(tmp_path)
    file = tmp_path / "run.yaml"
    entries = [f"    - {{path: {tmp_path / name}, weight: {weight}}}" for name, weight in (("a", 1), ("b", 0))]
    lines = [head, "dataset_mixture:", "  datasets:", *entries, "  schedule:", "    2: [0, 1]"]
    file.write_text("\n".join(lines))
    monkeypatch.setenv("ACCEL_TRAINER_LAUNCH", json.dumps({"config_file": str(file)}))  # as `launch --config_file` does

    trainer = build(tmp_path, train_sampling_strategy="sequential", max_steps=4, gradient_accumulation_steps=3)

    assert first_tokens(trainer) == [3] * 24 + [4] * 24
    in_a_loop = load_mixture(resolve(file=file).config.dataset_mixture, samples_per_update=12, num_samples=48, seed=7)
    assert list(in_a_loop["input_ids"]) == list(trainer.train_dataset["input_ids"])
    with pytest.raises(ConfigError, match=r"dataset_mixture \(from .*run.yaml:\d\) describes the training data, and"):
        build(tmp_path, train_dataset=in_a_loop)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_key_that_is_none_is_named_with_its_line(head: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(f"{head}\ndataset_mixture:\n  datasets: [{{pth: facts}}]\n")
    message = (
        r"dataset_mixture at .*run.yaml:\d is .*; expected a mapping with path, .*\[0\] holds the unknown key 'pth'"
    )
    with pytest.raises(ConfigError, match=message):
        resolve(file=tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"is 'nowhere.yaml'; expected a mapping, or a file that is one: config file"):
        resolve(environ={"ACCEL_TRAINER_DATASET_MIXTURE": "nowhere.yaml"})


@pytest.mark.parametrize("changes", [{}, {"train_sampling_strategy": "sequential", "packing": True}])
def test_a_schedule_in_another_order_is_refused(changes: dict[str, Any], tmp_path: Path):
    write_sets(tmp_path)
    with pytest.raises(
        ConfigError, match="the schedule of dataset_mixture is an order of the samples, which shuffling"
    ):
        build(tmp_path, dataset_mixture=mixture(tmp_path, schedule={2: [0, 1]}), **changes)


def test_two_kinds_of_training_data_are_refused(tmp_path: Path):
    sets = write_sets(tmp_path)
    with pytest.raises(ConfigError, match=r"and a train_dataset \(Dataset\) was given as well; leave one of them out"):
        build(tmp_path, dataset_mixture=mixture(tmp_path), train_dataset=sets[0])
