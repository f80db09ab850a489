"""Two runs, of which one has a bit flipped: the first update that differs is found, and the module in it."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from accel_trainer.contrib.run_report.page import run_report
from accel_trainer.errors import ConfigError, CorruptCheckpointError
from accel_trainer.trainer.diagnostics import sum_of_bits
from tests.cells import beyond
from tests.trainer_jobs import build_trainer, on_ranks

_UPDATE = 3


class _Flip(TrainerCallback):
    """Flips one bit of an element of a module's weights before an update, on one rank."""

    def __init__(self, module: str, bit: int, rank: int) -> None:
        self.module, self.bit, self.rank = module, bit, rank
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + 1 == _UPDATE and self.trainer.accelerator.process.rank == self.rank:
            weight = self.trainer.accelerator.unwrap_model(model).get_submodule(self.module).weight
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            with torch.no_grad():
                bits = local.view(torch.int32).view(-1)
                bits[len(bits) // 2] ^= 1 << self.bit


def _train(folder: str, *, strategy: str, flip: tuple[str, int, int] | None = None, **options: Any) -> list[str]:
    callbacks = [] if flip is None else [_Flip(*flip)]
    given = {"max_steps": 4, "logging_steps": 1, "fingerprint_every": 1, "on_nonfinite": "warn", **options}
    trainer = build_trainer(folder, strategy=strategy, options={"callbacks": callbacks}, **given)
    for callback in callbacks:
        callback.trainer = trainer
    names = [name for name, module in trainer.model.named_modules() if hasattr(module, "weight")]
    trainer.train()
    trainer.save_state()
    return names


def _diff(capsys: pytest.CaptureFixture[str], first: Path, second: Path) -> tuple[int, str]:
    capsys.readouterr()
    code = run_report([str(first), str(second), "--diff"])
    return code, capsys.readouterr().out


def _resume(folder: str, *, strategy: str, bit: int | None = None) -> str:
    """Train on behind the second update, where the run has done four before; return what is logged of that."""
    rank = build_trainer(folder, strategy=strategy).accelerator.process.rank
    _train(folder, strategy=strategy, save_strategy="steps", save_steps=2, max_steps=4)
    with (Path(folder) / "fingerprints.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"update": 5, "su' if rank == 0 else "")  # a run that was killed
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accel_trainer.trainer.diagnostics")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    callbacks = [] if bit is None else [_Flip("model.layers.1.mlp.up_proj", bit, 0)]
    options = {"max_steps": 4, "fingerprint_every": 1}
    trainer = build_trainer(folder, strategy=strategy, options={"callbacks": callbacks}, **options)
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    logger.removeHandler(handler)
    return "\n".join(messages) if rank == 0 else ""


def _resume_both(folder: str, *, strategy: str) -> tuple[str, str]:
    return _resume(f"{folder}/alike", strategy=strategy), _resume(f"{folder}/flipped", strategy=strategy, bit=20)


@pytest.mark.parametrize("strategy", ["single", beyond("ddp"), "fsdp"])
def test_updates_that_come_again_behind_a_checkpoint_say_whether_the_machine_repeats_itself(
    tmp_path: Path, strategy: str
):
    alike, flipped = on_ranks(strategy, _resume_both, str(tmp_path))[0]
    assert re.search("update 3 comes to the bits that it had before the resume: this machine repeats itself", alike)
    assert alike.count("repeats itself") == 1
    assert re.search("update 3 is not what it was .* difference is the forward of model.layers.1.mlp.up_proj.", flipped)


def test_20_of_20_flipped_bits_are_found_in_their_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = _train(str(tmp_path / "plain"), strategy="single")
    draw = random.Random(0)
    for number in range(20):
        module, folder = draw.choice(names), tmp_path / f"flipped_{number}"
        _train(str(folder), strategy="single", flip=(module, draw.randrange(30), 0))
        code, text = _diff(capsys, tmp_path / "plain", folder)
        assert code == 1
        # A low bit may be lost where the module computes with it: then the weights are the first that have it.
        wanted = (
            rf"fingerprints: update {_UPDATE}: (forward|weights) of {re.escape(module)}; those of update 2 are alike"
        )
        assert re.search(wanted, text), (module, text)


def _train_plain_and_flipped(folder: str, *, strategy: str) -> None:
    _train(f"{folder}/plain", strategy=strategy)
    _train(f"{folder}/flipped", strategy=strategy, flip=("model.layers.1.mlp.up_proj", 22, 1))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_bit_of_one_rank_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str):
    on_ranks(strategy, _train_plain_and_flipped, str(tmp_path))
    on_ranks(strategy, _train, str(tmp_path / "again"))
    assert _diff(capsys, tmp_path / "plain", tmp_path / "again")[0] == 0
    code, text = _diff(capsys, tmp_path / "plain", tmp_path / "flipped")
    assert code == 1
    assert re.search(rf"logged: update {_UPDATE}: (loss|grad_norm) is \S+ and \S+; alike until update 2\n", text)
    assert f"fingerprints: update {_UPDATE}: forward of model.layers.1.mlp.up_proj; those of update 2 are alike" in text


def test_runs_that_are_alike_differ_in_options_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _train(str(tmp_path / "a"), strategy="single", fingerprint_every=2)
    _train(str(tmp_path / "b"), strategy="single", fingerprint_every=0)
    code, text = _diff(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "logged: none\n  fingerprints: neither, or no update of both (fingerprint_every)" in text
    lines = [json.loads(line) for line in (tmp_path / "a" / "fingerprints.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [2, 4]
    assert not (tmp_path / "b" / "fingerprints.jsonl").exists()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_any_bit_changes_the_sum_and_no_order_does(dtype: torch.dtype):
    values = torch.arange(1000).remainder(7).to(dtype)
    order = torch.randperm(1000)
    assert sum_of_bits(values) == sum_of_bits(values[order])
    changed = values.clone()
    changed[500] = 1 - changed[500] if dtype != torch.bool else ~changed[500]
    assert sum_of_bits(values) != sum_of_bits(changed)


def test_what_cannot_be_compared_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="fingerprint_every=-1 is a number of updates"):
        build_trainer(tmp_path, fingerprint_every=-1)
    with pytest.raises(ConfigError, match=r"--diff was given 1 run\(s\), and compares two"):
        run_report([str(tmp_path), "--diff"])
    for name in ("a", "b"):
        _train(str(tmp_path / name), strategy="single", fingerprint_every=2)
    with (tmp_path / "b" / "fingerprints.jsonl").open("a") as file:
        file.write('{"update": 5, "su')  # a run that was killed
    assert run_report([str(tmp_path / "a"), str(tmp_path / "b"), "--diff"]) == 0
    (tmp_path / "b" / "fingerprints.jsonl").write_text('{"update": 2')
    with pytest.raises(CorruptCheckpointError, match=r"fingerprints.jsonl cannot be read .*; name runs whose file"):
        run_report([str(tmp_path / "a"), str(tmp_path / "b"), "--diff"])


def test_a_resumed_run_that_is_alike_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # A llama takes num_items_in_batch: the first micro-batch of each train() has forwards more.
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options["lr_scheduler_type"] = "constant"
    _train(str(tmp_path / "whole"), strategy="single", **options)
    _train(str(tmp_path / "parts"), strategy="single", **options, max_steps=2)
    again = build_trainer(str(tmp_path / "parts"), fingerprint_every=1, max_steps=4, on_nonfinite="warn", **options)
    again.train(resume_from_checkpoint=True)
    again.save_state()
    code, text = _diff(capsys, tmp_path / "whole", tmp_path / "parts")
    assert (code, "fingerprints: none" in text) == (0, True), text
