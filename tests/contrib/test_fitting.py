"""`accel-trainer estimate --fit`: what it chooses fits, is the fastest that does, and is trained as it is written."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from accel_trainer.big_models.device_map import convert_file_size_to_int
from accel_trainer.config import resolve
from accel_trainer.contrib import estimate, layouts
from accel_trainer.errors import ConfigError
from tests.launches import launch

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 2000,
}  # fmt: skip
GLOBAL_BATCH, LENGTH = 16, 32


_plans: dict[Any, Any] = {}


def remembered(args: Any, options: Any, flags: dict[str, Any]) -> Any:
    """Plan once what searches of one model for other sizes ask for again."""
    if args.config_file is not None:  # whose contents are not in the key
        return layouts.plan_of(args, options, flags)
    key = (args.batch, args.sequence, *sorted({**options.flags, **flags}.items()))
    if key not in _plans:
        _plans[key] = layouts.plan_of(args, options, flags)
    return _plans[key]


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no default configuration
    monkeypatch.setattr(estimate, "plan_of", remembered)
    monkeypatch.setattr(layouts, "_ALONE_SECONDS", float("inf"))  # others import torch for longer than this takes
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def fit(llama: str, size: str, *words: str, processes: int = 2, global_batch: int = GLOBAL_BATCH) -> None:
    sizes = ["--num_processes", str(processes), "--global_batch", str(global_batch), "--sequence", str(LENGTH)]
    estimate.run_estimate([llama, *sizes, "--fit", size, *words])


def peak_of(llama: str, file: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Return the peak that is planned of a configuration, by the command that takes one."""
    rows = resolve(file=str(file), environ={}).config.accumulation.micro_batch_size
    estimate.run_estimate([llama, "--config", str(file), "--batch", str(rows), "--sequence", str(LENGTH), "--json"])
    return int(json.loads(capsys.readouterr().out)["peak"])


def test_less_memory_takes_more_time_and_the_same_update(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, choices, before = tmp_path / "train.yaml", [], set(_plans)
    for size in ("100MiB", "4MiB", "2.5MiB"):
        fit(llama, size, "--write", str(file))
        if size == "100MiB":  # of which one row shows that all fit
            assert {rows for rows, *_ in set(_plans) - before} <= {1, GLOBAL_BATCH // 2}
        line = capsys.readouterr().out
        assert re.fullmatch(rf"{file}: .* MiB at the peak, [\d.e-]+ ms an update\n", line)
        config = resolve(file=str(file), environ={}).config
        assert 1.05 * peak_of(llama, file, capsys) <= float(size.removesuffix("MiB")) * 2**20
        rows, steps = config.accumulation.micro_batch_size or 0, config.accumulation.num_steps
        assert rows * steps * 2 == GLOBAL_BATCH
        choices.append((config.strategy, rows, config.loss, config.activation_checkpointing, line))
    assert choices[0][1:4] == (8, "plain", "off")
    assert len(set(choices)) == 3
    milliseconds = [float(line.split()[-4]) for *_, line in choices]
    assert milliseconds == sorted(milliseconds)


def test_each_choice_has_its_reason(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    fit(llama, "2.2MiB", "--write", str(file), "--mixed_precision", "bf16")
    text = file.read_text()
    assert text.startswith(f"# {llama} with updates of 16 rows of 32 tokens, AdamW, weights in float32:\n# ")
    assert "mixed_precision: bf16  # as it was given\n" in text
    assert re.search(r"strategy: \w+  # the fastest of \d layout\(s\) that fit\n", text)
    assert re.search(r"  num_steps: (\d+)  # 16 rows = \d+ x \1 x 2 ranks that read\n", text)
    assert re.search(r"  micro_batch_size: \d+  # the most that fit; \d+ would need about [\d.]+ MiB\n", text)
    assert re.search(r"\n(loss: chunked|activation_checkpointing: \w+)  # without, one row needs [\d.]+ MiB\n", text)


def test_sizes_that_need_too_much_memory_alone_are_tried_together() -> None:
    asked: list[tuple[int, int]] = []

    def search(flags: dict[str, int]) -> ConfigError:
        asked.append((flags["parallel.tp_size"], flags["parallel.sp_size"]))
        kind = ConfigError if asked[-1][0] == 4 else layouts.DoesNotFitError
        return kind("4 heads, or 9 GiB for one row")

    sizes = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (4, 4)]
    waiting = [{"parallel.tp_size": tp, "parallel.sp_size": sp} for tp, sp in sizes]
    layouts.outcomes(argparse.Namespace(), waiting, search)
    assert asked == sizes[:-2]


@pytest.mark.parametrize(("size", "global_batch"), [("10KB", 2), ("1GiB", 3)])
def test_layouts_that_do_not_fit_are_told_from_those_that_a_model_cannot_take(
    llama: str, size: str, global_batch: int
) -> None:
    words = [llama, "--num_processes", "2", "--sequence", str(LENGTH), "--global_batch", str(global_batch)]
    args = estimate._with_defaults(estimate.estimate_command_parser().parse_args(words))
    options = estimate._layout_options(args)
    search = estimate.Search(args, options, convert_file_size_to_int(size))
    assert isinstance(search({"strategy": "fsdp2", "parallel.dp_shard_size": 2}), layouts.DoesNotFitError)


def test_nothing_that_fits_is_an_error_with_what_each_layout_needs(llama: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no layout of .* fits 10KB a rank; .*:\n  dp_.*: [\d.]+ MiB for one row, with all that saves",
    ):
        fit(llama, "10KB")
    with pytest.raises(ConfigError, match="--global_batch is None; give the rows of an update"):
        estimate.run_estimate([llama, "--num_processes", "2", "--fit", "1GiB"])


TRAINING = f"""
import torch, transformers
from accel_trainer import Trainer, TrainingArguments

rows = [dict(input_ids=torch.full(({LENGTH},), n), labels=torch.full(({LENGTH},), n)) for n in range({GLOBAL_BATCH})]
args = TrainingArguments(OUTPUT, max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{SIZES}))
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
if trainer.args.process_index == 0:
    config = trainer.accelerator.config
    print("FOUND", args.per_device_train_batch_size, args.gradient_accumulation_steps, config.strategy, config.loss,
          config.activation_checkpointing, trainer.state.epoch, trainer.get_num_trainable_parameters())
"""


def test_what_was_written_is_trained_by_launch(llama: str, tmp_path: Path) -> None:
    file, script = tmp_path / "train.yaml", tmp_path / "train.py"
    fit(llama, "3MiB", "--write", str(file))
    config = resolve(file=str(file), environ={}).config
    script.write_text(TRAINING.replace("OUTPUT", repr(str(tmp_path / "out"))))
    code, output = launch(tmp_path, "--config_file", str(file), "--cpu", str(script), timeout=120)
    assert code == 0, output
    rows, steps = config.accumulation.micro_batch_size, config.accumulation.num_steps
    expected = f"FOUND {rows} {steps} {config.strategy} {config.loss} {config.activation_checkpointing} 2"
    assert expected in output  # an epoch is an update of the global batch
