"""Context parallelism: torch's ring attention against one process, with CUDA's kernels computed by the CPU's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_trainer.config.resolve import resolve
from accel_trainer.contrib.planner import Cluster, Workload, plan_layout
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.parallelism import TorchContextParallelConfig
from accel_trainer.strategies.parallel.sequence_parallel import find_language_model, shard_sequences
from tests.attention_kernels import register_attention_kernels
from tests.loops import adamw, start, updates
from tests.ranks import preload, run_ranks
from tests.strategies.parallel.test_sequence_parallel import changed, tiny_model

preload(
    "transformers.models.auto.modeling_auto",
    "accel_trainer.accelerator",
    "torch.distributed.tensor.experimental._attention",
)

# Slices are of 64 tokens: with fewer than 192, a rank of four would have nothing but what fills them up.
LENGTH = 230


def model_of(kind: str, **changes: Any) -> nn.Module:
    return tiny_model(kind, max_position_embeddings=LENGTH, sliding_window=None, **changes)


def batches() -> list[dict[str, Tensor]]:
    """Return rows that no number of ranks divides: plain, and padded behind their tokens."""
    ids = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 170:] = 0
    return [
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask},
    ]


@functools.cache
def alone(kind: str) -> tuple[nn.Module, list[float], Tensor]:
    """Return a model, and the numbers and then the logits of one process."""
    model = model_of(kind, head_dim=12) if kind == "qwen3" else model_of(kind)
    plain = copy.deepcopy(model)
    expected = updates(plain, adamw(plain), batches())
    with torch.no_grad():
        return model, expected, plain(input_ids=batches()[0]["input_ids"]).logits


def both(kind: str, **options: Any) -> tuple[list[float], list[float], float]:
    """Return the numbers of one process, those of this rank, and how far logits are from each other then."""
    model, expected, expected_logits = alone(kind)
    model = copy.deepcopy(model)
    accelerator = start(**options)
    model, optimizer = accelerator.prepare(model, adamw(model))
    trained = updates(model, optimizer, batches(), accelerator)
    with torch.no_grad():
        logits = model(input_ids=batches()[0]["input_ids"]).logits
    return expected, trained, (expected_logits - logits).abs().max().item()


def on_four_ranks() -> dict[str, Any]:
    sharded = {"config": {"fsdp": {"activation_checkpointing": True}}}
    found: dict[str, Any] = {
        "gathered": both("qwen3", sizes={"cp_size": 4}, **sharded),
        "gathered in bf16": both("gpt2", sizes={"cp_size": 2, "dp_shard_size": 2}, mixed_precision="bf16"),
        "gathered beside tp": both("llama", sizes={"cp_size": 2, "tp_size": 2}),
    }
    kernels = register_attention_kernels()
    found |= {
        # Fewer heads of keys; heads whose size is no multiple of 8, and recomputed activations.
        "at once": both("llama", sizes={"cp_size": 4}),
        "from rank to rank": both(
            "qwen3",
            sizes={"cp_size": 4, "cp_handler": TorchContextParallelConfig("alltoall")},
            **sharded,
        ),
        "bf16, with shards": both("gpt2", sizes={"cp_size": 2, "dp_shard_size": 2}, mixed_precision="bf16"),
    }
    found["beside tp"] = both("llama", sizes={"cp_size": 2, "tp_size": 2})
    found["beside ep"] = both("mixtral", sizes={"cp_size": 2, "dp_shard_size": 2, "ep_size": 2})
    accelerator = start(sizes={"cp_size": 2, "dp_shard_size": 2})
    found["places"] = (accelerator.readers.rank, accelerator.readers.world_size, accelerator.context_parallel_rank)
    del kernels
    return found


@pytest.fixture(scope="module")
def meshed() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, timeout=150)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("at once", 2e-6),
        ("from rank to rank", 2e-6),
        ("bf16, with shards", 0.05),
        ("beside tp", 2e-6),
        ("beside ep", 2e-6),
        ("gathered", 2e-6),
        ("gathered in bf16", 0.05),
        ("gathered beside tp", 2e-6),
    ],
)
def test_a_model_trains_as_on_one_process(name: str, tolerance: float, meshed: list[dict[str, Any]]):
    for found in meshed:
        expected, trained, difference = found[name]
        assert trained == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert difference < 500 * tolerance


def test_ranks_that_share_sequences_are_one_reader(meshed: list[dict[str, Any]]):
    assert [found["places"] for found in meshed] == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "mistral",
            {},
            "has sliding_window 4, and ring .* without dropout; change that, set cp_comm_strategy to allgather, use",
        ),
        ("gemma3_text", {}, "has layers of sliding_attention, and ring attention is"),
        (
            "llama",
            {"attention_dropout": 0.1},
            r"drops in attention by attention_dropout=0.1, and ring .* use sp_size, or",
        ),
        ("gpt2", {"attn_pdrop": 0.1}, r"drops in attention by attn_pdrop=0.1, and ring attention"),
        (
            "llama",
            {"_attn_implementation": "eager"},
            "was loaded with attn_implementation eager, and ring attention is",
        ),
    ],
)
def test_a_model_whose_attention_is_another_is_refused_by_the_ring(kind: str, changes: dict[str, Any], message: str):
    model = changed(kind, **changes)
    with pytest.raises(ConfigError, match=f"^cp_size=3: {type(model).__name__} {message}"):
        find_language_model(model, 3, "cp_size=3", comm_strategy="alltoall", device=torch.device("meta"))
    assert find_language_model(model, 3, "cp_size=3", comm_strategy="allgather") is model


def test_attention_that_takes_no_mask_of_ours_is_refused():
    model = changed("llama", _attn_implementation="flash_attention_2")
    message = "^cp_size=2: LlamaForCausalLM was loaded with attn_implementation flash_attention_2, and context .* sdpa"
    with pytest.raises(ConfigError, match=message):
        find_language_model(model, 2, "cp_size=2", comm_strategy="allgather")


def test_a_device_without_the_kernels_is_refused_by_the_ring():
    message = "^cp_size=2: LlamaForCausalLM asks for ring attention on 'cpu', and .*; set cp_comm_strategy to allgather"
    with pytest.raises(ConfigError, match=message):
        find_language_model(model_of("llama"), 2, "cp_size=2", comm_strategy="alltoall", device=torch.device("cpu"))


def alone_of_two(comm_strategy: str) -> Iterator[nn.Module]:
    kernels = register_attention_kernels()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = model_of("llama")
    shard_sequences(model, init_device_mesh("cpu", (2,)), comm_strategy, torch.device("cpu"))
    yield model
    dist.destroy_process_group()
    del kernels


@pytest.fixture
def one_of_two() -> Iterator[nn.Module]:
    """A model of the first of two ranks, which do not communicate, with torch's ring alone."""
    yield from alone_of_two("alltoall")


@pytest.fixture
def gathering() -> Iterator[nn.Module]:
    """The same, which gathers keys and values where the ring does not serve."""
    yield from alone_of_two("allgather")


def padded(where: slice, label: int) -> dict[str, Tensor]:
    ids, mask = torch.full((2, 10), 5), torch.ones(2, 10, dtype=torch.long)
    mask[1, where] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, label), "attention_mask": mask}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            padded(slice(2), -100),
            "padding before tokens or labels that count, and ring attention is causal SDPA to all",
        ),
        (
            padded(slice(7, None), 5),
            "padding before tokens or labels that count, .* set cp_comm_strategy to allgather, pad behind the tokens",
        ),
        (
            {"input_ids": torch.ones(2, 6, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
            "rows packed of several documents, by position_ids, and ring",
        ),
    ],
)
def test_rows_whose_tokens_attend_to_others_are_refused(one_of_two: nn.Module, inputs: dict[str, Tensor], message: str):
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM is given {message}"):
        one_of_two(**inputs)


@pytest.mark.parametrize("shape", [(2, 1, 10, 10), (2, 9)])
def test_a_mask_of_other_tokens_is_refused(gathering: nn.Module, shape: tuple[int, ...]):
    with pytest.raises(ConfigError, match=rf"a mask of \({str(shape)[1:-1]}\) for 10 tokens, and .* takes \(B, 10\)"):
        gathering(**padded(slice(0), 5) | {"attention_mask": torch.ones(shape)})


def test_attention_without_a_mask_is_refused(gathering: Any):
    attention = gathering.model.layers[0].self_attn
    attend = attention.forward
    attention.forward = lambda attention_mask, **given: attend(attention_mask=None, **given)
    with pytest.raises(ConfigError, match="LlamaAttention takes no mask, by which tokens know their places"):
        gathering(**padded(slice(2), -100))


def test_attention_that_asks_for_more_than_causality_is_refused(one_of_two: Any):
    inputs, attention = {"input_ids": torch.ones(2, 6, dtype=torch.long)}, one_of_two.model.layers[0].self_attn
    attend = attention.forward
    attention.forward = lambda **given: attend(**given, softcap=30.0)
    with pytest.raises(ConfigError, match="LlamaAttention asks for softcap, and ring attention is causal SDPA to all"):
        one_of_two(**inputs)
    attention.forward, attention.is_causal = attend, False
    with pytest.raises(ConfigError, match="LlamaAttention asks for is_causal=False, and ring attention is"):
        one_of_two(**inputs)


def test_two_ways_to_share_sequences_are_refused():
    with pytest.raises(
        ConfigError, match=r"parallel.cp_size=2 .* contradicts parallel.sp_size=2 .*set one of them to 1"
    ):
        resolve(file={"parallel": {"cp_size": 2, "sp_size": 2}})


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_has_the_keys_and_values_that_pass_by():
    resolved = resolve(file={"parallel": {"cp_size": 4, "dp_replicate_size": 2}, "mixed_precision": "bf16"})
    with torch.device("meta"):
        model = model_of("llama")
    plan = plan_layout(model, resolved, 64, Workload(batch=2, sequence=1024), Cluster())
    assert plan.sizes == {"dp_replicate": 2, "dp_shard": 8, "cp": 4, "sp": 1, "tp": 1, "ep": 1}
    passing = {(each.kind, each.num_bytes) for each in plan.exchanges if each.axis == "cp" and each.num_bytes > 4}
    # B x H x L x D of keys and values, in 2 layers: in bf16 forward and backward, and as many gradients in fp32.
    elements = 2 * 2 * 1024 * 8 * 2 * 2
    assert passing == {("all_gather", 2 * 2 * elements), ("all_to_all", 4 * elements)}
