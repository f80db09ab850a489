"""Operations of a model: the formula, torch's counter on a copy without memory, and on the model itself, agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

from accel_trainer.techniques.model_flops import ModelFlops, copy_shapes, count_flops, peak_flops_by_name
from tests.trainer_jobs import build_model

ROWS, LENGTH = 2, 64
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, **EXPERTS,
    },
}  # fmt: skip


def build(family: str, **options: Any) -> nn.Module:
    sizes = {"vocab_size": 96} if family == "gpt2" else SIZES
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family], **options, "use_cache": False})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def batch_of(rows: int = ROWS, length: int = LENGTH) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}


def formula(model: nn.Module, rows: int = ROWS, length: int = LENGTH) -> float:
    flops = ModelFlops.by_formula(model)
    assert flops is not None
    return flops.total(rows * length, rows * length**2, rows)


def count_real(model: nn.Module, batch: Any) -> int:
    """Return what the counter counts where the model computes: on values, in fp32."""
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_formula_and_counter_agree_within_a_hundredth(family: str):
    model = build(family)
    counted = count_flops(copy_shapes(model), batch_of())
    assert formula(model) == pytest.approx(counted, rel=0.01)


def test_the_copy_counts_what_the_model_computes():
    model = build("llama")
    assert count_flops(copy_shapes(model), batch_of()) == count_real(model, batch_of())


def test_the_formula_is_six_for_each_weight_that_multiplies_and_twelve_for_each_pair_of_attention():
    flops = ModelFlops.by_formula(build("llama"))
    attention = 64 * 64 * 2 + 2 * 64 * 32  # queries and output, keys and values of half as many heads
    layers = 2 * (attention + 3 * 64 * 128)
    assert flops == ModelFlops(per_token=6 * (layers + 64 * 96), per_pair=12 * 2 * 4 * 16)


def test_a_tied_head_multiplies_though_its_weight_is_the_embedding():
    apart, tied = build("llama"), build("llama", tie_word_embeddings=True)
    assert ModelFlops.by_formula(tied) == ModelFlops.by_formula(apart)
    assert formula(tied) == pytest.approx(count_flops(copy_shapes(tied), batch_of()), rel=0.01)


def test_of_a_mixtures_experts_those_count_that_a_token_is_sent_to():
    one, two = (build("mixtral", num_experts_per_tok=number) for number in (1, 2))
    assert formula(two) - formula(one) == 6 * 2 * (3 * 64 * 128) * ROWS * LENGTH


class Adapted(nn.Module):
    """A frozen linear layer with a low rank beside it, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(*sizes, bias=False) for sizes in ((base.in_features, 4), (4, base.out_features))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: Any) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = map(Adapted, (layer.self_attn.q_proj, layer.self_attn.v_proj))


def freeze_below(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:6].requires_grad_(False)


def train_the_head(model: Any) -> None:
    model.model.requires_grad_(False)


@pytest.mark.parametrize("freeze", [adapt, freeze_below, train_the_head])
def test_frozen_weights_count_forward_and_where_gradients_flow_back_through_them(freeze: Callable[[Any], None]):
    # Of many layers: in the first one that is trained, the formula cannot see what keys and queries need gradients of.
    model = build("llama", num_hidden_layers=12)
    full = formula(model)
    freeze(model)
    assert formula(model) < 0.8 * full
    assert formula(model) == pytest.approx(count_flops(copy_shapes(model), batch_of()), rel=0.01)


def test_activation_checkpointing_and_fused_attention_count_nothing_twice():
    model: Any = build("llama")
    counted = count_flops(copy_shapes(model), batch_of())
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert count_real(model, batch_of()) > 1.2 * counted  # what it computes, with the recomputation
    model.set_attn_implementation("sdpa")
    assert count_flops(copy_shapes(model), batch_of()) == counted


def test_padding_and_packing_do_not_change_what_is_counted_on_shapes():
    model, batch = build("llama"), batch_of()
    counted = count_flops(copy_shapes(model), batch)
    batch["attention_mask"][0, 40:] = 0
    batch["position_ids"] = torch.arange(LENGTH).remainder(16).expand(ROWS, -1)
    assert count_flops(copy_shapes(model), batch) == counted


@pytest.mark.parametrize("kind", ["vit", "t5", "bert"])
def test_models_without_a_formula_have_the_counters_figures(kind: str):
    torch.manual_seed(0)
    if kind == "vit":
        sizes = {name: value for name, value in SIZES.items() if name not in ("vocab_size", "num_key_value_heads")}
        config = AutoConfig.for_model("vit", image_size=32, patch_size=8, num_labels=4, **sizes)
        model = AutoModelForImageClassification.from_config(config, attn_implementation="eager")
        batch = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.zeros(ROWS, dtype=torch.long)}
    elif kind == "t5":
        model, batch = build_model("t5"), batch_of()
        batch = {name: value % 64 for name, value in batch.items()}
    else:  # whose pooled head multiplies one token of a row
        model, batch = build_model("bert"), batch_of(length=16)
        batch = {"input_ids": batch["input_ids"] % 64, "labels": torch.zeros(ROWS, dtype=torch.long)}
    model.set_attn_implementation("eager")
    model.train()
    if kind != "bert":
        assert ModelFlops.by_formula(model) is None
    assert count_flops(copy_shapes(model), batch) == count_real(model, batch)


def test_masked_language_models_have_the_formula():
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **sizes), attn_implementation="eager").train()
    assert formula(model) == pytest.approx(count_flops(copy_shapes(model), batch_of()), rel=0.01)


class Drawing(nn.Module):
    """Draws in its forward, counts its calls in a buffer, and has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.hooked = 0
        self.layers.register_forward_hook(self.note)

    def note(self, *_: Any) -> None:
        self.hooked += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_counting_leaves_weights_buffers_and_hooks_alone():
    model = Drawing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counted = count_flops(copy_shapes(model), (torch.ones(4, 8), torch.ones(4)))
    assert counted == 2 * 2 * 4 * 8 * 8  # no input's gradient
    assert model.hooked == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA B200", 2250.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_the_table_knows_devices_by_their_names(name: str, teraflops: float):
    assert peak_flops_by_name(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    ["cpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"],
)
def test_slices_and_other_chips_of_a_name_are_not_known(name: str):
    assert peak_flops_by_name(name) is None
