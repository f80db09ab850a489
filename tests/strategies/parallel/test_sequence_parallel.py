"""Shared sequences: families of transformers against one process, packed and padded rows, and what is refused.

Context parallelism is here where it gathers keys and values; torch's ring has a file of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache

from accel_trainer.config.resolve import resolve
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.parallel.sequence_parallel import find_language_model, shard_sequences
from tests import loops
from tests.attention_kernels import register_attention_kernels
from tests.cells import crossed, selected
from tests.conformance.models import MLP, build_model
from tests.loops import adamw, check_open_window, resume_open_window, start, updates
from tests.ranks import preload, run_ranks

preload("transformers.models.auto.modeling_auto", "accel_trainer.accelerator")

# Of each way in which attention is called, one family: fewer heads of keys, norms of heads, windows in all layers, in
# every other one, with a bound on scores that only eager attention has; learned positions, rotary ones of a part of a
# head, fused heads, experts.
FAMILIES = ("llama", "qwen3", "mistral", "gemma3_text", "gemma2", "gpt2", "gpt_neox", "phi3", "mixtral")


def tiny_model(kind: str, **changes: Any) -> nn.Module:
    if kind.startswith("gemma"):
        changes = {"layer_types": ["sliding_attention", "full_attention"], **changes}
    return loops.tiny_model(kind, **{"max_position_embeddings": 12, "sliding_window": 4, "use_cache": False, **changes})


def batches() -> list[dict[str, Tensor]]:
    """Return rows of lengths that 2 and 4 do not divide: plain, padded on both sides, and packed of two documents."""
    ids = torch.randint(3, 64, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[1, :2] = 0
    packed = torch.cat((torch.arange(5), torch.arange(6))).expand(4, -1)
    return [
        {"input_ids": ids[:, :10], "labels": ids[:, :10]},
        {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask},
        {"input_ids": ids, "labels": ids.masked_fill(packed == 0, -100), "position_ids": packed},
    ]


def both(accelerator: Any, plain: nn.Module, num: int = 3) -> tuple[list[float], list[float], nn.Module]:
    """Return the numbers of one process, those of this rank, and the prepared model."""
    model = copy.deepcopy(plain)
    expected = updates(plain, adamw(plain), batches()[:num])
    model, optimizer = accelerator.prepare(model, adamw(model))
    return expected, updates(model, optimizer, batches()[:num], accelerator), model


def train_families(axis: str, kinds: list[str]) -> dict[str, Any]:
    accelerator, found = start(sizes={f"{axis}_size": 2}), {}
    for kind in kinds:
        plain = tiny_model(kind)
        expected, trained, model = both(accelerator, plain)
        inputs = {"input_ids": batches()[1]["input_ids"], "attention_mask": batches()[1]["attention_mask"]}
        with torch.no_grad():
            logits = [each(**inputs).logits for each in (plain, model)]
            texts = [
                each.generate(inputs["input_ids"][:, :6], max_new_tokens=4, do_sample=False) for each in (plain, model)
            ]
            own = model(**inputs, labels=inputs["input_ids"], skip_logits=True).logits
        assert own.shape[1] < logits[1].shape[1], "where the loss is enough, no logits are gathered"
        found[kind] = (expected, trained, (logits[0] - logits[1]).abs().max().item(), texts[0].equal(texts[1]))
        accelerator.free_memory()
    # Each length and each kind of mask would be compiled anew.
    accelerator = start(sizes={f"{axis}_size": 2}, dynamo_backend="eager")
    found["compiled"] = both(accelerator, tiny_model("llama"), 1)[:2]
    if axis == "cp":
        kernels = register_attention_kernels()
        accelerator = start(sizes={"cp_size": 2}, dynamo_backend="eager")
        found["compiled ring"] = both(accelerator, tiny_model("llama"), 1)[:2]
        del kernels
    return found


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    chosen = selected(request, "test_a_family_of_transformers_trains_and_generates_as_on_one_process")

    @functools.cache
    def train(axis: str) -> list[dict[str, Any]]:
        return run_ranks(train_families, 2, axis, [kind for along, kind in chosen if along == axis], timeout=150)

    return train


@pytest.mark.parametrize(("axis", "kind"), crossed(["sp", "cp"], FAMILIES))
def test_a_family_of_transformers_trains_and_generates_as_on_one_process(axis: str, kind: str, families: Any):
    for found in families(axis):
        expected, trained, difference, is_same_text = found[kind]
        assert trained == pytest.approx(expected, abs=2e-6, rel=2e-6)
        assert difference < 1e-3  # after updates of 1e-2 that follow the sign of a gradient
        assert is_same_text


@pytest.mark.parametrize(("axis", "name"), [("sp", "compiled"), ("cp", "compiled"), ("cp", "compiled ring")])
def test_compiled_blocks_compute_the_same(axis: str, name: str, families: Any):
    for found in families(axis):
        expected, trained = found[name]
        assert trained == pytest.approx(expected, abs=2e-6, rel=2e-6)


# --- four ranks: for sequences alone, and two for the shards ----------------------------------------------------------


def window_rows() -> Tensor:
    return torch.cat([b["input_ids"] for b in batches()[1:]])


build_qwen3 = functools.partial(tiny_model, "qwen3")


def dropped(accelerator: Any) -> tuple[float, float]:
    """Return a random number that is drawn within a forward, and one behind it."""
    model = accelerator.prepare(tiny_model("llama", attention_dropout=0.5))
    torch.manual_seed(accelerator.readers.rank)
    drawn: list[float] = []
    handle = model.lm_head.register_forward_hook(lambda *_: drawn.append(torch.rand(()).item()))
    model(**batches()[0])
    handle.remove()
    accelerator.free_memory()
    return drawn[0], torch.rand(()).item()


def on_four_ranks(directory: str) -> dict[str, Any]:
    sizes = {"sp_size": 2, "dp_shard_size": 2}
    found: dict[str, Any] = {}
    begin = functools.partial(start, sizes=sizes, gradient_accumulation_steps=4)
    found["window"] = resume_open_window(begin, build_qwen3, window_rows(), directory)
    accelerator = begin()
    found["places"] = (accelerator.readers.rank, accelerator.readers.world_size, accelerator.num_processes)
    found["gathered"] = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    found["dropped"] = dropped(accelerator)
    layers = start(sizes={"sp_size": 2, "tp_size": 2}, config={"parallel": {"loss_parallel": True}})
    found["dropped in parts of layers"] = dropped(layers)
    found["parts of layers"] = both(layers, tiny_model("qwen3"))[:2]
    found["replicas"] = both(start(sizes={"sp_size": 2, "dp_replicate_size": 2}), tiny_model("llama"))[:2]
    # Fewer heads of keys than ranks; recomputed activations, and 16 bits.
    for name, options in {
        "checkpointed": {"config": {"fsdp": {"activation_checkpointing": True}}},
        "bf16": {"mixed_precision": "bf16"},
    }.items():
        *found[name], model = both(start(sizes={"sp_size": 4}, **options), tiny_model("qwen3"))
    model.save_pretrained(f"{directory}-export")
    exported = type(tiny_model("qwen3")).from_pretrained(f"{directory}-export")
    found["export"] = exported.config._attn_implementation
    return found


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, str(tmp_path_factory.mktemp("mesh") / "state"), timeout=150)


def test_logits_are_those_of_all_tokens_and_a_window_that_is_saved_open_goes_on(meshed: list[dict[str, Any]]):
    check_open_window(meshed[0]["window"], build_qwen3(), window_rows())


def test_ranks_that_share_sequences_are_one_reader_and_drop_on_their_own(meshed: list[dict[str, Any]]):
    for rank, found in enumerate(meshed):
        assert found["places"] == (rank // 2, 2, 4)
        assert found["gathered"] == [0, 2] or found["gathered"] == [1, 3]
    within, behind = zip(*(found["dropped"] for found in meshed), strict=True)
    assert len(set(within)) == 4
    assert behind[0] == behind[1] != behind[2] == behind[3]


def test_ranks_that_share_a_slice_drop_the_same_of_it(meshed: list[dict[str, Any]]):
    within, behind = zip(*(found["dropped in parts of layers"] for found in meshed), strict=True)
    assert within[0] == within[1] != within[2] == within[3]
    assert len(set(behind)) == 1


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("parts of layers", 2e-6), ("replicas", 2e-6), ("checkpointed", 2e-6), ("bf16", 0.05)],
)
def test_options_of_fsdp_hold_for_shared_sequences(name: str, tolerance: float, meshed: list[dict[str, Any]]):
    for found in meshed:
        expected, trained = found[name]
        assert trained == pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_what_is_saved_names_the_attention_of_the_model(meshed: list[dict[str, Any]]):
    assert {found["export"] for found in meshed} == {"sdpa"}


# --- what is refused --------------------------------------------------------------------------------------------------


SIX = {"num_attention_heads": 6}


def changed(kind: str, **values: Any) -> nn.Module:
    model = tiny_model(kind)
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            MLP(),
            "^sp_size=3: MLP is not a causal language model of transformers.*set sp_size and cp_size to 1, and shard",
        ),
        (build_model("bert"), "BertForMaskedLM is not a causal language model"),
        (nn.ModuleList([tiny_model("llama"), MLP()]), "ModuleList is not a causal language model"),
        (tiny_model("llama"), "LlamaForCausalLM has num_attention_heads=4, which sp_size=3 does not divide; use s"),
        (changed("llama", **SIX, layer_types=["linear_attention"]), "has layers of linear_attention, in which tokens"),
        (changed("llama", **SIX, rope_parameters={"rope_type": "dynamic"}), "positions of type dynamic, which depend"),
        (changed("llama", **SIX, is_causal=False), "is not causal, and packed rows"),
        (changed("mixtral", **SIX, output_router_logits=True), "has output_router_logits=True, and the auxiliary loss"),
        (
            tiny_model("opt", num_attention_heads=3, hidden_size=48),
            "has a OPTLearnedPositionalEmbedding, which takes p",
        ),
        (tiny_model("gpt_oss", num_attention_heads=6), "has sinks in GptOssAttention, one for each head of the whole"),
        (changed("bloom", **SIX), "does not take attention from transformers' registry, or no"),
    ],
)
def test_a_model_whose_tokens_meet_elsewhere_is_refused(model: nn.Module, message: str):
    with pytest.raises(ConfigError, match=message):
        find_language_model(model, 3, "sp_size=3")


def test_heads_are_shared_out_over_ranks_of_both_kinds():
    with pytest.raises(ConfigError, match="num_attention_heads=4, which sp_size=2 x tp_size=4 does not divide; use s"):
        find_language_model(tiny_model("llama"), 2, "sp_size=2", 4)


@pytest.fixture
def one_of_two() -> Iterator[nn.Module]:
    """A model of the first of two ranks, which do not communicate."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = tiny_model("llama")
    shard_sequences(model, init_device_mesh("cpu", (2,)))
    yield model
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token_type_ids": torch.zeros(4, 10)}, "is given token_type_ids, and sequence parallelism shares out att"),
        (
            {"output_attentions": True},
            "is asked for attentions, which no rank has in full; set output_attentions=False",
        ),
        ({"output_router_logits": True}, "is asked for router logits, of which no rank has all; leave them out"),
    ],
)
def test_inputs_that_cannot_be_shared_out_are_refused(one_of_two: nn.Module, inputs: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM {message}"):
        one_of_two(**batches()[0], **inputs)


def test_a_cache_that_is_given_holds_all_tokens(one_of_two: nn.Module):
    # From transformers 5.24 on the first.
    name = "cache" if "cache" in inspect.signature(type(one_of_two).forward).parameters else "past_key_values"
    ids, cache = batches()[0]["input_ids"], DynamicCache()
    assert one_of_two.eval()(input_ids=ids, **{name: cache}).logits.shape[1] == ids.shape[1] == cache.get_seq_length()


def test_a_loss_or_an_attention_that_does_not_know_of_slices_is_refused(one_of_two: Any):
    inner, attention = one_of_two.forward.own, one_of_two.model.layers[0].self_attn
    one_of_two.forward.inner = lambda labels, **given: {"loss": inner(**given).logits.sum()}
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not compute its loss by its loss_function, and that"):
        one_of_two(**batches()[0])
    one_of_two.forward.inner, attend = inner, attention.forward
    attention.forward = lambda sharded_sequence, **given: attend(**given)
    with pytest.raises(ConfigError, match="LlamaAttention does not pass the options of its model on to attention"):
        one_of_two(**batches()[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"parallel": {"sp_size": 2, "ep_size": 3}, "launch": {"num_processes": 4}},
            "ep_size=3 .* does not divide the 4 ranks along dp_shard x sp, over which experts",
        ),
        (
            {"parallel": {"sp_size": 2}, "strategy": "ddp"},
            "sp_size=2 .* does not go with strategy=ddp .*use strategy 'f",
        ),
        (
            {"parallel": {"sp_size": 2}, "data": {"dispatch_batches": True}},
            "dispatch_batches=true .* has one rank read for all, and parallel.sp_size=2 .* needs ranks that read",
        ),
        (
            {"parallel": {"sp_size": 3}, "launch": {"num_processes": 4}},
            r"sp_size=3 .* makes 3 process\(es\), and this job",
        ),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(config: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(file=config)
