"""Adapters of PEFT and a loss in chunks of tokens: below the head they are no different, on it they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_trainer import Accelerator
from accel_trainer.errors import ConfigError
from tests.trainer_jobs import build_model

peft = pytest.importorskip("peft")


def adapted(**options: Any) -> Any:
    """Return a llama with LoRA whose matrices are no zeros."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)
    model = peft.get_peft_model(build_model("llama"), config).train()
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.arange(3, 51).view(4, 12)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["q_proj"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
    ids=["LoRA", "a head of its own"],
)
def test_adapters_get_the_gradients_of_whole_logits(options: dict[str, Any]):
    expected = gradients(adapted(**options))
    model = Accelerator(cpu=True, config={"loss_chunk_tokens": 7}).prepare(adapted(**options))
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6)
    assert any("lm_head" in name for name in expected) == ("modules_to_save" in options)
    tokens = torch.arange(3, 15).view(1, 12)
    assert not isinstance(model(input_ids=tokens, labels=tokens).logits, torch.Tensor)


def test_an_adapter_of_the_head_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"the head of LlamaForCausalLM is a peft\..*, and a torch.nn.Linear is expec"
    ):
        Accelerator(cpu=True, config={"loss": "chunked"}).prepare(adapted(target_modules=["lm_head"]))
