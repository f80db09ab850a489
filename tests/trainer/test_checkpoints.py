"""Checkpoints: upstream's files, written once, loadable by from_pretrained, exact to resume from."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from accel_trainer.data.plan import permutation
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, IncompatibleCheckpointError
from tests.ranks import RankFailure
from tests.trainer_jobs import TokenDataset, build_trainer, on_ranks, summary, train

STRATEGIES = ["single", "ddp", "fsdp", "fsdp_sharded"]
# 13 batches of a rank, windows of 2 batches: 7 updates an epoch, the last of one batch; dropout draws random numbers.
RUN: dict[str, Any] = {
    "model": "gpt2",
    "dropout": 0.2,
    "samples": 52,
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
}


def batch_size(strategy: str) -> int:
    return 4 if strategy == "single" else 2


def run(output_dir: Path, strategy: str, resume: str | None = None, **changes: Any) -> list[dict[str, Any]]:
    options = {**RUN, "per_device_train_batch_size": batch_size(strategy), **changes}
    return on_ranks(strategy, train, str(output_dir), resume, **options)


def assert_equal_weights(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_array_equal(values, right[name], err_msg=name)


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("step", [3, 7])
def test_resuming_inside_and_at_the_end_of_an_epoch_continues_exactly(tmp_path, strategy, step):
    whole = run(tmp_path, strategy, save_strategy="steps", save_steps=step)[0]

    resumed = run(tmp_path / "again", strategy, str(tmp_path / f"checkpoint-{step}"))[0]

    assert resumed["losses"] == whole["losses"]
    assert_equal_weights(resumed["weights"], whole["weights"])


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_files_are_upstreams_and_each_is_written_once(tmp_path, strategy):
    final = run(tmp_path, strategy, save_strategy="steps", save_steps=7, model="llama", num_train_epochs=1)[0]

    files = set(os.listdir(tmp_path / "checkpoint-7"))
    rng = {"rng_state.pth"} if strategy == "single" else {"rng_state_0.pth", "rng_state_1.pth"}
    optimizer = {"fsdp": "optimizer.bin", "fsdp_sharded": "optimizer_0"}.get(strategy, "optimizer.pt")
    assert files == {
        "config.json", "generation_config.json", "model.safetensors", "scheduler.pt", "trainer_state.json",
        "training_args.bin", optimizer, *rng, "manifest.json", "COMMITTED",
    }  # fmt: skip
    assert json.loads((tmp_path / "checkpoint-7" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-7").state_dict()
    assert_equal_weights({name: value.numpy() for name, value in loaded.items()}, final["weights"])


def failing(output_dir: str, strategy: str) -> None:
    trainer = build_trainer(output_dir, strategy=strategy, save_strategy="steps", save_steps=2)
    if trainer.args.process_index == 1:
        trainer._save_rng_state = fail
    trainer.train()


def fail(directory: str) -> None:
    raise OSError("no space left for the random streams")


@pytest.mark.multirank
def test_a_checkpoint_appears_when_every_rank_has_written_its_part(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "of_an_earlier_run.txt").touch()

    with pytest.raises(RankFailure, match="no space left for the random streams") as failure:
        on_ranks("ddp", failing, str(tmp_path))

    assert len(failure.value.failures) == 2
    assert os.listdir(tmp_path) == ["checkpoint-2"]
    assert os.listdir(tmp_path / "checkpoint-2") == ["of_an_earlier_run.txt"]
    train(tmp_path, strategy="single", save_strategy="steps", save_steps=2)
    assert "of_an_earlier_run.txt" not in os.listdir(tmp_path / "checkpoint-2")


def saved_model(output_dir: str, strategy: str) -> None:
    trainer = build_trainer(output_dir, strategy=strategy, model="gpt2")
    trainer.train()
    trainer.save_model()


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_save_model_writes_tied_weights_once(tmp_path, strategy):
    on_ranks(strategy, saved_model, str(tmp_path))

    from safetensors import safe_open
    from transformers import GPT2LMHeadModel

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (tmp_path / "training_args.bin").exists()


BEST: dict[str, Any] = {
    "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 3,
    "samples": 16, "learning_rate": 0.05,
}  # fmt: skip


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_model_is_loaded_at_the_end(tmp_path, strategy):
    result = on_ranks(strategy, train, str(tmp_path), per_device_train_batch_size=batch_size(strategy), **BEST)[0]

    best = min(range(3), key=lambda epoch: result["eval_losses"][epoch])
    assert result["best"] == str(tmp_path / f"checkpoint-{(best + 1) * 4}")
    stored = LlamaForCausalLM.from_pretrained(result["best"]).state_dict()
    assert_equal_weights(result["weights"], {name: value.numpy() for name, value in stored.items()})


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["single", "fsdp_sharded"])
def test_weights_alone_and_only_the_last_and_the_best_are_kept(tmp_path, strategy):
    options = {
        **BEST,
        "save_only_model": True,
        "save_total_limit": 1,
        "per_device_train_batch_size": batch_size(strategy),
    }

    result = on_ranks(strategy, train, str(tmp_path), **options)[0]

    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert Path(result["best"]).name in kept
    assert len(kept) <= 2
    files = set(os.listdir(result["best"]))
    assert "model.safetensors" in files
    assert not files & {"optimizer.pt", "optimizer.bin", "optimizer_0", "scheduler.pt"}


def test_resuming_from_weights_alone_says_that_the_optimizer_is_new(tmp_path, caplog):
    train(tmp_path, strategy="single", save_strategy="steps", save_steps=2, save_only_model=True)

    result = train(tmp_path / "again", str(tmp_path / "checkpoint-2"), strategy="single")

    assert "holds no optimizer and scheduler state" in caplog.text
    assert result["step"] == 8


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("first", "second"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp_sharded", "ddp"), ("fsdp", "fsdp_sharded")]
)
def test_another_strategy_resumes_from_a_checkpoint(tmp_path, first, second):
    options = {"model": "llama", "dropout": 0.0}
    whole = run(tmp_path, first, save_strategy="steps", save_steps=3, **options)[0]

    resumed = run(tmp_path / "again", second, str(tmp_path / "checkpoint-3"), **options)[0]

    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=1e-5)


@pytest.mark.multirank
def test_one_process_resumes_what_two_sharded_ones_saved(tmp_path):
    options = {"model": "llama", "dropout": 0.0, "samples": 48}
    whole = run(tmp_path, "fsdp", save_strategy="steps", save_steps=3, **options)[0]

    resumed = run(tmp_path / "again", "single", str(tmp_path / "checkpoint-3"), **options)[0]

    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=1e-5)


def without_manifest(checkpoint: Path) -> None:
    """Leave what the stock Trainer would have written."""
    for name in ("manifest.json", "COMMITTED"):
        (checkpoint / name).unlink()


def stock_checkpoint(source: Path, target: Path, sharded: bool) -> None:
    """Turn our checkpoint into what the stock Trainer writes under FSDP."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    shutil.copytree(source, target)
    without_manifest(target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    if sharded:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is no process group here
            dcp.save({"model": weights}, storage_writer=dcp.FileSystemWriter(target / "pytorch_model_fsdp_0"))
    else:
        torch.save(weights, target / "pytorch_model_fsdp.bin")


@pytest.mark.multirank
@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_of_the_stock_trainer_is_read(tmp_path, sharded):
    options = {"model": "llama", "dropout": 0.0}
    whole = run(tmp_path, "fsdp", save_strategy="steps", save_steps=3, **options)[0]
    stock_checkpoint(tmp_path / "checkpoint-3", tmp_path / "stock-3", sharded)

    resumed = run(tmp_path / "again", "fsdp", str(tmp_path / "stock-3"), **options)[0]

    assert resumed["losses"] == whole["losses"]


def test_an_interrupted_run_resumes_from_the_last_checkpoint(tmp_path):
    whole = train(tmp_path / "whole", strategy="single", samples=13, gradient_accumulation_steps=3, num_train_epochs=3)
    trainer = build_trainer(
        tmp_path, samples=13, gradient_accumulation_steps=3, num_train_epochs=3, save_strategy="steps", save_steps=1
    )

    class Stop(Exception):
        pass

    trainer.callback_handler.on_step_begin = interrupt_after(trainer, 4, Stop)
    with pytest.raises(Stop):
        trainer.train()
    resumed = build_trainer(
        tmp_path, samples=13, gradient_accumulation_steps=3, num_train_epochs=3, save_strategy="steps", save_steps=1
    )
    resumed.train(resume_from_checkpoint=True)

    assert summary(resumed)["losses"] == whole["losses"]


def interrupt_after(trainer: Any, step: int, error: type[Exception]) -> Any:
    begin = trainer.callback_handler.on_step_begin

    def on_step_begin(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == step:
            raise error
        return begin(*args, **kwargs)

    return on_step_begin


def test_ignore_data_skip_begins_the_epoch_again(tmp_path):
    train(tmp_path, strategy="single", save_strategy="steps", save_steps=3)
    trainer = build_trainer(tmp_path / "again", ignore_data_skip=True)
    read: list[int] = []
    original = TokenDataset.__getitem__
    trainer.train_dataset.__class__ = type(
        "Recorded", (TokenDataset,), {"__getitem__": lambda self, index: read.append(index) or original(self, index)}
    )

    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    assert read[:4] == permutation(32, 42, 0)[:4].tolist()


@pytest.mark.multirank
def test_a_directory_without_weights_is_no_checkpoint_on_any_rank(tmp_path):
    train(tmp_path, strategy="single", save_strategy="steps", save_steps=3)
    (tmp_path / "checkpoint-3" / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model.safetensors is missing; the checkpoint is incomplete"):
        run(tmp_path / "again", "single", str(tmp_path / "checkpoint-3"), model="llama")
    without_manifest(tmp_path / "checkpoint-3")

    with pytest.raises(RankFailure, match=r"Can't find a valid checkpoint at") as failure:
        run(tmp_path / "again", "fsdp", str(tmp_path / "checkpoint-3"), model="llama")
    assert len(failure.value.failures) == 2
    with pytest.raises(ValueError, match=r"Can't find a valid checkpoint at"):
        run(tmp_path / "again", "single", str(tmp_path / "checkpoint-3"), model="llama")


@pytest.mark.multirank
def test_an_optimizer_of_other_groups_does_not_load(tmp_path):
    options = {"model": "llama", "dropout": 0.0}
    run(tmp_path, "ddp", save_strategy="steps", save_steps=3, **options)
    without_manifest(tmp_path / "checkpoint-3")
    path = tmp_path / "checkpoint-3" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    state["param_groups"][0]["params"].pop()
    torch.save(state, path)

    with pytest.raises(RankFailure, match=r"was saved for parameter groups of"):
        run(tmp_path / "again", "fsdp", str(tmp_path / "checkpoint-3"), **options)
    assert issubclass(IncompatibleCheckpointError, AccelTrainerError)


def failing_between(output_dir: str, strategy: str) -> None:
    trainer = build_trainer(output_dir, strategy=strategy, save_strategy="steps", save_steps=2)
    save_model = trainer.save_model

    def save_and_more(directory: str, _internal_call: bool = False) -> None:
        save_model(directory, _internal_call)
        if trainer.is_world_process_zero():
            fail(directory)

    trainer.save_model = save_and_more
    trainer.train()


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_sharded"])
def test_no_rank_waits_for_one_that_could_not_write_the_model(tmp_path, strategy):
    with pytest.raises(
        RankFailure, match=r"rank 0 failed in save of .*no space left for the random streams"
    ) as failure:
        on_ranks(strategy, failing_between, str(tmp_path))

    assert len(failure.value.failures) == 2
    assert os.listdir(tmp_path) == []
