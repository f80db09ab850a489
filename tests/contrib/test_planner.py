"""Plans of layouts: against steps of real ranks, closed forms, and at sizes that nobody has here."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_trainer.config import resolve
from accel_trainer.contrib.planner import Cluster, LayoutPlan, Workload, fake_job, plan_layout
from accel_trainer.errors import ConfigError
from tests.cells import beyond, selected
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "transformers.models.auto.modeling_auto", "torch.profiler")

# B batch, L sequence
B, L = 2, 48
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "fsdp2 bf16": (2, {"strategy": "fsdp2", "mixed_precision": "bf16"}),
    "checkpointing": (2, {"strategy": "fsdp2", "fsdp": {"activation_checkpointing": True}}),
    "chunked loss": (2, {"strategy": "fsdp2", "loss_chunk_tokens": 16}),
    "ddp": (2, {"strategy": "ddp"}),
    "ddp copies": (2, {"strategy": "ddp", "ddp": {"gradient_as_bucket_view": False}}),
    "ddp accumulation": (2, {"strategy": "ddp", "accumulation": {"num_steps": 2}}),
    "tp": (2, {"parallel": {"tp_size": 2}}),
    "sp": (2, {"parallel": {"sp_size": 2}}),
    "accumulation": (2, {"strategy": "fsdp2", "accumulation": {"num_steps": 3}}),
    "tp x fsdp2": (4, {"parallel": {"tp_size": 2}}),
    "hsdp": (4, {"parallel": {"dp_replicate_size": 2, "dp_shard_size": 2}}),
    "mixtral": (2, {"strategy": "fsdp2"}),
    "mixtral ep": (2, {"parallel": {"ep_size": 2}}),
    "qwen3_moe tp": (2, {"parallel": {"tp_size": 2}}),
    "qwen3_moe ep": (4, {"parallel": {"ep_size": 2}}),
    "mixtral ep x sp": (4, {"parallel": {"ep_size": 2, "sp_size": 2}}),
}


def build(name: str = "llama") -> nn.Module:
    """Return the small model of a layout; tokens of mixtures go to their experts in turn."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.partition(" ")[0]
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 500, "num_hidden_layers": 2}
    if kind not in ("mixtral", "qwen3_moe"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    number = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    sizes |= {"moe_intermediate_size": 96, "head_dim": 16, number: 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for where, module in model.named_modules():
        if where.endswith("mlp.gate"):
            module.register_forward_hook(in_turn)
    return model


def in_turn(module: nn.Module, args: Any, output: Any) -> Any:
    *others, chosen = output
    return (*others, torch.arange(chosen.numel(), device=chosen.device).view_as(chosen) % 4)


def plan(
    num_processes: int, options: dict[str, Any], ranks_per_node: int = 8, name: str = "llama", **workload: Any
) -> LayoutPlan:
    with torch.device("meta"):
        model = build(name)
    resolved = resolve(file=options, environ={})
    cluster = Cluster(ranks_per_node=ranks_per_node)
    workload = {"batch": B, "sequence": L, "is_on_gpu": False, **workload}  # as the ranks that are measured
    return plan_layout(model, resolved, num_processes, Workload(**workload), cluster)


# --- real ranks -------------------------------------------------------------------------------------------------------


class RealRank:
    """A prepared model on this rank, and the sizes of its updates."""

    def __init__(self, accelerator: Any, model: nn.Module, tokens_BL: torch.Tensor) -> None:
        self.accelerator, self.tokens_BL, self.gradients = accelerator, tokens_BL, 0
        trained = [p for p in model.parameters() if p.requires_grad]
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(trained))

    def update(self) -> None:
        for _ in range(self.accelerator.gradient_accumulation_steps):
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=self.tokens_BL, labels=self.tokens_BL).loss
                self.accelerator.backward(loss)
                del loss
                if self.accelerator.sync_gradients:
                    self.gradients = size(p.grad for p in self.model.parameters() if p.requires_grad)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def saved_bytes(self) -> int:
        """Return what autograd keeps between forward and backward, but parameters and what was freed again."""
        saved = {}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.model(input_ids=self.tokens_BL, labels=self.tokens_BL).loss
        own = {local(p).untyped_storage().data_ptr() for p in self.model.parameters()}
        num_bytes = sum(storage.nbytes() for at, storage in saved.items() if at not in own)
        self.accelerator.backward(loss)
        return num_bytes

    def profiled_update(self) -> tuple[int, Counter[str], int]:
        """Return by how much the allocator's memory grew at most in an update, its collectives, and rows' bytes."""
        from torch.profiler import ProfilerActivity, profile

        time.sleep(0.1)  # gloo's threads let go of what they have sent
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
            self.update()
        events = profiled.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        calls = Counter(event.name() for event in events if event.name().startswith("c10d::"))
        exchanged = [event.shapes()[0] for event in events if event.name() == "c10d::alltoall_base_"]
        num_bytes = sum(4 * math.prod(shape) for shape in exchanged)
        return max(itertools.accumulate(change for _, change in changes)), calls, num_bytes


def local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def size(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def measure(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return what this rank takes in each of these layouts."""
    from accel_trainer import Accelerator

    found = {}
    for name in names:
        accelerator = Accelerator(cpu=True, config=LAYOUTS[name][1])
        rank = RealRank(accelerator, build(name), torch.zeros(B, L, dtype=torch.long))
        found[name] = measure_rank(rank, has_buckets=name.startswith("ddp"))
    return found


def measure_rank(rank: RealRank, *, has_buckets: bool) -> dict[str, Any]:
    for _ in range(2):  # DDP makes its buckets anew after the first
        rank.update()
    gc.collect()
    # Of several: on a busy machine gloo's threads hold buffers of an update for longer.
    peak, calls, exchanged = min((rank.profiled_update() for _ in range(4)), key=lambda each: each[0])
    found = {"parameters": size(rank.model.parameters()), "gradients": rank.gradients, "calls": calls}
    found["exchanged"] = exchanged
    found["optimizer_state"] = size(value for state in rank.optimizer.state.values() for value in state.values())
    buckets = rank.gradients if has_buckets else 0
    fixed = found["parameters"] + found["optimizer_state"] + buckets + 2 * rank.tokens_BL.nbytes
    found |= {"peak": fixed + peak, "activations": rank.saved_bytes()}
    rank.accelerator.free_memory()
    return found


NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
}


# In the sample: what is planned by formulas of its own.
_SAMPLE = ("fsdp2", "checkpointing", "chunked loss", "ddp", "ddp accumulation", "sp", "tp x fsdp2", "mixtral ep")


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, dict[str, Any]]]]:
    """Return what gives, for a number of ranks, what each takes in the layouts of so many: they share a job."""
    names = [name for (name,) in selected(request, "test_a_plan_is_what_a_rank_takes")]

    @functools.cache
    def of(num_ranks: int) -> list[dict[str, dict[str, Any]]]:
        return run_ranks(measure, num_ranks, [name for name in names if LAYOUTS[name][0] == num_ranks], timeout=110)

    return of


@pytest.mark.parametrize("name", [name if name in _SAMPLE else beyond(name) for name in LAYOUTS])
def test_a_plan_is_what_a_rank_takes(name: str, measured: Any):
    num_processes, options = LAYOUTS[name]
    planned = plan(num_processes, options, name=name)
    by_rank = [found[name] for found in measured(num_processes)]
    found = by_rank[0]
    for part in ("parameters", "gradients", "optimizer_state"):
        assert getattr(planned, part) == found[part], part
    if name != "chunked loss":  # its gradients are made in the forward, and no hook of autograd sees them
        assert planned.activations == pytest.approx(found["activations"], rel=0.05)
    assert planned.peak == pytest.approx(min(each["peak"] for each in by_rank), rel=0.05)
    calls: Counter[str] = Counter()
    for call, times in found["calls"].items():
        calls[NAMES.get(call.removeprefix("c10d::"), "all_reduce")] += times * ("broadcast" not in call)
    exchanged: Counter[str] = Counter()
    for exchange in planned.exchanges:
        exchanged[exchange.kind] += exchange.calls
    assert exchanged == +calls
    exchanged_bytes = sum(each.num_bytes for each in planned.exchanges if each.kind == "all_to_all")
    assert exchanged_bytes == pytest.approx(found["exchanged"], rel=0.05)
    assert planned.assumes_balance == name.startswith(("mixtral", "qwen3_moe"))


# --- closed forms -----------------------------------------------------------------------------------------------------

LAYER, OUTER, NORM = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 2 * 64, 500 * 64, 64
"""Parameters of a layer, of the embedding as of the head, and of the norm between layers and head."""


def test_collectives_are_those_of_full_parameters_and_take_what_a_ring_takes():
    planned = plan(8, {"parallel": {"dp_replicate_size": 2, "dp_shard_size": 4}}, ranks_per_node=4)
    gather, scatter, reduce = planned.exchanges
    full = 4 * (2 * LAYER + 2 * OUTER + NORM)
    assert (gather.kind, gather.axis, gather.num_ranks, gather.calls) == ("all_gather", "dp_shard", 4, 5)
    assert gather.num_bytes == full + 4 * 2 * LAYER  # layers are gathered again for the backward
    assert gather.seconds == pytest.approx(gather.num_bytes * 3 / 4 / 300e9)  # within a machine
    assert (scatter.kind, scatter.num_bytes) == ("reduce_scatter", full)
    assert (reduce.kind, reduce.axis, reduce.num_bytes) == ("all_reduce", "dp_replicate", full // 4)
    assert reduce.seconds == pytest.approx(2 * reduce.num_bytes / 2 / 50e9)  # two machines, a link of each rank
    assert not any(each.is_awaited for each in planned.exchanges)
    # Backward twice the products of the forward; attention computes its scores again.
    matrices, scores_and_values = 2 * L * (2 * (LAYER - 2 * 64) + OUTER), 2 * 2 * 2 * L * L * 64
    rotations = planned.flops - B * (3 * matrices + 3.5 * scores_and_values)
    assert rotations in (0, 2 * L * 16 // 2)  # transformers 5.17 multiplies positions and frequencies of heads of 16


def test_what_ranks_of_one_sample_exchange_is_waited_for():
    planned = plan(8, {"parallel": {"tp_size": 2}})
    awaited = [each for each in planned.exchanges if each.is_awaited]
    assert {each.axis for each in awaited} == {"tp"}
    assert (planned.num_readers, planned.rows) == (4, 4 * B)
    assert planned.exposed_seconds >= sum(each.seconds for each in awaited)
    sums = [each for each in awaited if each.kind == "all_reduce"]
    # Of embedding, attention and MLP in a layer, forward and backward, tokens of all rows.
    assert sums[0].num_bytes % (4 * B * L * 64) == 0


def test_shards_are_updated_with_the_temporaries_of_shards():
    full = plan(1, {}, sequence=1, is_on_gpu=True)
    assert full.peak_parts["activations"] == pytest.approx(full.parameters, rel=0.01)  # of the update, all at once
    sharded = plan(4, {"strategy": "fsdp2"}, sequence=1, is_on_gpu=True)
    for part in ("parameters", "gradients", "optimizer_state", "activations"):
        assert sharded.peak_parts[part] <= 1.01 * full.peak_parts[part] / 4, part


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_micro_batches_that_exchange_gradients_do_so_as_often_as_there_are(strategy: str):
    def reduced(**accumulation: Any) -> list[tuple[int, int]]:
        planned = plan(2, {"strategy": strategy, "accumulation": accumulation})
        return [(each.calls, each.num_bytes) for each in planned.exchanges if each.kind != "all_gather"]

    ((calls, num_bytes),) = reduced()
    assert reduced(num_steps=3, sync_each_batch=True) == [(3 * calls, 3 * num_bytes)]
    assert reduced(num_steps=3) == [(calls, num_bytes)]


def test_fp16_is_planned_where_nothing_trains_in_it():
    planned = plan(1, {"mixed_precision": "fp16"})
    assert planned.peak_parts == plan(1, {"mixed_precision": "bf16"}).peak_parts


def test_attention_with_dropout_keeps_what_a_gpus_kernel_keeps():
    from transformers import AutoConfig, AutoModelForCausalLM

    def activations(dropout: float) -> int:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "resid_pdrop": 0, "embd_pdrop": 0}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", attn_pdrop=dropout, **sizes))
        return plan_layout(model, resolve(environ={}), 1, Workload(batch=B, sequence=L), Cluster()).activations

    assert activations(0.1) == activations(0.0)


@pytest.mark.parametrize(
    ("options", "workload", "message"),
    [
        (
            {"strategy": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 0}}},
            {},
            "stage of the DeepSpeed conf",
        ),
        ({"optimizer_in_backward": True}, {}, "optimizer_in_backward=true .* take gradients away"),
        ({"strategy": "ddp", "local_steps": 8}, {}, "local_steps=8 .* take the exchange away"),
        ({"strategy": "fsdp2"}, {"optimizer": "adamv"}, "no optimizer 'adamv' in torch.optim; did you mean 'adam'"),
        ({"parallel": {"tp_size": 3}}, {}, "makes 3 process.es., and this job has 4"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], workload: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        plan(4, options, **workload)


def test_what_is_offloaded_is_no_memory_of_the_device():
    kept = plan(4, {"strategy": "fsdp2"}, is_on_gpu=True)
    offloaded = plan(4, {"strategy": "fsdp2", "fsdp": {"offload_params": True}}, is_on_gpu=True)
    state = ("parameters", "gradients", "optimizer_state")
    assert [offloaded.peak_parts[part] for part in state] == [0, 0, 0]
    assert [getattr(offloaded, part) for part in state] == [getattr(kept, part) for part in state]
    assert (offloaded.activations, offloaded.unsharded) == (kept.activations, kept.unsharded)
    assert offloaded.peak < kept.peak - kept.parameters - kept.optimizer_state + 1


def test_an_engines_offloaded_state_is_none_of_the_devices():
    def of(**zero: Any) -> LayoutPlan:
        options = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, **zero}}
        return plan(2, {"strategy": "deepspeed", "deepspeed": options, "mixed_precision": "fp16"}, is_on_gpu=True)

    host, linear = {"device": "cpu"}, nn.functional.linear
    kept, state, everything = of(), of(offload_optimizer=host), of(offload_optimizer=host, offload_param=host)
    numbers = 2 * LAYER + 2 * OUTER + NORM
    assert (kept.parameters, kept.is_sharded) == (2 * numbers // 2, True)
    assert kept.optimizer_state == pytest.approx(3 * 4 * numbers / 2, rel=0.001)  # fp32 weights, and both moments
    assert kept.peak_parts["optimizer_state"] == kept.optimizer_state
    assert (state.peak_parts["optimizer_state"], state.peak_parts["parameters"]) == (0, kept.parameters)
    assert (everything.peak_parts["optimizer_state"], everything.peak_parts["parameters"]) == (0, 0)
    assert everything.peak < state.peak < kept.peak - 0.9 * kept.optimizer_state
    gathers = sum(each.num_bytes for each in kept.exchanges if each.kind == "all_gather")
    assert gathers >= 2 * numbers  # once at least
    assert nn.functional.linear is linear, "DeepSpeed's own stays behind a stage 3, and computes more again"


def test_what_layers_keep_leaves_a_gpu_but_for_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch):
    inputs = {"input_ids": torch.empty(32, 256, dtype=torch.long, device="meta")}
    options: dict[str, Any] = {"activation_checkpointing": "full"}

    def activations(offloads: bool, **workload: Any) -> int:
        return plan(1, {**options, "activation_offload": offloads}, inputs=inputs, **workload).activations

    kept = activations(False, is_on_gpu=True)
    assert activations(True, is_on_gpu=True) == kept  # less than 512 MiB, which are on their way
    assert activations(True, is_on_gpu=False) == kept  # the host's memory is the device's
    monkeypatch.setattr("accel_trainer.techniques.activations._MOST_BYTES_IN_FLIGHT", 0)
    inputs_of_layers = 2 * 4 * 32 * 256 * 64
    assert activations(True, is_on_gpu=True) == pytest.approx(kept - inputs_of_layers, rel=0.01)


def test_a_gpus_autocast_and_optimizers_take_more_than_those_of_a_cpu():
    """Powers are in fp32 there, and AdamW has the roots of all second moments at once."""

    class Cubes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).pow(3)

    def planned(rows: int, **workload: Any) -> LayoutPlan:
        inputs = {"x": torch.empty(rows, 64, device="meta")}
        with torch.device("meta"):
            model = Cubes()
        resolved = resolve(file={"mixed_precision": "bf16"}, environ={})
        return plan_layout(model, resolved, 1, Workload(inputs=inputs, **workload), Cluster())

    rows, matrix = 1024 * 64, 4 * 64 * 64
    # Kept: what is cubed, in 2 or 4 bytes.
    assert planned(1024).activations - planned(1024, is_on_gpu=False).activations == pytest.approx(2 * rows, abs=64)
    gpu, cpu = planned(1), planned(1, is_on_gpu=False)
    assert gpu.peak == pytest.approx(5 * matrix, rel=0.1)  # weights, gradients, both moments, and the roots
    assert gpu.optimizer_state == cpu.optimizer_state
    fused = planned(1, optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    assert fused.peak == cpu.peak


def test_rows_of_one_document_have_no_mask_of_documents():
    """Attention keeps numbers for each token, and a mask's would be for each pair of them."""

    def activations(length: int, **more: torch.Tensor) -> int:
        ids = torch.empty(1, length, dtype=torch.long, device="meta")
        with torch.device("meta"):
            model: Any = build()
        model.config.use_cache = False  # with a cache transformers looks for no documents
        workload = Workload(inputs={"input_ids": ids, "labels": ids, **more})
        return plan_layout(model, resolve(environ={}), 1, workload, Cluster()).activations

    assert activations(512) == pytest.approx(2 * activations(256), rel=0.01)
    positions = torch.empty(1, 512, dtype=torch.long, device="meta")
    masks = 512 * 512 * (1 + 2 * 4)  # one of bits, and in each of two layers one that is added in fp32
    assert activations(512, position_ids=positions) - activations(512) == pytest.approx(masks, rel=0.02)


def test_dropout_keeps_a_byte_for_each_element_as_on_a_gpu():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dropout = nn.Linear(64, 64, bias=False), nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.layer(x)).sum()

    def activations(*, is_on_gpu: bool) -> int:
        with torch.device("meta"):
            model = Dropping()
        workload = Workload(inputs={"x": torch.empty(1024, 64, device="meta")}, is_on_gpu=is_on_gpu)
        return plan_layout(model, resolve(environ={}), 1, workload, Cluster()).activations

    rows = 1024 * 64
    assert activations(is_on_gpu=True) == pytest.approx(4 * rows + rows, rel=0.01)  # the input, and what was kept
    assert activations(is_on_gpu=False) == pytest.approx(4 * rows + 4 * rows, rel=0.01)


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_layers_that_are_dropped_by_chance_are_planned(is_on_gpu: bool):
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    def peak(dropped: float) -> int:
        sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100}
        sizes |= {"encoder_layers": 2, "decoder_layers": 2}
        config = AutoConfig.for_model("bart", encoder_layerdrop=dropped, decoder_layerdrop=dropped, **sizes)
        with torch.device("meta"):
            model = AutoModelForSeq2SeqLM.from_config(config)
        workload = Workload(batch=B, sequence=L, is_on_gpu=is_on_gpu)
        return plan_layout(model, resolve(environ={}), 1, workload, Cluster()).peak

    assert peak(0.5) == peak(0.0)


@pytest.mark.parametrize("policy", ["full", "selective", "the model's own"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_layers_with_dropout_are_computed_again_as_they_were(kind: str, policy: str):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    def planned(policy: str) -> LayoutPlan:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
        config = AutoConfig.for_model(kind, **sizes)
        assert 0.1 in config.to_dict().values()  # of what is dropped
        with torch.device("meta"):
            model = (AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM).from_config(config)
        if policy == "the model's own":
            model.activation_checkpointing_enable()
            policy = "off"
        resolved = resolve(explicit={"activation_checkpointing": policy, "mixed_precision": "bf16"}, environ={})
        return plan_layout(model, resolved, 1, Workload(batch=B, sequence=L), Cluster())

    kept, again = planned("off"), planned(policy)
    assert again.activations < kept.activations
    assert again.peak <= kept.peak


def test_a_plan_leaves_the_job_that_its_process_is_in_as_it_was():
    alone = plan(4, {"strategy": "fsdp2"})
    with fake_job(2, 2) as process:
        hook = sys.excepthook
        assert plan(4, {"strategy": "fsdp2"}) == alone
        assert sys.excepthook is hook
        assert (dist.get_world_size(), dist.get_rank()) == (process.world_size, process.rank)


class BackwardByValues(torch.autograd.Function):
    """Nothing, whose gradient is asked for its value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if gradient.sum().item() > 0 else -gradient


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_model_whose_step_depends_on_values_is_refused(is_in_backward: bool):
    class Branching(nn.Module):
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            vectors = self.table(input_ids)
            if is_in_backward:
                return {"loss": BackwardByValues.apply(vectors).sum()}
            return {"loss": vectors.sum() if vectors.sum().item() > 0 else vectors.mean()}

    with torch.device("meta"):
        model = Branching()
    resolved = resolve(explicit={"strategy": "fsdp2"}, environ={})
    with pytest.raises(ConfigError, match="Branching cannot take a step on tensors without values"):
        plan_layout(model, resolved, 2, Workload(), Cluster())


def test_policies_of_checkpointing_keep_and_repeat_what_they_say() -> None:
    plans = {
        policy: plan(2, {"strategy": strategy, "activation_checkpointing": policy})
        for strategy, policy in (("fsdp2", "off"), ("fsdp2", "selective"), ("fsdp2", "full"), ("fsdp2", "every:2"))
    }
    off, selective, full, every = plans.values()
    assert off.activations > every.activations > full.activations
    # Of a layer: queries, keys, values, the other matrix of attention, gate and up. Nobody needs that of `down` again.
    products = 2 * B * L * 64 * (64 + 32 + 32 + 64 + 160 + 160)
    attention = 2 * 2 * B * 4 * L * L * 16
    assert full.flops - off.flops == 2 * (products + attention)
    assert every.flops - off.flops == products + attention
    assert selective.flops == off.flops
    # Their results, that of down, and the sums of attention.
    kept = 2 * B * L * 4 * (64 + 32 + 32 + 64 + 4 + 64 + 160 + 160 + 64)
    assert selective.activations - full.activations == pytest.approx(kept, rel=0.03)
    assert [each.checkpointing for each in plans.values()] == list(plans)
