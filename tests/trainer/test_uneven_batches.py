"""A short last global batch gives the numbers of one process: world size is no part of the experiment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from accel_trainer import Trainer
from accel_trainer.data.plan import BatchRows
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.trainer.loop import WindowReader
from accel_trainer.trainer.loss import LossKind
from accel_trainer.trainer.run_clock import RunClock
from tests.cells import beyond
from tests.ranks import preload, run_ranks
from tests.strategy_configs import HAS_DEEPSPEED, needs_deepspeed, zero_section
from tests.trainer_jobs import TokenDataset, build_trainer, on_ranks, summary

if HAS_DEEPSPEED:
    preload("deepspeed")

# Global batches of 4. The last holds 1 row, on rank 0 (rank 1 has none), or 3, of which rank 1 has one.
JOBS: dict[str, dict[str, Any]] = {
    f"{model} {samples} {accumulation}": {
        "model": model, "samples": samples, "gradient_accumulation_steps": accumulation,
        "num_train_epochs": accumulation,
    }
    for model in ("bert", "llama")
    for samples in (13, 15)
    for accumulation in (1, 2)
} | {
    "smoothed": {"samples": 13, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    # Each rank divides by its own number of tokens. Rows have equally many: the mean over tokens is that over rows.
    "own count": {"samples": 13, "average_tokens_across_devices": False, "uneven": False},
    "own counts": {
        "samples": 13, "average_tokens_across_devices": False, "uneven": False, "gradient_accumulation_steps": 2,
    },
    "stream": {"model": "bert", "samples": 13, "max_steps": 5, "is_stream": True},
    "filled evaluation": {"samples": 13, "num_train_epochs": 2, "eval_strategy": "epoch", "fills_evaluation": True},
    "dispatched": {"samples": 13, "gradient_accumulation_steps": 2, "dispatch_batches": True},
}  # fmt: skip


class Stream(IterableDataset):
    def __init__(self, dataset: TokenDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.dataset.rows)


class FilledEvaluation(Trainer):
    """Sets `even_batches` for each loader by itself, as sentence-transformers does."""

    def get_train_dataloader(self) -> Any:
        self.accelerator.even_batches = False
        return super().get_train_dataloader()

    def get_eval_dataloader(self, *args: Any) -> Any:
        self.accelerator.even_batches = True
        return super().get_eval_dataloader(*args)


class OwnBackward(Trainer):
    """Divides and derives the loss of a micro-batch by itself, and takes the mean over its rows."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs) / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def build(
    output_dir: Path,
    is_stream: bool = False,
    fills_evaluation: bool = False,
    dispatch_batches: Any = None,
    has_own_backward: bool = False,
    **job: Any,
) -> Any:
    """Return a Trainer with SGD, which does not enlarge rounding as AdamW does."""
    configuration = {"dispatch_batches": dispatch_batches}
    options = {"uneven": True, "optim": "sgd", "learning_rate": 0.1, "include_num_input_tokens_seen": "all", **job}
    trainer = build_trainer(output_dir, accelerator_config=configuration, **options)
    if is_stream:
        trainer.train_dataset = Stream(trainer.train_dataset)
    if fills_evaluation:
        trainer.__class__ = FilledEvaluation
    if has_own_backward:
        trainer.__class__ = OwnBackward
    return trainer


def run_jobs(output_dir: str, batch_size: int, jobs: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Train each job; return their summaries."""
    results = {}
    for name, job in jobs.items():
        path = Path(output_dir, name.replace(" ", "-"))
        trainer = build(path, per_device_train_batch_size=batch_size, **job, **options)
        trainer.train()
        results[name] = {**summary(trainer), "tokens": trainer.state.num_input_tokens_seen}
    return results


def assert_same(run: dict[str, Any], reference: dict[str, Any], job: str, tolerance: float = 1e-6) -> None:
    assert run["step"] == reference["step"]
    for name in ("losses", "grad_norms", "train_loss", "tokens"):
        np.testing.assert_allclose(run[name], reference[name], rtol=tolerance, err_msg=f"{job}: {name}")
    assert run["weights"].keys() == reference["weights"].keys()
    for name, values in reference["weights"].items():
        np.testing.assert_allclose(
            run["weights"][name], values, rtol=tolerance, atol=tolerance, err_msg=f"{job}: {name}"
        )


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[str, Any]:
    return run_jobs(str(tmp_path_factory.mktemp("single")), 4, JOBS)


SHARDED = ("bert 13 2", "bert 15 1", "llama 13 1", "llama 15 2", "own counts")
REPLICATED = tuple(name for name in JOBS if name not in SHARDED)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("strategy", "names"),
    [("ddp", REPLICATED), ("fsdp", SHARDED), beyond(("ddp", SHARDED)), beyond(("fsdp", REPLICATED))],
)
def test_a_short_last_batch_gives_the_numbers_of_one_process(tmp_path, references, strategy, names):
    runs = on_ranks(strategy, run_jobs, str(tmp_path), batch_size=2, jobs={name: JOBS[name] for name in names})

    for name in names:
        assert_same(runs[0][name], references[name], name)
        assert runs[0][name]["losses"] == runs[1][name]["losses"], name


@pytest.mark.multirank
def test_a_backward_of_ones_own_weighs_each_micro_batch_by_its_own_rows(tmp_path):
    jobs = {f"own {each}": {**JOBS[f"bert {each} 2"], "has_own_backward": True} for each in (13, 15)}
    reference = run_jobs(str(tmp_path), 4, jobs)
    for run in on_ranks("ddp", run_jobs, str(tmp_path), batch_size=2, jobs=jobs):
        for name in jobs:
            # What it logs is its own: the mean of the ranks' losses.
            logged = ("losses", "train_loss")
            assert_same({**run[name], **{key: reference[name][key] for key in logged}}, reference[name], name)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(300)
@needs_deepspeed
@pytest.mark.parametrize("stage", [beyond(2), 3])
def test_deepspeed_weighs_a_short_last_batch_alike(tmp_path, references, stage):
    names = ["bert 13 1", "bert 15 2", "llama 13 2"]
    jobs = {name: JOBS[name] for name in names}
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": zero_section(stage), "zero_allow_untested_optimizer": True,
    }  # fmt: skip

    runs = run_ranks(run_jobs, 2, str(tmp_path), 2, jobs, deepspeed=config, timeout=250)

    for name in names:
        assert_same(runs[0][name], references[name], name)


def resume(output_dir: str) -> dict[str, Any]:
    """Train with a checkpoint before the last two updates, and once more from there."""
    job = {**JOBS["bert 13 1"], "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    build(Path(output_dir), **job).train()
    trainer = build(Path(output_dir, "again"), **job)
    trainer.train(resume_from_checkpoint=str(Path(output_dir, "checkpoint-2")))
    return {**summary(trainer), "tokens": trainer.state.num_input_tokens_seen}


@pytest.mark.multirank
def test_a_resumed_run_weighs_the_last_batch_alike(tmp_path, references):
    resumed, reference = run_ranks(resume, 2, str(tmp_path))[0], references["bert 13 1"]

    assert_same({**resumed, "train_loss": reference["train_loss"]}, reference, "resumed")


class LoaderOfTwo(list):
    """A pass of one batch, of which the second rank has none."""

    rows = BatchRows((1, 0), (1, 1), is_last=True)


def test_batches_that_the_loader_did_not_give_are_refused_where_they_would_weigh_unequally():
    process = ProcessContext(0, 0, 2, 2, torch.device("cpu"), "gloo")
    reader = WindowReader(LoaderOfTwo(["a"]), process, RunClock(process))
    batches = list(reader)

    reader.begin(batches)
    with pytest.raises(ConfigError, match=r"2 batches, 1 of them as the loader gave them, .* has \(1, 0\) samples"):
        reader.begin(["other", *batches])


class LoaderOfFour(list):
    """A pass of four batches of one row on each rank."""

    rows = BatchRows((1, 1), (1, 1))


def test_a_batch_that_the_loader_gives_again_and_again_weighs_as_others_do():
    process = ProcessContext(0, 0, 2, 2, torch.device("cpu"), "gloo")
    one = {"x": torch.ones(1)}
    reader = WindowReader(LoaderOfFour([one] * 4), process, RunClock(process))

    reader.begin(list(reader))
    weights = []
    for reader.index in range(4):
        options = {"has_items": False, "over_ranks": False, "shifts_labels": False}
        weights.append(reader.weigh(torch.ones(()), LossKind.ROW_MEAN, **options).item())

    assert weights == [0.25] * 4


def test_a_batch_is_filler_where_no_step_has_samples_for_it():
    process = ProcessContext(1, 1, 2, 2, torch.device("cpu"), "gloo")
    both, filler = {"x": torch.ones(1)}, {"x": torch.ones(1)}
    loader = LoaderOfFour([both, both, filler, filler])
    reader = WindowReader(loader, process, RunClock(process))
    for own in (1, 0, 0, 0):
        loader.rows = BatchRows((1, own), (1, 1))
        next(reader)

    assert [len(reader.without_filler(batch)["x"]) for batch in (both, filler)] == [1, 0]
