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
from safetensors import safe_open
from transformers import GPT2LMHeadModel, LlamaForCausalLM, TrainerCallback

from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.interop.huggingface import export_hf_fsdp
from accel_trainer.data.plan import permutation
from accel_trainer.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from tests.ranks import run_ranks
from tests.trainer_jobs import SaveAt, TokenDataset, build_trainer, summary, train

pytestmark = [
    pytest.mark.beside_accelerate,
    pytest.mark.timeout(240),
]
TWO_RANKS = ["ddp", "fsdp", "fsdp_sharded"]
STRATEGIES = ["single", *TWO_RANKS]
CROSSINGS = [("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp_sharded", "ddp"), ("fsdp", "fsdp_sharded")]
# 5 batches of a rank, windows of 2 batches: 3 updates an epoch, the last of one batch; dropout draws random numbers.
RUN: dict[str, Any] = {
    "model": "gpt2", "dropout": 0.2, "samples": 20, "num_train_epochs": 2, "gradient_accumulation_steps": 2,
}  # fmt: skip
PLAIN: dict[str, Any] = {**RUN, "model": "llama", "dropout": 0.0, "num_train_epochs": 1}
BEST: dict[str, Any] = {
    "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 3,
    "samples": 8, "learning_rate": 0.05,
}  # fmt: skip
ALONE: dict[str, Any] = {"save_only_model": True, "save_total_limit": 1}
SAVE_ALONE = ["single", "fsdp_sharded"]
"""Strategies whose runs of which the best model is loaded save weights alone."""


class LoseBest(TrainerCallback):
    """Other ranks do not see the directory of the best checkpoint, as on a disk that shows it late."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            state.best_model_checkpoint = None


def run(directory: Path, strategy: str, resume: Path | None = None, **options: Any) -> dict[str, Any]:
    size = 4 if strategy == "single" else 2
    trainer = build_trainer(directory, strategy=strategy, per_device_train_batch_size=size, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return summary(trainer)


def write(folder: Path, strategies: list[str]) -> dict[str, Any]:
    """The runs that write checkpoints, each strategy's in a folder of its own."""
    found = {}
    for strategy in strategies:
        own, size = folder / strategy, 4 if strategy == "single" else 2
        for name, options in (("exact", RUN), ("plain", PLAIN)):
            trainer = build_trainer(
                own / name, strategy=strategy, per_device_train_batch_size=size, options={"callbacks": [SaveAt(1, 3)]},
                **options,
            )  # fmt: skip
            trainer.train()
            if name == "exact":
                trainer.save_model(str(own / "saved"))
            found[strategy, name] = summary(trainer)
        best = {**BEST, **(ALONE if strategy in SAVE_ALONE else {})}
        found[strategy, "best"] = run(own / "best", strategy, options={"callbacks": [LoseBest]}, **best)
    return found


def resume(folder: Path, strategies: list[str]) -> dict[str, Any]:
    return {
        (strategy, step): run(
            folder / "again", strategy, folder / strategy / "exact" / f"checkpoint-{step}", **RUN
        )
        for strategy in strategies
        for step in (1, 3)
    }  # fmt: skip


def resume_on_two(folder: Path) -> dict[str, Any]:
    found = resume(folder, TWO_RANKS)
    for first, second in CROSSINGS:
        found[first, second] = run(folder / "again", second, folder / first / "plain" / "checkpoint-1", **PLAIN)
    for name in ("stock-full", "stock-sharded"):
        found[name] = run(folder / "again", "fsdp", folder / name, **PLAIN)
    for name in ("no-weights", "other-groups", "nowhere"):
        found[name] = refusal(run, folder / "again", "fsdp", folder / name, **PLAIN)
    return found


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Any]:
    """What one process has written."""
    return write(folder, ["single"])


@pytest.fixture(scope="module")
def on_two(folder) -> list[dict[str, Any]]:
    """What two processes have written, by rank."""
    return run_ranks(write, 2, folder, TWO_RANKS, timeout=200)


@pytest.fixture(scope="module")
def written(alone, on_two) -> dict[str, Any]:
    return alone | on_two[0]


@pytest.fixture(scope="module")
def resumed_on_two(folder, on_two) -> list[dict[str, Any]]:
    """What others resume from it, and what they say of what they cannot."""
    plain = folder / "fsdp" / "plain" / "checkpoint-1"
    stock_checkpoint(plain, folder / "stock-full", sharded=False)
    stock_checkpoint(plain, folder / "stock-sharded", sharded=True)
    without_manifest(Path(shutil.copytree(plain, folder / "no-weights")))
    (folder / "no-weights" / "model.safetensors").unlink()
    without_manifest(Path(shutil.copytree(folder / "ddp" / "plain" / "checkpoint-1", folder / "other-groups")))
    path = folder / "other-groups" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    state["param_groups"][0]["params"].pop()
    torch.save(state, path)
    return run_ranks(resume_on_two, 2, folder, timeout=200)


def stored_weights(directory: Any) -> dict[str, np.ndarray]:
    model = LlamaForCausalLM.from_pretrained(directory)
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.mark.multirank
def test_resuming_inside_and_at_the_end_of_an_epoch_continues_exactly(folder, written, resumed_on_two):
    found = resumed_on_two[0] | resume(folder, ["single"])
    for strategy in STRATEGIES:
        whole = written[strategy, "exact"]
        for step in (1, 3):
            assert found[strategy, step]["losses"] == whole["losses"], (strategy, step)
            np.testing.assert_equal(found[strategy, step]["weights"], whole["weights"])


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_files_are_upstreams_and_each_is_written_once(folder, written, strategy):
    checkpoint = folder / strategy / "plain" / "checkpoint-3"
    rng = {"rng_state.pth"} if strategy == "single" else {"rng_state_0.pth", "rng_state_1.pth"}
    shards = {"optimizer.json", *(f"optimizer.optimizer.0000{rank}.safetensors" for rank in range(2))}
    optimizer = {"fsdp": {"optimizer.bin"}, "fsdp_sharded": shards}.get(strategy, {"optimizer.pt"})
    assert set(os.listdir(checkpoint)) == {
        "config.json", "generation_config.json", "model.safetensors", "scheduler.pt", "trainer_state.json",
        "training_args.bin", *optimizer, *rng, "manifest.json", "COMMITTED",
    }  # fmt: skip
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    np.testing.assert_equal(stored_weights(checkpoint), written[strategy, "plain"]["weights"])


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_save_model_writes_tied_weights_once(folder, written, strategy):
    with safe_open(folder / strategy / "saved" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    model = GPT2LMHeadModel.from_pretrained(folder / strategy / "saved")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (folder / strategy / "saved" / "training_args.bin").exists()


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_model_is_loaded_at_the_end(folder, written, on_two, strategy):
    result = written[strategy, "best"]
    if strategy != "single":
        assert on_two[1][strategy, "best"]["best"] == result["best"]

    best = min(range(3), key=lambda epoch: result["eval_losses"][epoch])
    assert result["best"] == str(folder / strategy / "best" / f"checkpoint-{(best + 1) * 2}")
    np.testing.assert_equal(result["weights"], stored_weights(result["best"]))


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", SAVE_ALONE)
def test_weights_alone_and_only_the_last_and_the_best_are_kept(folder, written, strategy):
    best = written[strategy, "best"]["best"]

    kept = sorted(path.name for path in (folder / strategy / "best").glob("checkpoint-*"))
    assert Path(best).name in kept
    assert len(kept) <= 2
    files = set(os.listdir(best))
    assert "model.safetensors" in files
    assert not files & {"optimizer.pt", "optimizer.bin", "optimizer.json", "scheduler.pt"}


def test_resuming_from_weights_alone_says_that_the_optimizer_is_new(tmp_path, caplog):
    train(tmp_path, strategy="single", save_strategy="steps", save_steps=2, save_only_model=True)

    result = train(tmp_path / "again", str(tmp_path / "checkpoint-2"), strategy="single")

    assert "holds no optimizer and scheduler state" in caplog.text
    assert result["step"] == 8


@pytest.mark.multirank
def test_another_strategy_resumes_from_a_checkpoint(written, resumed_on_two):
    for first, second in CROSSINGS:
        losses = resumed_on_two[0][first, second]["losses"]
        np.testing.assert_allclose(losses, written[first, "plain"]["losses"], rtol=1e-5, err_msg=f"{first} {second}")


@pytest.mark.multirank
def test_one_process_resumes_what_two_sharded_ones_saved(folder, written):
    resumed = run(folder / "again", "single", folder / "fsdp" / "plain" / "checkpoint-1", **PLAIN)

    np.testing.assert_allclose(resumed["losses"], written["fsdp", "plain"]["losses"], rtol=1e-5)


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
            state = torch.load(target / "optimizer.bin", weights_only=True)
            dcp.save({"optimizer": state}, storage_writer=dcp.FileSystemWriter(target / "optimizer_0"))
        (target / "optimizer.bin").unlink()
    else:
        torch.save(weights, target / "pytorch_model_fsdp.bin")


@pytest.mark.multirank
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_checkpoint_of_the_stock_trainer_is_read(written, resumed_on_two, form):
    assert resumed_on_two[0][f"stock-{form}"]["losses"] == written["fsdp", "plain"]["losses"]


@pytest.mark.multirank
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_one_process_reads_a_checkpoint_of_the_stock_trainer_under_fsdp(folder, written, tmp_path, form):
    stock_checkpoint(folder / "fsdp" / "plain" / "checkpoint-1", tmp_path / "stock" / "checkpoint-1", form == "sharded")
    resumed = run(tmp_path / "again", "single", tmp_path / "stock" / "checkpoint-1", **PLAIN)
    np.testing.assert_allclose(resumed["losses"], written["fsdp", "plain"]["losses"], rtol=1e-5)


@pytest.mark.multirank
def test_the_stock_trainer_is_given_what_it_resumes_from(folder, on_two, tmp_path):
    source = folder / "fsdp" / "exact" / "checkpoint-1"
    names = export_hf_fsdp(source, tmp_path / "full", is_sharded=False)
    assert {"pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "trainer_state.json", "rng_state_1.pth"} <= {
        *names
    }
    assert not {"model.safetensors", "manifest.json", "COMMITTED"} & {*names}
    weights = torch.load(tmp_path / "full" / "pytorch_model_fsdp.bin", weights_only=True)
    model = GPT2LMHeadModel.from_pretrained(source)
    assert weights.keys() == model.state_dict().keys(), "tied weights under both names"
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    optimizer = torch.load(tmp_path / "full" / "optimizer.bin", weights_only=True)
    saved = torch.load(source / "optimizer.bin", weights_only=True)
    torch.testing.assert_close(optimizer["state"], saved["state"], rtol=0, atol=0)

    # The form is that of the run which resumes, whatever the one that saved has written.
    sharded = folder / "fsdp_sharded" / "exact" / "checkpoint-1"
    export_hf_fsdp(source, tmp_path / "from_full", is_sharded=True)
    export_hf_fsdp(sharded, tmp_path / "from_sharded", is_sharded=True)
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        found, same = (DcpDirectory(tmp_path / kind / name) for kind in ("from_full", "from_sharded"))
        assert found.tensors.keys() == same.tensors.keys()
        for key in found.tensors:
            assert torch.equal(found[key], same[key]), key

    with pytest.raises(IncompatibleCheckpointError, match="numbers its parameters, as on one process and with DDP"):
        export_hf_fsdp(folder / "ddp" / "exact" / "checkpoint-1", tmp_path / "ddp", is_sharded=True)


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
def test_a_directory_without_weights_is_no_checkpoint_on_any_rank(folder, tmp_path, resumed_on_two):
    checkpoint = Path(shutil.copytree(folder / "fsdp" / "plain" / "checkpoint-1", tmp_path / "checkpoint-3"))
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model.safetensors is missing; the checkpoint is incomplete"):
        run(tmp_path / "again", "single", checkpoint, **PLAIN)

    for found in resumed_on_two:
        assert "Can't find a valid checkpoint at" in found["no-weights"]
        assert "nowhere, which does not exist" in found["nowhere"]
    with pytest.raises(ValueError, match=r"Can't find a valid checkpoint at"):
        run(tmp_path / "again", "single", folder / "no-weights", **PLAIN)


@pytest.mark.multirank
def test_an_optimizer_of_other_groups_does_not_load(resumed_on_two):
    own, told = (found["other-groups"] for found in resumed_on_two)
    assert own.startswith("IncompatibleCheckpointError: ")
    assert "was saved for parameter groups of" in own
    assert "rank 0 failed in load_optimizer: " in told
