"""Families of transformers that declare a plan for tensor or expert parallelism, tiny, on two ranks beside one process.

`make test-families` compares them all; `make test` has those whose plans shard something in a way of their own.
What a family's plan cannot do stands here with the words of its refusal, and the plan with which it is exact.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.loops import start
from tests.ranks import RankFailure, preload, run_ranks

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator")

TOLERANCE = 2e-6
"""Of losses and logits, beside the largest value where that is above 1; of gradients, twenty times as much beside each
parameter's largest: they are sums over tokens and layers in another order."""

_SIZES: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "max_position_embeddings": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "index_topk": 4, "index_head_dim": 16,
    "index_n_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "image_size": 16, "patch_size": 4,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "output_router_logits": True,
}  # fmt: skip
"""Those of them that a configuration has."""


class Family(NamedTuple):
    """A family's tiny sizes beside the usual ones, and what becomes of its plan."""

    sizes: Mapping[str, Any] = {}
    model: str = ""
    """The class, where no auto class has one for the configuration."""
    inputs: str = ""
    """A name of `_INPUTS`, where they are no tokens."""
    refused: str = ""
    """The words with which the plan is refused, where it is; a regular expression."""
    given: Mapping[str, str] = {}
    """What `tp_plan` has to give beside the model's own, and all is exact."""
    dtype: torch.dtype = torch.float32
    """Of the weights; float64, with logits to 1e-12, where sums of float32 in another order are farther than 2e-6."""
    gradient_tolerance: float = 20 * TOLERANCE
    """Of the farthest gradient; more where one process in float32 is farther from itself in float64."""


def _family(*shared: Mapping[str, Any], **own: Any) -> Family:
    """Return a family by its sizes, shared ones and its own, and by what else a `Family` says."""
    said = {name: own.pop(name) for name in Family._fields if name in own}
    sizes = {name: value for each in shared for name, value in each.items()}
    return Family({**sizes, **own}, **said)


def _rope(*sections: int, **options: Any) -> dict[str, Any]:
    return {**_ROPE, "mrope_section": list(sections), **options}


_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SECTIONS: Mapping[str, Any] = {"rope_parameters": _rope(2, 1, 1)}
_TOWER: Mapping[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


_FULL: Mapping[str, Any] = {"num_key_value_heads": 4}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_JOIN, _SPLIT, _SUM = "colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce"


def _attention(prefix: str, output: str = "o_proj") -> dict[str, str]:
    """Return a plan that has all heads on each rank."""
    joined = {f"{prefix}.{name}": _JOIN for name in ("q_proj", "k_proj", "v_proj")}
    return joined | {f"{prefix}.{output}": _SPLIT}


def _norms(prefix: str) -> dict[str, str]:
    return dict.fromkeys((f"{prefix}.q_norm", f"{prefix}.k_norm"), _SUM)


_NO_PLAN = "declares no plan for tensor parallelism that names its modules"
_UNNAMED = "and does not name .*, which has parameters beside them"

_AS_THEY_ARE = (
    "afmoe arcee aria_text cohere cohere2 cohere2_moe cwm ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe flex_olmo "
    "gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_neox gpt_oss granite granite_docling_text granite_swa granitemoe "
    "granitemoeshared helium hrm_text hunyuan_v1_moe hy_v3 hyperclovax inkling2_text inkling_text internlm3 "
    "iquestcoder jais2 kolibri1 laguna llama llama4_text mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text "
    "ministral ministral3 mistral mixtral muse_glimmer_text muse_spark_text nanochat nemotron nemotron_h olmo olmo2 "
    "olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 ultrabert "
    "vaultgemma"
)
_OF_FULL_HEADS = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 minicpm3 mistral_large4_text youtu"
)
_OF_SECTIONS = "cosmos3_edge_text glm4v_text glm_image_text glm_ocr_text qwen2_5_vl_text qwen2_vl_text"
_OF_LINEAR_ATTENTION = "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next"

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_AS_THEY_ARE.split(), _family()),
    **dict.fromkeys(_OF_FULL_HEADS.split(), _family(_FULL)),
    **dict.fromkeys(_OF_SECTIONS.split(), _family(_SECTIONS)),
    **dict.fromkeys(_OF_LINEAR_ATTENTION.split(), _family(_MIXED)),
    "apertus": _family(refused=_UNNAMED, given={"model.layers.*.mlp.act_fn": _SUM}),
    "bailing_hybrid": _family(_FULL, _MIXED, num_expert_group=1, num_experts_per_token=2),
    "beam": _family(_SPARSE),
    "cohere_compass_text": _family(rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE}),
    "deepseek_ocr2_encoder": _family(model="DeepseekOcr2VisionEncoder", inputs="patches"),
    "deepseek_ocr2_text": _family(_FULL, _SPARSE, model="DeepseekOcr2TextModel"),
    # 0.001 of attn_hc.scale is left of a sum: in float32 one process is 2.4e-5 from float64, and two ranks 4.3e-5.
    "deepseek_v4": _family(mlp_layer_types=["hash_moe", "moe"], gradient_tolerance=30 * TOLERANCE),
    "diffusion_gemma_text": _family(  # 2.2e-6 of the largest logit in float32, on a CPU without AVX-512
        _SLIDING, num_experts=4, top_k_experts=2, model="DiffusionGemmaEncoderTextModel", dtype=torch.float64
    ),
    "doge": _family(
        refused=_UNNAMED, given=_attention("model.layers.*.self_attn") | {"model.layers.*.self_attn.dt_proj": _SPLIT}
    ),
    "dots1": _family(n_shared_experts=1),
    "dots3_note_text": _family(
        _FULL, _SPARSE, layer_types=["indexed_attention", "sliding_attention"], head_dim=16, index_head_dim=8
    ),
    "dots3_note_vision_encoder": _family(
        _SPARSE, adapter_in_dim=32, adapter_out_dim=32, model="Dots3NoteVisionModel", inputs="grid"
    ),
    "embedding_gemma2_text": _family(
        _SLIDING, hidden_size_per_layer_input=8, embedding_dim=16, num_global_key_value_heads=2, global_head_dim=8
    ),
    "ernie4_5_vl_moe_text": _family(
        _SPARSE,
        rope_parameters=_rope(1, 1, 2),
        moe_intermediate_size=[32, 16],
        moe_k=2,
        moe_num_experts=4,
        model="Ernie4_5_VLMoeTextModel",
    ),
    "ernie4_5_vl_moe_vision": _family(
        depth=2, num_heads=4, model="Ernie4_5_VLMoeVisionTransformerPretrainedModel", inputs="hidden grid"
    ),
    "esmc": _family(_FULL, refused=_UNNAMED, given=_attention("esmc.layers.*.self_attn")),
    "flint": _family(mlp_only_layers=[0]),
    "gemma3n_text": _family(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        intermediate_size=[64, 64, 64, 64],
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        refused="keeps the largest activations of each layer",
        given={f"model.layers.*.mlp.{name}": _JOIN for name in ("gate_proj", "up_proj")}
        | {"model.layers.*.mlp.down_proj": _SPLIT},
    ),
    "gemma4_text": _family(
        _SLIDING,
        num_experts=4,
        top_k_experts=2,
        enable_moe_block=True,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        rope_parameters={
            "sliding_attention": _ROPE,
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    ),
    "gemma4_unified_text": _family(_SLIDING),
    "gemma4_vision": _family(_FULL, position_embedding_size=16, pooling_kernel_size=2, inputs="places"),
    "glm4v_moe_text": _family(rope_parameters=_rope(1, 1, 0, partial_rotary_factor=0.5)),
    "glm5_next_text": _family(
        _FULL,
        _SPARSE,
        layer_types=["linear_attention", "indexed_attention"],
        qk_rope_head_dim=0,
        head_dim=0,
        index_topk=16,
        index_head_dim=8,
        refused="as .rowwise., for this rank.s shard of its 32 inputs, and it is given all",
        given={"layers.0.self_attn.o_proj": _SPLIT},
    ),
    "granite4_vision_text": _family(model="Granite4VisionTextModel"),
    "granitemoe_swa": _family(dtype=torch.float64),  # 2.5e-6 of the largest logit in float32
    "granitemoehybrid": _family(
        _MIXED, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, shared_intermediate_size=32, mamba_d_state=8
    ),
    "higgs_audio_v2": _family(num_codebooks=2, codebook_size=16),
    "jamba": _family(
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False
    ),
    "kimi_linear": _family(_FULL, _MIXED, _SPARSE, num_expert_group=1, num_experts_per_token=2, q_lora_rank=...),
    "lfm2_moe": _family(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "llama4": _family(
        text_config="llama4_text", vision_config="llama4_vision_model", model="Llama4ForConditionalGeneration"
    ),
    "llama4_vision_model": _family(
        intermediate_size=128,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
        model="Llama4VisionModel",
        inputs="picture",
    ),
    "longcat_flash": _family(
        _FULL,
        refused="has .moe_identity_expert., and known are",
        given={
            f"model.layers.*.mlp.experts{name}": "replicate"
            for name in ("", ".identity_expert", ".gate_up_proj", ".down_proj")
        },
    ),
    "mistral4": _family(
        _FULL,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    ),
    "muse_glimmer": _family(
        text_config="muse_glimmer_text",
        vision_config="muse_glimmer_vision",
        model="MuseGlimmerForConditionalGeneration",
    ),
    "muse_glimmer_assistant": _family(
        _SLIDING, target_layer_ids=[0, 1], inputs="draft", refused=_UNNAMED, given=_norms("layers.*.self_attn")
    ),
    "muse_glimmer_vision": _family(
        pos_emb_height=4, pos_emb_width=4, layer_types=["window_attention", "full_attention"], inputs="temporal grid"
    ),
    "muse_spark": _family(
        text_config="muse_spark_text",
        vision_config={**_TOWER, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
        audio_config={"out_hidden_size": 32},
        model="MuseSparkForConditionalGeneration",
    ),
    "neomme": _family(
        _SLIDING,
        embedding_rank=8,
        embedding_dim=8,
        patch_size=4,
        head_dim=16,
        refused=_UNNAMED,
        given=_attention("model.layers.*.self_attn", "output_projection.o_proj")
        | {"model.layers.*.self_attn.output_projection.gate_proj": _JOIN},
    ),
    "openai_privacy_filter": _family(refused=_NO_PLAN),
    "paddleocr_vl_text": _family(_SECTIONS, model="PaddleOCRTextModel"),
    "phi4_multimodal": _family(
        vision_config={**_TOWER, "num_hidden_layers": 1, "crop_size": 28},
        audio_config={
            **_TOWER,
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "input_size": 80,
        },
    ),
    "qwen2_5_omni_text": _family(_SECTIONS, model="Qwen2_5OmniThinkerTextModel"),
    "qwen3_omni_moe_talker_code_predictor": _family(model="Qwen3OmniMoeTalkerCodePredictorModel", inputs="embedded"),
    "qwen3_omni_moe_talker_text": _family(
        _SECTIONS, shared_expert_intermediate_size=32, model="Qwen3OmniMoeTalkerModel", inputs="embedded"
    ),
    "qwen3_omni_moe_text": _family(
        _SECTIONS,
        refused=_UNNAMED,
        given=_norms("layers.*.self_attn"),
        model="Qwen3OmniMoeThinkerTextModel",
    ),
    "qwen3_vl_moe_text": _family(_SECTIONS, refused=_UNNAMED, given=_norms("layers.*.self_attn")),
    "qwen4_exp_text": _family(
        layer_types=["linear_attention", "indexed_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
        ple_layer_ids=[1],
        ple_embed_dim=16,
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=2,
        split_ngram_parts=2,
        heads_per_ngram=2,
        hc_lowrank=8,
    ),
    "step3p5": _family(_SPARSE, model="Step3p7TextModel"),
    "t5_gemma_module": _family(_SLIDING, dropout_rate=0.0, model="T5GemmaEncoder"),
    "t5gemma2_decoder": _family(
        _SLIDING,
        dropout_rate=0.0,
        refused="shards the rows of embed_tokens, .* with eoi_embedding beside its weight",
        given={"embed_tokens": "replicate"},
        model="T5Gemma2Decoder",
        inputs="decoding",
    ),
    "t5gemma2_text": _family(
        _SLIDING,
        dropout_rate=0.0,
        refused="shards the rows of embed_tokens, .* with eoi_embedding beside its weight",
        given={"embed_tokens": "replicate"},
        model="T5Gemma2TextEncoder",
    ),
    "unlimited_ocr_text": _family(_FULL, model="UnlimitedOcrTextModel"),
    "voxtral_realtime_text": _family(model="VoxtralRealtimeTextModel", inputs="conditioned"),
    "zaya": _family(num_experts_per_tok=1, refused=_NO_PLAN),
}

_EXACT_EXPERTS = (
    "afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32 "
    "deepseek_v4 diffusion_gemma_text dots1 dots3_note_text dots3_note_vision_encoder ernie4_5_moe "
    "ernie4_5_vl_moe_text exaone_moe flex_olmo flint gemma4_text glm4_moe glm4_moe_lite glm4v_moe_text glm5_next_text "
    "glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 "
    "inkling2_text inkling_text jamba kimi_linear kolibri1 laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 "
    "minimax_m3_vl_text mistral4 mistral_large4_text mixtral nemotron_h olmoe openai_privacy_filter phimoe "
    "qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text "
    "qwen4_exp_text solar_open step3p5 unlimited_ocr_text zaya"
)
EXPERT_FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(_EXACT_EXPERTS.split(), ""),
    "muse_spark_text": r"the experts of .*mlp\.experts have modules with a weight, which ranks cannot share",
}
"""Those that declare a plan for expert parallelism, with the words of its refusal, where it is refused."""


# --- models and inputs ------------------------------------------------------------------------------------------------


def declared_configs() -> dict[str, Any]:
    """Return the configuration class of each family of transformers that declares a plan, by its model type."""
    import transformers

    found: dict[str, Any] = {}
    for folder in pkgutil.iter_modules([str(Path(transformers.__file__).parent / "models")]):
        models = Path(transformers.__file__).parent / "models" / folder.name
        for path in sorted(models.glob("configuration_*.py")):
            if re.search("base_model_[te]p_plan", path.read_text()):
                module = importlib.import_module(f"transformers.models.{folder.name}.{path.stem}")
                classes = [each for each in vars(module).values() if inspect.isclass(each)]
                for each in classes:
                    is_own = issubclass(each, transformers.PreTrainedConfig) and each.__module__ == module.__name__
                    if is_own and (each.base_model_tp_plan or each.base_model_ep_plan):
                        found.setdefault(each.model_type, each)
    return found


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # transformers' word for one that may differ from layer to layer
        return True


def _config(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else declared_configs()[kind]
    known, own = config_class(), FAMILIES[kind].sizes
    # Parts have their own sizes, and what they are made of has none.
    sizes = {} if "text_config" in own else {name: value for name, value in _SIZES.items() if _has(known, name)}
    sizes |= {name: value for name, value in own.items() if not (name.endswith("_config") and isinstance(value, str))}
    for name, part in own.items():
        if name.endswith("_config") and isinstance(part, str):
            sizes[name] = _config(part)
    return config_class(**{name: value for name, value in sizes.items() if value is not ...})


def build(kind: str) -> nn.Module:
    """Return the family's tiny model; with values at which each parameter has a gradient to be seen."""
    import transformers

    family, config = FAMILIES[kind], _config(kind)
    config_class = type(config)
    if family.model:
        modeling = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
        model_class = getattr(modeling, family.model)
    else:
        auto = transformers.models.auto.modeling_auto
        names = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_MAPPING")
        model_class = next(getattr(auto, name)[config_class] for name in names if config_class in getattr(auto, name))
        model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    torch.manual_seed(0)
    model: nn.Module = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn_like(parameter)
            parameter.copy_(value * 0.2 if parameter.ndim > 1 else parameter + value * 0.1)
    return model


def _tokens(reader: int) -> Tensor:
    return torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(1 + 10 * reader))


def _numbers(reader: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2 + 10 * reader))


_INPUTS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "": lambda reader: {"input_ids": _tokens(reader)},
    "embedded": lambda reader: {"inputs_embeds": _numbers(reader, 2, 10, 32)},
    "patches": lambda reader: {"inputs_embeds": _numbers(reader, 2, 10, 32), "num_patches": 5},
    "picture": lambda reader: {"pixel_values": _numbers(reader, 2, 3, 16, 16)},
    "grid": lambda reader: {"pixel_values": _numbers(reader, 16, 48), "grid_thw": torch.tensor([[1, 4, 4]])},
    "hidden grid": lambda reader: {"hidden_states": _numbers(reader, 16, 48), "grid_thw": torch.tensor([[1, 4, 4]])},
    "temporal grid": lambda reader: {"pixel_values": _numbers(reader, 16, 96), "grid_thw": torch.tensor([[1, 4, 4]])},
    "places": lambda reader: {
        "pixel_values": _numbers(reader, 2, 16, 48),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, 16, 2),
    },
    "conditioned": lambda reader: {"inputs_embeds": _numbers(reader, 2, 10, 32), "t_cond": _numbers(reader, 1, 32)},
    "draft": lambda reader: {
        "noise_embeds": _numbers(reader, 2, 4, 32),
        "context_hidden_states": _numbers(reader, 2, 10, 64),
    },
    "decoding": lambda reader: {"input_ids": _tokens(reader), "encoder_hidden_states": _numbers(reader, 2, 10, 32)},
}


def _run(kind: str, model: nn.Module, reader: int) -> tuple[Tensor, Tensor]:
    """Return a loss, of the model's own or of its first output, and that output, for the inputs of a reader."""
    inputs = _INPUTS[FAMILIES[kind].inputs](reader)
    has_loss = type(model).__name__.endswith(("LM", "ForConditionalGeneration")) and "input_ids" in inputs
    torch.manual_seed(3)  # a router may draw
    output = model(**inputs, labels=inputs["input_ids"]) if has_loss else model(**inputs)
    first = output.logits if has_loss else output[0]
    loss = output.loss if has_loss else None
    return (first.float() * _numbers(reader, *first.shape)).mean() * 10 if loss is None else loss, first


# --- comparison -------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """How far two ranks are from one process; what is refused has only words."""

    loss: float = 0.0
    """This and what follows: beside the largest value, where that is above 1."""
    logits: float = 0.0
    gradient: float = 0.0
    """Of the parameter that is farthest, beside its largest gradient."""
    worst: str = ""
    after: float = 0.0
    """Of the loss behind an update."""
    share: float = 1.0
    """Of the parameters, on a rank."""
    refused: str = ""
    logits_tolerance: float = TOLERANCE
    gradient_tolerance: float = 20 * TOLERANCE


def compare(kinds: Iterable[str], given: bool = True) -> dict[str, Compared]:
    """Return how far each family is from one process. On two ranks.

    Args:
        given: whether `tp_plan` has what the family's plan lacks.
    """
    return {kind: _compare(kind, {"tp_size": 2, "tp_plan": FAMILIES[kind].given if given else {}}) for kind in kinds}


def compare_experts(kinds: Iterable[str]) -> dict[str, Compared]:
    """Return how far each family is from one process, where ranks share out experts and read data of their own.

    On two ranks.
    """
    return {kind: _compare(kind, {"dp_shard_size": 2, "ep_size": 2}) for kind in kinds}


def _compare(kind: str, sizes: Mapping[str, Any]) -> Compared:
    from accel_trainer.errors import ConfigError

    dtype = FAMILIES[kind].dtype
    plain = build(kind).to(dtype)
    if dtype == torch.float64:
        plain.set_experts_implementation("eager")  # torch's grouped product has no float64
    model = copy.deepcopy(plain)
    accelerator = start(sizes=sizes)
    readers = accelerator.readers
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    try:
        model, optimizers[1] = accelerator.prepare(model, optimizers[1])
        loss, logits = _run(kind, model, readers.rank)
        accelerator.backward(loss)
        expected = [_run(kind, plain, reader) for reader in range(readers.world_size)]
        torch.stack([each for each, _ in expected]).mean().backward()
        expected_loss, expected_logits = expected[readers.rank]
        gradients = {name: p.grad for name, p in model.named_parameters()}
        differences = {name: _distance(p.grad, gradients[name]) for name, p in plain.named_parameters()}
        worst = max(differences, key=lambda name: differences[name])
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            after = [_run(kind, each, readers.rank)[0].item() for each in (plain, model)]
        num_local = sum(p.to_local().numel() for p in model.parameters())
        return Compared(
            abs(loss.item() - expected_loss.item()) / max(1.0, abs(expected_loss.item())),
            (logits - expected_logits).abs().max().item() / max(1.0, expected_logits.abs().max().item()),
            differences[worst],
            worst,
            abs(after[0] - after[1]) / max(1.0, abs(after[0])),
            num_local / sum(p.numel() for p in plain.parameters()),
            logits_tolerance=1e-12 if dtype == torch.float64 else TOLERANCE,
            gradient_tolerance=FAMILIES[kind].gradient_tolerance,
        )
    except ConfigError as error:
        return Compared(refused=str(error))
    finally:
        accelerator.free_memory()


def _distance(expected: Tensor | None, found: Any) -> float:
    """Return how far a gradient is, beside the largest of its values; infinity where only one process has it."""
    values = None if found is None else found.full_tensor()
    expected, values = (torch.zeros(1) if each is None else each for each in (expected, values))
    # What is 0 but for rounding has no direction.
    return ((expected - values).abs().max() / expected.abs().max().clamp(min=1e-3)).item()


def find_expert_difference(kind: str, found: Compared) -> str:
    """Return what is not as promised where ranks share out experts; empty where all is."""
    refused = EXPERT_FAMILIES[kind]
    if refused:
        return "" if re.search(refused, found.refused) else f"is refused with {found.refused!r}"
    return find_difference(found)


def find_difference(found: Compared) -> str:
    """Return what is not as on one process; empty where all is."""
    limits = {
        "loss": TOLERANCE,
        "logits": found.logits_tolerance,
        "gradient": found.gradient_tolerance,
        "after": 2 * TOLERANCE,
    }
    far = [f"{name} {getattr(found, name):.1e}" for name, limit in limits.items() if getattr(found, name) > limit]
    return found.refused or ", ".join(far) and f"{', '.join(far)} ({found.worst})"


def docs_table() -> str:
    """Return the table of docs/parallelism.md: the families, and what those need whose plan is not enough."""
    exact = sorted(kind for kind, family in FAMILIES.items() if not family.refused)
    rows = [
        f"| `{kind}` | " + ("; ".join(f"`{name}={style}`" for name, style in family.given.items()) or "no plan") + " |"
        for kind, family in sorted(FAMILIES.items())
        if family.refused
    ]
    listed = ", ".join(f"`{kind}`" for kind in exact)
    return "\n".join(
        [f"{len(exact)} as they are: {listed}.", "", "| refused until `tp_plan` has | |", "|---|---|", *rows]
    )


def docs_experts() -> str:
    """Return the line of docs/parallelism.md about expert parallelism: the families that are exact."""
    exact = sorted(kind for kind, refused in EXPERT_FAMILIES.items() if not refused)
    return f"{len(exact)} as they are: {', '.join(f'`{kind}`' for kind in exact)}."


def main() -> None:
    """Compare all families, or those whose names match; print each one's distance from one process."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="a regular expression for model types, as 'qwen.*'")
    parser.add_argument("--table", action="store_true", help="print the tables of docs/parallelism.md, and end")
    parser.add_argument("--chunk", type=int, default=12, help="families of one pair of processes")
    options = parser.parse_args()
    if options.table:
        return print(docs_table(), docs_experts(), sep="\n\n")
    declared = declared_configs()
    broken = dict.fromkeys(declared.keys() ^ FAMILIES.keys(), "not in the table, or gone")
    mixtures = {kind for kind, config in declared.items() if config.base_model_ep_plan}
    broken |= dict.fromkeys(mixtures ^ EXPERT_FAMILIES.keys(), "not in the table of experts, or gone")
    kinds = [kind for kind in FAMILIES if re.search(options.only, kind) and kind in declared]
    for begin in range(0, len(kinds), options.chunk):
        for kind, text in _check(kinds[begin : begin + options.chunk]).items():
            if text:
                broken[kind] = text
    print(f"{len(broken)} of {len(kinds)} are not as promised: {broken}")
    sys.exit(bool(broken))


def _check(kinds: list[str]) -> dict[str, str]:
    """Return what is not as promised of each family, empty where all is."""
    refused = [kind for kind in kinds if FAMILIES[kind].refused]
    exact = [kind for kind in kinds if not FAMILIES[kind].refused or FAMILIES[kind].given]
    mixtures = [kind for kind in kinds if kind in EXPERT_FAMILIES]
    try:
        said, found, shared = run_ranks(_compare_all, 2, refused, exact, mixtures, timeout=300)[0]
    except RankFailure as error:
        if len(kinds) == 1:
            return {kinds[0]: "".join(traceback.format_exception_only(error))[-1500:]}
        return {kind: text for each in kinds for kind, text in _check([each]).items()}
    broken = dict.fromkeys(kinds, "")
    for kind in refused:
        if not re.search(FAMILIES[kind].refused, said[kind].refused):
            broken[kind] = f"is refused with {said[kind].refused!r}"
    for kind in exact:
        broken[kind] = broken[kind] or find_difference(found[kind])
        _print_figures(kind, broken[kind], found[kind])
    for kind in mixtures:
        difference = find_expert_difference(kind, shared[kind])
        broken[kind] = broken[kind] or difference and f"with shared experts: {difference}"
        _print_figures(f"experts of {kind}", difference, shared[kind])
    return broken


def _print_figures(name: str, difference: str, found: Compared) -> None:
    figures = ", ".join(
        f"{name} {getattr(found, name):.0e}" for name in ("loss", "logits", "gradient", "after", "share")
    )
    print(f"{name}: {difference or found.refused or 'as one process'} ({figures})", flush=True)


def _compare_all(refused: list[str], exact: list[str], mixtures: list[str]) -> tuple[dict[str, Compared], ...]:
    return compare(refused, given=False), compare(exact), compare_experts(mixtures)


if __name__ == "__main__":
    main()
