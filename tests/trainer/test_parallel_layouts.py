"""The Trainer on meshes where ranks compute a batch together: numbers, evaluation, resumed runs of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer.errors import ConfigError
from tests.attention_kernels import register_attention_kernels
from tests.cells import beyond
from tests.ranks import RankFailure, preload, run_ranks
from tests.stand_in import ALONE
from tests.trainer_jobs import MULTIPLIES_COPIES

pytestmark = pytest.mark.beside_accelerate

preload("transformers.trainer", "transformers.models.qwen3.modeling_qwen3", "accel_trainer.trainer.trainer")

NUM_SAMPLES = 11


def samples() -> list[dict[str, torch.Tensor]]:
    """Return rows of equal length with unequally many labels."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(3, 64, (NUM_SAMPLES, 10), generator=generator)
    labels = rows.clone()
    for index, row in enumerate(labels):
        row[: index % 4] = -100
    return [{"input_ids": ids, "labels": own} for ids, own in zip(rows, labels, strict=True)]


def build() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 64}
    return Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0, use_cache=False)
    )


def train(directory: str, model: Any, batch: int, sizes: Any, resume: str | None = None, **options: Any) -> Any:
    """Train four updates with saves after each two, or the last two."""
    from accel_trainer import Trainer, TrainingArguments

    args = TrainingArguments(
        directory, use_cpu=True, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, max_steps=4,
        gradient_accumulation_steps=2, learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, save_steps=2,
        report_to=[], disable_tqdm=True, seed=3, parallelism_config=sizes or None, include_num_input_tokens_seen="all",
        **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=samples(), eval_dataset=samples()[:7])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def results_of(trainer: Any) -> dict[str, Any]:
    """Predict and evaluate; return what came out, and what was logged."""
    logs = [(log["step"], log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
    predicted = trainer.predict(samples()[:5])
    metrics = trainer.evaluate()
    return {
        "logs": logs,
        "eval_loss": metrics["eval_loss"],
        "predictions": predicted.predictions.tolist(),
        "tokens": trainer.state.num_input_tokens_seen,
        "batch": trainer.get_total_train_batch_size(trainer.args),
    }


def run(directory: str, batch: int, sizes: Any, resume: str | None = None, **options: Any) -> dict[str, Any]:
    return results_of(train(directory, build(), batch, sizes, resume, **options))


def both(directory: str, sizes: dict[str, Any], resume: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run on a mesh, and one that goes on from one process's checkpoint; what began with sp has cp then."""
    batch = 2 // sizes.get("dp_shard_size", 1)
    trained = run(directory, batch, sizes, **options)
    kernels = register_attention_kernels()
    resumed = run(f"{directory}-resumed", batch, {"cp_size": 2} if "sp_size" in sizes else sizes, resume, **options)
    del kernels
    return trained, resumed


LAYOUTS = {
    "tp": {"tp_size": 2},
    "tp x shards": {"tp_size": 2, "dp_shard_size": 2, "loss_parallel": True},
    "sp": {"sp_size": 2},
    "one process": {},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    directory = str(tmp_path_factory.mktemp("alone"))
    return run_ranks(run, 1, directory, 2, None)[0], directory


# Ranks that read the same rows are those of sp, too.
@pytest.mark.parametrize("name", [beyond(name) if name == "tp" else name for name in LAYOUTS])
def test_a_run_on_a_mesh_is_that_of_one_process(name: str, alone: tuple[dict[str, Any], str], tmp_path: Path):
    expected, directory = alone
    world_size = (2 if LAYOUTS[name] else 1) * LAYOUTS[name].get("dp_shard_size", 1)
    options: dict[str, Any] = {} if LAYOUTS[name] else {"fsdp": "full_shard", "fsdp_config": {}, "env": ALONE}
    resume = f"{directory}/checkpoint-2"
    if "sp_size" in LAYOUTS[name] and MULTIPLIES_COPIES:
        with pytest.raises(RankFailure, match="multiplies losses by the number of processes, also of those that share"):
            run_ranks(both, world_size, str(tmp_path / "run"), LAYOUTS[name], resume, timeout=150)
        return
    runs = run_ranks(both, world_size, str(tmp_path / "run"), LAYOUTS[name], resume, timeout=150, **options)
    for trained, resumed in runs:
        for found in (trained, resumed):
            assert (found["tokens"], found["batch"]) == (expected["tokens"], expected["batch"])
            assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)
            assert torch.allclose(torch.tensor(found["predictions"]), torch.tensor(expected["predictions"]), atol=1e-4)
        flat = [number for log in trained["logs"] for number in log]
        assert flat == pytest.approx([number for log in expected["logs"] for number in log], rel=2e-5)
        assert [log[0] for log in resumed["logs"]][-2:] == [3, 4]
    again = run_ranks(run, 1, str(tmp_path / "again"), 2, None, f"{tmp_path}/run/checkpoint-2")[0]
    flat = [number for log in again["logs"][-2:] for number in log]
    assert flat == pytest.approx([number for log in expected["logs"][-2:] for number in log], rel=2e-5)


def refuse_noise(directory: str) -> str:
    with pytest.raises(ConfigError) as refused:
        train(directory, build(), 2, {"sp_size": 2}, neftune_noise_alpha=5.0)
    return str(refused.value)


def test_noise_that_is_sized_by_the_length_of_a_sequence_is_refused_for_slices(tmp_path: Path):
    for message in run_ranks(refuse_noise, 2, str(tmp_path)):
        assert "neftune_noise_alpha=5.0 is sized by the length of a sequence, of which each rank has a slice" in message
