"""A run that is resumed draws what the run that never stopped draws: masks, crops and dropout."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accel_trainer import Accelerator, Trainer
from tests.cells import beyond, crossed
from tests.ranks import preload
from tests.trainer_jobs import (
    SaveAt,
    SaveWithin,
    TokenDataset,
    arguments,
    build_model,
    build_trainer,
    on_ranks,
    strategy_arguments,
    summary,
)

preload("transformers.data.data_collator", "tokenizers")

WORDS = 40


class Cropped(Dataset):
    """Rows of words, each cropped and disturbed at random by Python's, NumPy's and torch's streams."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        self.rows = torch.randint(5, WORDS, (num_rows, 12), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index][random.randrange(4) :]
        row[np.random.randint(len(row))] = 5
        row[int(torch.randint(len(row), ()))] = 6
        return {"input_ids": row}


class CroppedStream(IterableDataset):
    """The same rows as a stream, in a random order."""

    def __init__(self, num_rows: int) -> None:
        self.cropped = Cropped(num_rows)

    def __len__(self) -> int:
        return len(self.cropped)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for index in torch.randperm(len(self.cropped)).tolist():
            yield self.cropped[index]


def masking() -> Any:
    """Return transformers' collator for masked language models."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = {name: index for index, name in enumerate(["[PAD]", "[MASK]", "[UNK]", "[CLS]", "[SEP]"])}
    words |= {f"w{index}": index for index in range(len(words), WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "mask", "unk", "cls", "sep")},
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)


def train(
    output_dir: str, *, strategy: str = "single", resume: str | None = None, steps: tuple[int, ...] = (),
    dataset: Any = None, own_loader: Any = None, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train a masked language model with dropout for two epochs; return its summary.

    Args:
        own_loader: makes a loader of a dataset and a collator, in the place of the Trainer's own.
    """
    from transformers import BertConfig, BertForMaskedLM

    from accel_trainer.trainer import Trainer

    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS, max_position_embeddings=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, hidden_dropout_prob=0.2,
        )
    )  # fmt: skip
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 2, **strategy_arguments(strategy), **changes}
    trainer = Trainer(
        model, arguments(output_dir, **options), data_collator=masking(), train_dataset=dataset or Cropped(14),
        eval_dataset=Cropped(5, seed=1), callbacks=[SaveAt(*steps)],
    )  # fmt: skip
    if own_loader is not None:
        trainer.get_train_dataloader = lambda: own_loader(trainer.train_dataset, trainer.data_collator)
    trainer.train(resume_from_checkpoint=resume)
    for loader in (trainer.callback_handler.train_dataloader, trainer.callback_handler.eval_dataloader):
        if loader is not None:
            loader._iterator = None  # persistent workers go at once; with the Trainer's cycles, in 5 s each
    return summary(trainer)


def assert_same_end(resumed: dict[str, Any], whole: dict[str, Any], case: Any) -> None:
    """Compare everything that a resumed run did with the end of the other."""
    for name in ("losses", "grad_norms", "eval_losses"):
        assert resumed[name] == whole[name][len(whole[name]) - len(resumed[name]) :], (case, name)
    assert resumed["losses"], case
    assert resumed["weights"].keys() == whole["weights"].keys()
    for name, value in resumed["weights"].items():
        np.testing.assert_array_equal(value, whole["weights"][name], err_msg=f"{case} {name}")


def train_and_resume(
    output_dir: str, workers: int, accumulation: int, *, strategy: str
) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Stop within the first epoch and at its end, before the evaluation that comes there."""
    per_epoch = -(-7 // accumulation) if strategy == "single" else -(-4 // accumulation)
    options = {
        "strategy": strategy, "dataloader_num_workers": workers, "gradient_accumulation_steps": accumulation,
        "eval_strategy": "epoch",
    }  # fmt: skip
    whole = train(output_dir, steps=(1, per_epoch), **options)
    return [
        (step, train(f"{output_dir}-again", resume=f"{output_dir}/checkpoint-{step}", **options), whole)
        for step in (1, per_epoch)
    ]


OTHER_LOADERS: dict[str, dict[str, Any]] = {
    "persistent workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "three workers": {"dataloader_num_workers": 3, "dataloader_prefetch_factor": 1},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "stream": {"dataset": CroppedStream(14)},
    "stream in workers": {"dataset": CroppedStream(8), "dataloader_num_workers": 2, "max_steps": 12},
}


@pytest.mark.parametrize("name", OTHER_LOADERS)
def test_a_resumed_run_draws_alike_however_its_data_is_read(tmp_path: Path, name: str) -> None:
    options = {**OTHER_LOADERS[name], "eval_strategy": "steps", "eval_steps": 5}
    whole = train(str(tmp_path), steps=(3, 9), **options)

    for step in (3, 9):
        resumed = train(str(tmp_path / "again"), resume=str(tmp_path / f"checkpoint-{step}"), **options)
        assert_same_end(resumed, whole, step)


def shuffled(dataset: Any, collator: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=collator, **options)


def shuffled_by_a_generator(dataset: Any, collator: Any) -> DataLoader:
    return shuffled(dataset, collator, generator=torch.Generator().manual_seed(5))


def in_batches_of_a_sampler(dataset: Any, collator: Any) -> DataLoader:
    sampler = BatchSampler(RandomSampler(dataset, replacement=True), batch_size=2, drop_last=False)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collator)


def of_a_stream(dataset: Any, collator: Any) -> DataLoader:
    return DataLoader(CroppedStream(14), batch_size=2, collate_fn=collator)


class Batches:
    """No DataLoader: every pass is shuffled anew, and rotated by the epoch."""

    epoch = 0

    def __init__(self, dataset: Any, collator: Any) -> None:
        self.dataset, self.collator = dataset, collator

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset) // 2

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.dataset)).roll(self.epoch).tolist()
        for begin in range(0, len(order), 2):
            yield self.collator([self.dataset[index] for index in order[begin : begin + 2]])


@pytest.mark.parametrize(
    "own_loader", [shuffled, shuffled_by_a_generator, in_batches_of_a_sampler, of_a_stream, Batches]
)
def test_a_loader_of_the_users_own_goes_on_in_the_order_of_its_pass(tmp_path: Path, own_loader: Any) -> None:
    whole = train(str(tmp_path), steps=(3, 7, 9), own_loader=own_loader)

    for step in (3, 7, 9):
        again = str(tmp_path / "again")
        resumed = train(again, resume=str(tmp_path / f"checkpoint-{step}"), steps=(10,), own_loader=own_loader)
        assert_same_end(resumed, whole, step)
    resumed = train(again, resume=f"{again}/checkpoint-10", own_loader=own_loader)
    assert_same_end(resumed, whole, "resumed twice")


class Words(Dataset):
    """Rows that are as they are."""

    def __init__(self, num_rows: int) -> None:
        self.rows = Cropped(num_rows).rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train_with_own_loaders(
    output_dir: str, cases: list[int], *, strategy: str
) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from transformers import default_data_collator

    found = []
    for workers in cases:
        own_loader = partial(in_workers, collator=default_data_collator, workers=workers)
        options = {"strategy": strategy, "dataset": Words(10), "own_loader": own_loader}
        whole = train(f"{output_dir}/{workers}", steps=(2,), **options)
        resumed = train(f"{output_dir}/{workers}-again", resume=f"{output_dir}/{workers}/checkpoint-2", **options)
        found.append((workers, resumed, whole))
    return found


def in_workers(dataset: Any, _: Any, collator: Any, workers: int) -> DataLoader:
    return shuffled(dataset, collator, num_workers=workers)


def train_on_a_stream(
    output_dir: str, cases: list[tuple[int, int]], *, strategy: str
) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Train with each number of workers, on shards of its own for each rank or, with one, on slices of one stream."""
    import datasets

    found = []
    rows = datasets.Dataset.from_list([{"input_ids": row} for row in Cropped(16).rows])
    for workers, num_shards in cases:
        stream = rows.to_iterable_dataset(num_shards=num_shards).map(_disturb)
        options = {"strategy": strategy, "dataset": stream, "dataloader_num_workers": workers, "max_steps": 5}
        folder = f"{output_dir}/{workers}-{num_shards}"
        whole = train(folder, steps=(2,), **options)
        resumed = train(f"{folder}-again", resume=f"{folder}/checkpoint-2", **options)
        found.append(((workers, num_shards), resumed, whole))
    return found


def _disturb(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"input_ids": [5 if random.random() < 0.2 else word for word in row["input_ids"]]}


@pytest.mark.multirank
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("workers", "accumulation", "strategy"),
    crossed([beyond((0, 1)), (0, 2), (2, 1), (2, 2)], ["ddp", "fsdp", "single"]),
)
def test_losses_and_weights_of_a_resumed_run_are_those_of_the_run_that_never_stopped(
    tmp_path: Path, workers: int, accumulation: int, strategy: str
) -> None:
    for results in on_ranks(strategy, train_and_resume, str(tmp_path / "run"), workers, accumulation):
        for case, resumed, whole in results:
            assert_same_end(resumed, whole, case)


@pytest.mark.multirank
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("run", "cases"),
    [
        (train_with_own_loaders, [0, 2]),
        (train_on_a_stream, [(0, 4), (2, 1)]),
        beyond((train_on_a_stream, [(0, 1), (2, 4)])),
    ],
)
def test_so_are_those_of_loaders_and_streams_of_the_users_own(
    tmp_path: Path, run: Callable[..., Any], cases: list[Any]
) -> None:
    for results in on_ranks("ddp", run, str(tmp_path), cases):
        for case, resumed, whole in results:
            assert_same_end(resumed, whole, case)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_leaves_the_streams_of_training_where_they_are(tmp_path: Path, workers: int) -> None:
    options = {"dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0}
    without = train(str(tmp_path), **options)
    evaluated = train(str(tmp_path), eval_strategy="steps", eval_steps=1, eval_on_start=True, **options)

    assert evaluated["losses"] == without["losses"]
    assert len(set(evaluated["eval_losses"])) == len(evaluated["eval_losses"])


def test_predictions_that_a_script_asks_for_go_on_with_its_streams(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, options={"data_collator": masking()})
    trainer.eval_dataset = Cropped(5)
    before = torch.get_rng_state()
    first, second = (trainer.evaluate()["eval_loss"] for _ in range(2))
    assert first == second
    assert torch.get_rng_state().equal(before)

    first, second = (trainer.predict(trainer.eval_dataset).metrics["test_loss"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("remembers", [True, False])
def test_a_save_within_an_update_has_the_streams_from_before_that_update(tmp_path, caplog, remembers) -> None:
    options = {"dropout": 0.2, "gradient_accumulation_steps": 2, "enable_jit_checkpoint": remembers}
    callback = SaveWithin("on_pre_optimizer_step", 2)
    callback.trainer = build_trainer(tmp_path, options={"callbacks": [callback]}, **options)
    callback.trainer.train()
    again = build_trainer(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    whole, resumed = summary(callback.trainer)["losses"], summary(again)["losses"]
    assert (resumed == whole) is remembers
    assert ("saved while an update is under way" in caplog.text) is not remembers


class WithSampler(Trainer):
    """Shuffles by a sampler whose generator is its own."""

    order: list[float]

    def _get_train_sampler(self, *args: Any) -> RandomSampler:
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(7))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.order += inputs["input_ids"][:, :3].flatten().tolist()
        return super().training_step(model, inputs, num_items_in_batch)


def order_of(directory: Path, data: Any, resume: str | None = None) -> list[float]:
    options: Any = {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "epoch"}
    trainer = WithSampler(build_model(), arguments(directory, **options), train_dataset=data)
    trainer.order = []
    trainer.train(resume_from_checkpoint=resume)
    return trainer.order


def test_a_sampler_with_a_generator_goes_on_behind_an_epoch(tmp_path: Path) -> None:
    data = TokenDataset(12)
    whole = order_of(tmp_path, data)
    [first, _] = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    assert order_of(tmp_path / "again", data, str(first)) == whole[len(whole) // 2 :]


def joined_stream() -> Any:
    parts = (
        datasets.Dataset.from_dict({"x": [float(row) for row in range(first, first + 20)]}).to_iterable_dataset()
        for first in (0, 100)
    )
    return datasets.concatenate_datasets(list(parts))


def test_a_joined_stream_that_workers_read_is_resumed_within_an_epoch() -> None:
    def prepare() -> Any:
        return Accelerator(cpu=True).prepare(DataLoader(joined_stream(), batch_size=2, num_workers=2))

    loader = prepare()
    whole = [batch["x"].tolist() for batch in loader]
    loader = prepare()
    for step, _ in enumerate(loader, 1):
        if step == 3:
            state = loader.state_dict()
            break
    again = prepare()
    again.load_state_dict(state)
    assert [batch["x"].tolist() for batch in again] == whole[3:]
