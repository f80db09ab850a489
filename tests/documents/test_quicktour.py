"""Blocks of the quick tour, line for line but for the import, on one process and on two ranks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from accel_trainer import Accelerator, DistributedType
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "accel_trainer.utils", "evaluate", "tqdm.auto")

METRIC = str(Path(__file__).resolve().parents[2] / "examples" / "metrics" / "accuracy")
NUM_SAMPLES = 13


def rows(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    """Return samples that say which they are: sample i is (i, i % 2)."""
    index = torch.arange(float(num_samples))
    return TensorDataset(index[:, None], (index % 2).long())


class Parity(nn.Module):
    """Classifies each sample by a weight that can be learned, and gets every third one wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a class for each sample, as a float that depends on the weight."""
        index = inputs[:, 0]
        return ((index + (index % 3 == 0)) % 2) * self.weight


def main_use(**options: Any) -> dict[str, Any]:
    """Prepare four objects; tell lengths, devices, and which samples each epoch gave to this rank."""
    accelerator = Accelerator(cpu=True, **options)
    model = Parity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    train_dataloader = DataLoader(rows(16), batch_size=4, shuffle=True)

    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    epochs = [[inputs.flatten().tolist() for inputs, _ in train_dataloader] for _ in range(2)]
    return {
        "length": len(train_dataloader),
        "sizes": {len(batch) for batch in epochs[0]},
        "total": train_dataloader.total_batch_size,
        "epochs": [[row for batch in epoch for row in batch] for epoch in epochs],
        "device": str(next(model.parameters()).device),
    }


def by_hand() -> dict[str, Any]:
    """Leave placement to the script: a model on another device stays there, and batches are not moved."""
    accelerator = Accelerator(device_placement=False, cpu=True)
    model = nn.Linear(1, 1).to(torch.float64)
    model.to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, DataLoader(rows(4), batch_size=2))
    for inputs, _ in train_dataloader:
        accelerator.backward(model(inputs.to(accelerator.device, torch.float64)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return {"moves": train_dataloader._device}


class PositionalMetric:
    """A metric that takes what is passed by position, as those of `datasets` did."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)


def distributed_evaluation(cache: str, batch_size: int) -> dict[str, Any]:
    """Evaluate with a prepared loader and `gather_for_metrics`; then by hand, with `gather`."""
    import evaluate

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Parity())
    model.eval()
    validation_dataloader = DataLoader(rows(), batch_size=batch_size)

    validation_dataloader = accelerator.prepare(validation_dataloader)

    metric = PositionalMetric()
    modern = evaluate.load(METRIC, cache_dir=f"{cache}/{accelerator.process_index}")
    by_hand = []
    for inputs, targets in validation_dataloader:
        predictions = model(inputs)
        # Gather all predictions and targets
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        # Example of use with a *Datasets.Metric*
        metric.add_batch(all_predictions, all_targets)
        modern.add_batch(predictions=all_predictions.long(), references=all_targets)
        by_hand += accelerator.gather(inputs).flatten().tolist()
    return {"pairs": metric.pairs, "accuracy": modern.compute()["accuracy"], "gathered": len(by_hand)}


def dynamic_padding() -> list[list[int]]:
    accelerator = Accelerator(cpu=True)
    predictions = torch.full((1, 2 + accelerator.process_index), accelerator.process_index + 1)
    predictions = accelerator.pad_across_processes(predictions, dim=1, pad_index=-100)
    return accelerator.gather(predictions).tolist()


def caveats(folder: str) -> dict[str, Any]:
    """Run the small blocks: TPU branch, one process only, printing, waiting, skipped steps."""
    accelerator = Accelerator(cpu=True)
    told: dict[str, Any] = {}
    if accelerator.distributed_type == DistributedType.TPU:
        told["shapes"] = "static"
    else:
        told["shapes"] = "dynamic"

    if accelerator.is_local_main_process:
        told["server"] = "once"
    if accelerator.is_main_process:
        told["job"] = "once"

    screen, lines = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(lines):
        progress_bar = tqdm(range(3), disable=not accelerator.is_local_main_process)
        for _ in progress_bar:
            pass
        accelerator.print("hello")
    told["bar"], told["printed"] = "3/3" in screen.getvalue(), lines.getvalue()

    if accelerator.is_main_process:
        (Path(folder) / "flag").write_text("")
    accelerator.wait_for_everyone()
    told["waited"] = (Path(folder) / "flag").exists()

    model = Parity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    if not accelerator.optimizer_step_was_skipped:
        lr_scheduler.step()
    told["rate"] = lr_scheduler.get_last_lr()
    return told


def run_quicktour(folder: str) -> dict[str, Any]:
    """Run all blocks on one rank."""
    return {
        "main": main_use(),
        "split": main_use(split_batches=True),
        "by hand": by_hand(),
        "distributed": [distributed_evaluation(folder, batch_size) for batch_size in (2, 4)],
        "padding": dynamic_padding(),
        "caveats": caveats(folder),
    }


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_quicktour, request.param, str(tmp_path_factory.mktemp("quicktour")))


def test_training_data_is_split_anew_each_epoch_and_seen_once(results: list[dict[str, Any]]):
    ranks = len(results)
    for epoch in range(2):
        seen = [row for result in results for row in result["main"]["epochs"][epoch]]
        assert sorted(seen) == list(range(16))
    assert results[0]["main"]["epochs"][0] != results[0]["main"]["epochs"][1]
    expected = {"sizes": {4}, "total": 4 * ranks, "length": 4 // ranks, "device": "cpu"}
    assert [{name: result["main"][name] for name in expected} for result in results] == [expected] * ranks


def test_split_batches_keeps_the_batch_size_of_the_job(results: list[dict[str, Any]]):
    expected = {"sizes": {4 // len(results)}, "total": 4, "length": 4}
    assert [{name: result["split"][name] for name in expected} for result in results] == [expected] * len(results)
    seen = [row for result in results for row in result["split"]["epochs"][0]]
    assert sorted(seen) == list(range(16))


def test_placement_can_be_left_to_the_script(results: list[dict[str, Any]]):
    assert all(result["by hand"]["moves"] is None for result in results)


def test_metrics_see_every_sample_once_and_in_order(results: list[dict[str, Any]]):
    index = torch.arange(float(NUM_SAMPLES))
    predictions = Parity()(index[:, None]).tolist()
    expected = list(zip(predictions, (index % 2).tolist(), strict=True))
    accuracy = sum(prediction == target for prediction, target in expected) / NUM_SAMPLES
    for result in results:
        for evaluated in result["distributed"]:
            assert evaluated["pairs"] == expected
            assert evaluated["accuracy"] == pytest.approx(accuracy)
    # gather() keeps the sample that a rank without one was lent, so that it takes part.
    assert results[0]["distributed"][0]["gathered"] == NUM_SAMPLES + (len(results) > 1)


def test_tensors_of_different_sizes_are_padded_across_processes(results: list[dict[str, Any]]):
    expected = [[1, 1]] if len(results) == 1 else [[1, 1, -100], [2, 2, 2]]
    assert all(result["padding"] == expected for result in results)


def test_small_blocks_run_where_they_should(results: list[dict[str, Any]]):
    for rank, result in enumerate(results):
        told = result["caveats"]
        assert told["shapes"] == "dynamic"
        assert ("server" in told, "job" in told) == (rank == 0, rank == 0)
        assert (told["bar"], told["printed"]) == (rank == 0, "hello\n" if rank == 0 else "")
        assert told["waited"]
        assert told["rate"] == [0.05]
