"""Adapters on weights that bitsandbytes has quantised."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from accel_trainer import Accelerator
from accel_trainer.launch.cli import main
from tests.cells import beyond
from tests.contrib.test_planner import RealRank, measure_rank
from tests.ecosystem.peft_models import RANKS, adapt, build_peft_trainer, prepare_loop, train_loop
from tests.ranks import RankFailure, preload, run_ranks

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
preload("bitsandbytes", "peft", "accel_trainer.trainer", "transformers.models.llama.modeling_llama", "deepspeed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model whose rows are as long as bitsandbytes' blocks at least."""
    folder = tmp_path_factory.mktemp("base")
    return save_base(folder, seed=0)


def save_base(folder: Path, seed: int, vocab_size: int = 64) -> Path:
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def build(base: str, bits: int) -> Any:
    import peft
    import transformers

    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if bits == 4 else {"load_in_8bit": True}
    config = transformers.BitsAndBytesConfig(**options)
    model = transformers.LlamaForCausalLM.from_pretrained(base, quantization_config=config)
    return adapt(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), "lora")


def train(folder: str, base: str, strategy: str, bits: int) -> list[list[float]]:
    """Evaluate and train, and train again from the middle; return the losses of both."""
    found = []
    for resume in (None, str(Path(folder, "run", "checkpoint-2"))):
        out = Path(folder, "run" if resume is None else "again")
        trainer = build_peft_trainer(
            out, strategy, "lora", model=build(base, bits), save_strategy="steps", save_steps=2, eval_strategy="steps",
            eval_steps=2, num_train_epochs=3,
        )  # fmt: skip
        if resume is None:
            trainer.evaluate()
        trainer.train(resume_from_checkpoint=resume)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return run_ranks(train, 1, str(tmp_path_factory.mktemp("alone")), str(base), "single", 4, timeout=100)[0]


def test_gradients_pass_through_4_bit_layers_after_an_evaluation(base: Path, alone: list[list[float]]):
    """Without that the loss of the last epoch is that of the first: bitsandbytes gives gradients of zero."""
    first, last = np.mean(alone[0][:2]), np.mean(alone[0][-2:])
    assert last < first - 0.02


def test_a_run_on_a_4_bit_base_resumes_exactly(alone: list[list[float]]):
    assert alone[1] == alone[0]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", beyond("zero2"), "zero3"])
def test_4_bit_bases_train_as_on_one_process(base: Path, alone: list[list[float]], tmp_path: Path, strategy: str):
    trained, resumed = run_ranks(train, 2, str(tmp_path), str(base), strategy, 4, timeout=100)[0]
    np.testing.assert_allclose(trained, alone[0], rtol=2e-6)
    assert resumed == trained


@pytest.mark.multirank
def test_fsdp2_refuses_8_bit_bases_before_it_starts(base: Path, tmp_path: Path):
    message = "is an 8-bit parameter of bitsandbytes, which FSDP2 cannot shard: its scales would be lost"
    with pytest.raises(RankFailure, match=re.escape(message)) as failure:
        run_ranks(train, 2, str(tmp_path), str(base), "fsdp", 8, timeout=100)
    assert set(failure.value.failures) == {0, 1}


def train_natively(base: str, strategy: str, **state: str) -> list[float]:
    return train_loop(*prepare_loop(strategy, lambda: build(base, 4)), **state)


@pytest.fixture(scope="module")
def states(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what gives the losses of a strategy's updates, and the folder of its state after two of them."""

    @functools.cache
    def train(strategy: str) -> tuple[list[float], str]:
        folder = str(tmp_path_factory.mktemp(strategy) / "state")
        losses = run_ranks(train_natively, RANKS[strategy], str(base), strategy, save_to=folder, timeout=100)[0]
        return losses, folder

    return train


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("origin", "strategy"),
    [
        ("single", "single"),
        ("single", "ddp"),
        ("single", "zero3"),
        ("single", "fsdp"),
        ("fsdp", "single"),
        beyond(("fsdp", "zero3")),
    ],
)
def test_a_state_with_a_4_bit_base_goes_on(states: Any, tmp_path: Path, origin: str, strategy: str):
    losses, folder = states(origin)
    other = str(save_base(tmp_path, seed=1))  # the state has everything of the base, its scales too
    resumed = run_ranks(train_natively, RANKS[strategy], other, strategy, load_from=folder, timeout=100)[0]
    np.testing.assert_allclose(resumed, losses[2:], rtol=2e-6)


def plan_and_train(base: str, strategy: str) -> dict[str, tuple[int, int]]:
    """Return the planned and the measured bytes of a rank, by what they are for."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model, tokens_BL = build(base, 4), torch.zeros(8, 64, dtype=torch.long)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    planned = accelerator.preflight(model, optimizer, {"input_ids": tokens_BL, "labels": tokens_BL})
    measured = measure_rank(RealRank(accelerator, model, tokens_BL), has_buckets=False)
    names = ("parameters", "gradients", "optimizer_state", "activations", "peak")
    return {name: (getattr(planned, name), measured[name]) for name in names}


@pytest.mark.multirank
@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("fsdp2", 2)])
def test_a_plan_of_a_4_bit_base_is_what_a_rank_takes(base: Path, strategy: str, num_ranks: int):
    for planned, measured in run_ranks(plan_and_train, num_ranks, str(base), strategy)[0].values():
        assert planned == pytest.approx(measured, rel=0.05)


def build_qlora(base: Path, dtype: torch.dtype) -> Any:
    import peft
    import transformers

    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = transformers.LlamaForCausalLM.from_pretrained(base, quantization_config=config, dtype=dtype)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()


def test_estimate_plans_adapters_and_a_4_bit_base_from_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = save_base(tmp_path, seed=0, vocab_size=2048)  # of words enough that the loss counts
    capsys.readouterr()
    command = ["estimate", str(base), "--num_processes", "1", "--batch", "8", "--sequence", "64", "--lora", "4"]
    assert main([*command, "--load_in_4bit", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main([*command, "--json"]) == 0
    unpacked = json.loads(capsys.readouterr().out)

    real = build_qlora(base, torch.float32)
    trained = [p for p in real.parameters() if p.requires_grad]
    assert planned["parameters"] == sum(p.nbytes for p in real.parameters())
    assert planned["gradients"] == unpacked["gradients"] == sum(p.nbytes for p in trained)
    assert planned["optimizer_state"] == 2 * sum(p.nbytes for p in trained) + 4 * len(trained)
    tokens_BL = torch.zeros(8, 64, dtype=torch.long)
    batch = {"input_ids": tokens_BL, "labels": tokens_BL}
    found = Accelerator(cpu=True).preflight(real, torch.optim.AdamW(trained), batch)
    assert found is not None
    assert planned["peak"] == pytest.approx(found.peak, rel=0.05)
    assert planned["flops"] == unpacked["flops"] == found.flops
    assert unpacked["peak"] - planned["peak"] > 0.8 * (unpacked["parameters"] - planned["parameters"])
    assert main([*command, "--load_in_4bit"]) == 0
    assert "AdamW, LoRA of rank 4, its layers in 4 bits\n" in capsys.readouterr().out


def test_estimate_keeps_of_4_bit_layers_under_autocast_what_a_gpu_keeps(base: Path, capsys: pytest.CaptureFixture[str]):
    """PEFT's layers over bitsandbytes ask for CUDA's autocast: where it is on they make no copies of their inputs."""
    command = ["estimate", str(base), "--num_processes", "1", "--batch", "8", "--sequence", "64", "--lora", "4"]
    assert main([*command, "--load_in_4bit", "--dtype", "bfloat16", "--mixed_precision", "bf16", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["activations"]
    model, tokens_BL = build_qlora(base, torch.bfloat16), torch.zeros(8, 64, dtype=torch.long)
    own, kept = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}, []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),  # first: it asks what it is to restore at its end
        mock.patch.object(torch, "is_autocast_enabled", return_value=True),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        loss = model(input_ids=tokens_BL, labels=tokens_BL).loss
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    assert loss.requires_grad
    assert planned == pytest.approx(sum(size for each, size in storages.items() if each not in own), rel=0.05)
