"""Where memory runs out, the error says what it was taken for on that rank, and what a cheap change would take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.big_models.device_map import convert_file_size_to_int
from accel_trainer.errors import size_in_words
from accel_trainer.trainer.diagnostics import advise, describe_peak
from tests.cells import beyond
from tests.trainer_jobs import build_trainer, on_ranks

_GIB = 2**30
_SIZES = {"weights": 10.0 * _GIB, "gradients": 10.0 * _GIB, "optimizer state": 20.0 * _GIB}


def test_a_peak_is_told_by_what_it_was_for():
    assert describe_peak(_SIZES, 70 * _GIB) == (
        "70.00 GiB at the peak: 10.00 GiB weights, 10.00 GiB gradients, 20.00 GiB optimizer state, 30.00 GiB "
        "activations, temporaries and the rest"
    )


def test_sizes_have_the_unit_that_suits_them():
    sizes = (100, 2**20 - 2**10, 2**20, 2**30 - 2**20, 2**30, 3 * 2**40)
    assert list(map(size_in_words, sizes)) == [
        "0.10 KiB", "1023.00 KiB", "1.00 MiB", "1023.00 MiB", "1.00 GiB", "3072.00 GiB",
    ]  # fmt: skip


def test_changes_come_with_the_peak_that_follows():
    """Of 40 GiB that stay and 30 + 6 of 8 rows: half of the rows is 58; an eighth of what stays, and the rest, 41."""
    assert advise(_SIZES, 70 * _GIB, 6 * _GIB, rows=8, num_steps=2, replicas=8) == [
        "  per_device_train_batch_size=4 with gradient_accumulation_steps=4, the same update: about 58.00 GiB",
        "  fsdp=True, which shards all but the rest over 8 ranks: about 41.00 GiB",
        "  activation_checkpointing and others, with their peaks and times: TrainingArguments(preflight='warn')",
    ]
    # Of five rows no half is the same update.
    (first, *_) = advise(_SIZES, 70 * _GIB, 0, rows=5, num_steps=1, replicas=1)
    assert first.startswith("  per_device_train_batch_size=1 with gradient_accumulation_steps=5, the same update")
    assert len(advise(_SIZES, 70 * _GIB, 0, rows=1, num_steps=1, replicas=1)) == 1


def _run_out(folder: str, *, strategy: str, **options: Any) -> tuple[str, list[str], int]:
    trainer = build_trainer(folder, strategy=strategy, max_steps=4, per_device_train_batch_size=2, **options)
    compute_loss, process = trainer.compute_loss, trainer.accelerator.process

    def failing(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = failing
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB") as raised:
        trainer.train()
    num_bytes = sum(p.numel() for p in trainer.model.parameters()) * 4
    return f"rank {process.rank}: ", getattr(raised.value, "__notes__", []), num_bytes


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_an_error_of_a_training_has_the_account_of_its_rank(tmp_path: Path, strategy: str):
    for rank, notes, num_bytes in on_ranks(strategy, _run_out, str(tmp_path)):
        (note,) = notes
        assert note.startswith(rank)
        size = size_in_words(num_bytes)
        found = re.search(rf"{size} weights, {size} gradients, ([\d.]+) KiB optimizer state, ", note)
        assert found is not None
        assert float(found[1]) == pytest.approx(2 * num_bytes / 2**10, rel=0.01)  # and the numbers of steps
        assert "per_device_train_batch_size=1 with gradient_accumulation_steps=2, the same update: about " in note
        assert ("fsdp=True, which shards all but the rest over 2 ranks: about" in note) == (strategy == "ddp")
        places = (" at the peak", " activations", "$")  # the last one behind "the same update: about"
        peak, rest, halved = (
            convert_file_size_to_int(re.search(rf"([\d.]+ .iB){place}", note, re.MULTILINE)[1].replace(" ", ""))  # type: ignore[index]
            for place in places
        )
        assert halved == pytest.approx(peak - rest + (rest + 2 * _GIB) / 2, abs=0.02 * _GIB)


@pytest.mark.parametrize("strategy", ["single", beyond("fsdp")])
def test_with_a_preflight_the_planned_peak_and_planned_changes_stand_beside_it(tmp_path: Path, strategy: str):
    for rank, notes, _ in on_ranks(strategy, _run_out, str(tmp_path), preflight="warn"):
        (note,) = notes
        measured, planned, *changes = note.splitlines()
        assert measured.startswith(rank)
        assert measured.endswith("; 2.00 GiB more were not to be had")
        assert re.match(r"  planned: \d+\.\d+ KiB at the peak: \d+\.\d+ KiB parameters, .* KiB activations$", planned)
        assert len(changes) == 2
        peaks = [re.search(r": about ([\d.]+) KiB at the peak, (\d\.\d\d) of the time$", each) for each in changes]
        assert all(float(peak[1]) < float(planned.split()[1]) for peak in peaks)  # type: ignore[index]
        assert [float(peak[2]) for peak in peaks] == sorted(float(peak[2]) for peak in peaks)  # type: ignore[index]


def test_other_errors_have_none(tmp_path: Path):
    trainer = build_trainer(tmp_path, max_steps=2)
    trainer.compute_loss = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.train()
    assert not hasattr(raised.value, "__notes__")
