"""TRL's Trainers on accel_trainer: stock's numbers on one process, and the same on ranks, saved and resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel_trainer
from tests.cells import crossed
from tests.ecosystem.text_jobs import (
    assert_equal,
    build_tokenizer,
    numbers_of,
    preferences,
    quiet,
    save_llama,
    texts,
)
from tests.ranks import preload
from tests.trainer_jobs import on_ranks, strategy_arguments

trl = pytest.importorskip("trl")

preload("trl")


@dataclass
class SFTArguments(trl.SFTConfig, accel_trainer.TrainingArguments):
    pass


class SFTTrainer(trl.SFTTrainer, accel_trainer.Trainer):
    pass


@dataclass
class RewardArguments(trl.RewardConfig, accel_trainer.TrainingArguments):
    pass


class RewardTrainer(trl.RewardTrainer, accel_trainer.Trainer):
    pass


@dataclass
class DPOArguments(trl.DPOConfig, accel_trainer.TrainingArguments):
    pass


class DPOTrainer(trl.DPOTrainer, accel_trainer.Trainer):
    pass


@dataclass
class GRPOArguments(trl.GRPOConfig, accel_trainer.TrainingArguments):
    pass


class GRPOTrainer(trl.GRPOTrainer, accel_trainer.Trainer):
    pass


OURS = {
    "sft": (SFTTrainer, SFTArguments), "reward": (RewardTrainer, RewardArguments),
    "dpo": (DPOTrainer, DPOArguments), "grpo": (GRPOTrainer, GRPOArguments),
}  # fmt: skip
STOCK = {
    "sft": (trl.SFTTrainer, trl.SFTConfig), "reward": (trl.RewardTrainer, trl.RewardConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig), "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL asks for this variable; huggingface_hub has read its own when it was imported."""
    monkeypatch.setenv("CI", "1")


def count_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def build(kind: str, folder: str, *, is_stock: bool = False, batch_size: int = 2, **changes: Any) -> Any:
    import transformers

    trainer_class, arguments_class = (STOCK if is_stock else OURS)[kind]
    options: dict[str, Any] = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "bf16": False, "logging_steps": 1, "max_steps": 4,
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-3,
        "per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size, **changes,
    }  # fmt: skip
    if kind == "grpo":
        # A reference model, from the path in the model's configuration; its evaluation generates, too.
        options |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, "eval_strategy": "no"}
    model_class = transformers.AutoModelForSequenceClassification if kind == "reward" else None
    model = (model_class or transformers.AutoModelForCausalLM).from_pretrained(str(Path(folder).parent / "model"))
    data: dict[str, Any] = {"train_dataset": preferences(16), "eval_dataset": preferences(5, 3)}
    if kind == "sft":
        data = {"train_dataset": texts(16), "eval_dataset": texts(5, 3)}
    if kind == "grpo":
        data = {"train_dataset": preferences(16).select_columns(["prompt"]), "reward_funcs": count_letters}
    args = arguments_class(output_dir=folder, **options)
    return trainer_class(model=model, args=args, processing_class=build_tokenizer(), **data)


def run(
    kind: str, folder: str, strategy: str = "single", *, resumes: bool = True, **options: Any
) -> list[dict[str, Any]]:
    """Train four updates, and once more from the second; return the numbers of both."""
    quiet()
    results = []
    for checkpoint in (None, str(Path(folder, "checkpoint-2")))[: 1 + resumes]:
        trainer = build(kind, folder, **strategy_arguments(strategy), **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        results.append(numbers_of(trainer, ("loss", "grad_norm", "eval_loss")))
    return results


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save_llama(str(tmp_path / "model"), is_classifier=request.node.callspec.params["kind"] == "reward")
    return tmp_path


@pytest.mark.parametrize("kind", sorted(OURS))
def test_one_process_gives_the_numbers_of_stock_and_resumes(folder: Path, kind: str):
    options = {"eval_loss_weighting": "batch"} if kind == "sft" else {}  # as stock weighs batches
    ours, resumed = run(kind, str(folder / "ours"), **options)
    (stock,) = run(kind, str(folder / "stock"), is_stock=True, resumes=False)

    assert ours["ours"].startswith("accel_trainer")
    assert not stock["ours"].startswith("accel_trainer")
    assert_equal(ours, stock, tolerance=1e-6)
    assert_equal(resumed, ours)
    assert (folder / "ours" / "checkpoint-4" / "manifest.json").is_file()
    assert (folder / "ours" / "README.md").is_file()  # TRL's own, of its _save_checkpoint


def test_packing_in_trls_arguments_is_trls_own(tmp_path: Path):
    save_llama(str(tmp_path / "model"))
    options = {"packing": True, "max_length": 64}
    ours, resumed = run("sft", str(tmp_path / "ours"), eval_loss_weighting="batch", **options)
    (stock,) = run("sft", str(tmp_path / "stock"), is_stock=True, resumes=False, **options)

    assert_equal(ours, stock, tolerance=1e-6)
    assert_equal(resumed, ours)


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "strategy"), crossed(sorted(OURS), ["ddp", "fsdp"]))
def test_two_ranks_give_the_numbers_of_one_process_and_resume(folder: Path, kind: str, strategy: str):
    found = on_ranks(strategy, run, kind, str(folder / "ranks"))
    for whole, resumed in found:
        assert_equal(resumed, whole)
    if kind != "grpo":  # its ranks draw their own completions
        (reference,) = run(kind, str(folder / "single"), batch_size=4, resumes=False)
        for name in ("loss", "grad_norm", "eval_loss"):
            np.testing.assert_allclose(found[0][0][name], reference[name], rtol=1e-5)
