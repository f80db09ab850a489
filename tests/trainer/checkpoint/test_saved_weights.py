"""Weights in a Trainer's files: gathered into no rank's memory, and read back under whatever names they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import MixtralForCausalLM

from tests.ranks import run_ranks
from tests.strategy_configs import needs_deepspeed
from tests.trainer_jobs import (
    TokenDataset,
    arguments,
    build_model,
    build_trainer,
    strategy_arguments,
    summary,
    weights_of,
)

pytestmark = pytest.mark.beside_accelerate


def is_in_a_file(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith("(deleted)")  # it has no name
    return False


def save(folder: str) -> tuple[list[str], int]:
    trainer = build_trainer(folder, strategy="fsdp", model="gpt2")
    trainer.evaluate()  # lays the model out
    handed: dict[str, Tensor] = {}
    write = trainer._save

    def look(output_dir: str, state_dict: dict[str, Any]) -> None:
        handed.update(state_dict)
        write(output_dir, state_dict=state_dict)

    trainer._save = look
    trainer.save_model(f"{folder}/new/model")
    return [name for name, tensor in handed.items() if not is_in_a_file(tensor)], len(handed)


def resume(folder: str, strategy: str) -> dict[str, Any]:
    """Train a mixture of experts, resume it in the middle, and load the weights of the middle as the best ones."""
    options: dict[str, Any] = {"strategy": strategy, "model": "mixtral", "save_strategy": "steps", "save_steps": 2}
    options |= {"samples": 16, "per_device_train_batch_size": 4 if strategy == "single" else 2}
    whole = build_trainer(folder, **options)
    whole.train()
    checkpoint = f"{folder}/checkpoint-2"
    again = build_trainer(f"{folder}/again", **options)
    again.train(resume_from_checkpoint=checkpoint)
    found = {"whole": summary(whole), "again": summary(again)}
    again.state.best_model_checkpoint = checkpoint
    again._load_best_model()
    return {**found, "best": weights_of(again)}


def check_resumed(found: dict[str, Any], checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    expected = MixtralForCausalLM.from_pretrained(checkpoint).state_dict()
    assert not set(stored) <= set(expected)  # each expert has a name there
    assert found["again"]["losses"] == pytest.approx(found["whole"]["losses"], rel=1e-6)
    for name, value in found["whole"]["weights"].items():
        np.testing.assert_allclose(found["again"]["weights"][name], value, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found["best"][name], expected[name].numpy(), err_msg=name)


def train_compiled(folder: str, strategy: str, checkpoint: str | None = None) -> dict[str, Any]:
    """Train a model with a compiled layer, or resume it."""
    size = 4 if strategy == "single" else 2
    trainer = build_trainer(
        folder, strategy=strategy, samples=16, per_device_train_batch_size=size, save_strategy="steps", save_steps=2
    )
    layers = trainer.model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    trainer.train(resume_from_checkpoint=checkpoint)
    return summary(trainer)


def resume_compiled(folder: str, strategy: str) -> list[dict[str, Any]]:
    whole = train_compiled(f"{folder}/whole", strategy)
    return [whole, train_compiled(f"{folder}/again", strategy, f"{folder}/whole/checkpoint-2")]


def test_compiled_layers_are_resumed(tmp_path: Path):
    whole, again = resume_compiled(str(tmp_path), "single")
    assert again["losses"] == whole["losses"]
    np.testing.assert_equal(again["weights"], whole["weights"])


@pytest.mark.multirank
def test_compiled_layers_are_resumed_in_shards(tmp_path: Path):
    for whole, again in run_ranks(resume_compiled, 2, str(tmp_path), "fsdp"):
        assert again["losses"] == whole["losses"]
        np.testing.assert_equal(again["weights"], whole["weights"])
    alone = train_compiled(str(tmp_path / "alone"), "single", str(tmp_path / "whole" / "checkpoint-2"))
    assert alone["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    sharded = run_ranks(train_compiled, 2, str(tmp_path / "2"), "fsdp", str(tmp_path / "alone" / "checkpoint-4"))
    np.testing.assert_equal(sharded[0]["weights"], alone["weights"])


def train_mixture(folder: str, checkpoint: str | None = None) -> dict[str, Any]:
    trainer = build_trainer(folder, model="mixtral", samples=16, save_strategy="steps", save_steps=2, bf16=True)
    trainer.model.bfloat16()
    for name, parameter in trainer.model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    trainer.train(resume_from_checkpoint=checkpoint)
    return {name: value.float() for name, value in trainer.model.state_dict().items()}


def test_a_mixture_in_two_dtypes_keeps_both_when_it_is_resumed(tmp_path: Path):
    whole = train_mixture(str(tmp_path / "whole"))
    again = train_mixture(str(tmp_path / "again"), str(tmp_path / "whole" / "checkpoint-2"))
    torch.testing.assert_close(again, whole, rtol=0, atol=0)


class HandWritten(nn.Module):
    """A language model of no library, whose head is its embedding."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.mix = nn.Linear(16, 16)
        if strategy in ("single", "ddp"):  # the others take contiguous parameters alone
            self.mix.weight = nn.Parameter(self.mix.weight.detach().t())
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.mix(self.embedding(input_ids)))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def train_hand_written(folder: str, strategy: str, resume_at: int | None = None, **changes: Any) -> dict[str, Any]:
    from accel_trainer.trainer import Trainer

    args = arguments(
        folder, save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True, num_train_epochs=2,
        **strategy_arguments(strategy), **changes,
    )  # fmt: skip
    data = TokenDataset(16)
    trainer = Trainer(HandWritten(strategy), args, train_dataset=data, eval_dataset=data)
    trainer.train(None if resume_at is None else f"{folder}/checkpoint-{resume_at}")
    is_tied = trainer.model.head.weight is trainer.model.embedding.weight
    return {**summary(trainer), "is_tied": is_tied}


def resume_hand_written(folder: str, strategy: str) -> list[dict[str, Any]]:
    whole = train_hand_written(folder, strategy)
    return [whole, train_hand_written(folder, strategy, whole["step"] // 2)]


JOBS = {"one process": ["single"], "two ranks": ["ddp", "fsdp"], "deepspeed": ["zero3"]}


def run_job(folder: str, name: str) -> dict[str, Any]:
    """Return the runs of both models by strategy, and on two ranks what `save` has found."""
    found: dict[str, Any] = {}
    for strategy in JOBS[name]:
        found[strategy, "experts"] = resume(f"{folder}/{strategy}/experts", strategy)
        found[strategy, "hand-written"] = resume_hand_written(f"{folder}/{strategy}/hand-written", strategy)
    if name == "two ranks":
        found["saved"] = save(folder)
    return found


@pytest.fixture(scope="module", params=["one process", "two ranks", pytest.param("deepspeed", marks=needs_deepspeed)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Any]]:
    """The name of a job, its folder, and what its ranks have found."""
    name, folder = request.param, tmp_path_factory.mktemp("job")
    if name == "one process":
        return name, folder, [run_job(str(folder), name)]
    return name, folder, run_ranks(run_job, 2, str(folder), name, timeout=100)


@pytest.mark.multirank
def test_experts_that_are_stored_one_by_one_are_resumed(job: tuple[str, Path, list[Any]]):
    name, folder, (found, *_) = job
    for strategy in JOBS[name]:
        check_resumed(found[strategy, "experts"], folder / strategy / "experts" / "checkpoint-2")


@pytest.mark.multirank
def test_a_model_of_no_library_is_saved_with_its_tied_weights_once_and_resumed(job: tuple[str, Path, list[Any]]):
    name, folder, (found, *_) = job
    for strategy in JOBS[name]:
        whole, resumed = found[strategy, "hand-written"]
        assert whole["is_tied"]
        assert resumed["is_tied"]
        assert resumed["losses"] == whole["losses"]
        np.testing.assert_equal(resumed["weights"], whole["weights"])
        stored = load_file(folder / strategy / "hand-written" / f"checkpoint-{whole['step']}" / "model.safetensors")
        assert set(stored) == {"embedding.weight", "mix.weight", "mix.bias"}
        np.testing.assert_array_equal(stored["mix.weight"].numpy(), whole["weights"]["mix.weight"])


@pytest.mark.multirank
@pytest.mark.parametrize("job", ["two ranks"], indirect=True)
def test_whole_weights_are_in_no_ranks_memory(job: tuple[str, Path, list[Any]]):
    _, folder, ranks = job
    (in_memory, num_handed), others = (found["saved"] for found in ranks)
    assert num_handed > 10
    assert in_memory == []
    assert others == ([], 0)
    assert [path.name for path in (folder / "new").iterdir()] == ["model"]
    stored, expected = load_file(folder / "new/model/model.safetensors"), build_model("gpt2").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in stored.items())
    assert set(expected) - set(stored) == {"lm_head.weight"}  # tied


def test_what_a_checkpoint_lacks_of_a_model_of_no_library_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    train_hand_written(str(tmp_path), "single")
    path = tmp_path / "checkpoint-4/model.safetensors"
    stored = load_file(path)
    del stored["mix.bias"]
    save_file(stored, path)

    train_hand_written(str(tmp_path), "single", 4, verify="off")

    assert "missing keys in the checkpoint model loaded: ['mix.bias']" in caplog.text
