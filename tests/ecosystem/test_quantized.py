"""Adapters on weights that bitsandbytes has quantised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ecosystem.peft_models import RANKS, STRATEGIES, adapt, build_peft_trainer
from tests.ranks import RankFailure, preload, run_ranks

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
preload("bitsandbytes", "peft", "accel_trainer.trainer", "transformers.models.llama.modeling_llama", "deepspeed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model whose rows are as long as bitsandbytes' blocks at least."""
    import transformers

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
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
    for resume in (None, str(Path(folder, "run", "checkpoint-4"))):
        out = Path(folder, "run" if resume is None else "again")
        trainer = build_peft_trainer(
            out, strategy, "lora", model=build(base, bits), save_strategy="steps", save_steps=4, eval_strategy="steps",
            eval_steps=2,
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
    """Without that the loss of the second epoch is that of the first: bitsandbytes gives gradients of zero."""
    first, last = np.mean(alone[0][:4]), np.mean(alone[0][4:])
    assert last < first - 0.02


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_4_bit_bases_train_as_on_one_process(base: Path, alone: list[list[float]], tmp_path: Path, strategy: str):
    trained, resumed = run_ranks(train, RANKS[strategy], str(tmp_path), str(base), strategy, 4, timeout=100)[0]
    np.testing.assert_allclose(trained, alone[0], rtol=2e-6)
    assert resumed == trained


@pytest.mark.multirank
def test_fsdp2_refuses_8_bit_bases_before_it_starts(base: Path, tmp_path: Path):
    message = "is an 8-bit parameter of bitsandbytes, which FSDP2 cannot shard: its scales would be lost"
    with pytest.raises(RankFailure, match=re.escape(message)) as failure:
        run_ranks(train, 2, str(tmp_path), str(base), "fsdp", 8, timeout=100)
    assert set(failure.value.failures) == {0, 1}
