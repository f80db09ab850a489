"""What FSDP2's options do, on two and four CPU ranks: each against the numbers of one plain process."""

from __future__ import annotations

import types
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_trainer.errors import ConfigError
from tests.ranks import preload, run_ranks
from tests.scenarios import Outcome, Scenarios

preload("accel_trainer.accelerator", "transformers.models.llama.modeling_llama")

SCENARIOS = Scenarios()


def run_all() -> dict[str, Outcome]:
    return SCENARIOS.run()


def results(name: str) -> list[Any]:
    return SCENARIOS.results(name, run_all, world_size=2)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + torch.tanh(self.dropout(self.linear(x)))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def build(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def own_rows() -> Tensor:
    return batch().chunk(dist.get_world_size())[dist.get_rank()]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def prepare(model: nn.Module, precision: str = "no", scaler: Any = None, train: bool = True, **options: Any) -> Any:
    """Lay a model out under FSDP2, with an optimizer unless told otherwise; return its unit."""
    from accel_trainer.config import resolve
    from accel_trainer.precision import build_precision
    from accel_trainer.runtime.process import init_process, read_environment
    from accel_trainer.strategies.api import TrainJob
    from accel_trainer.strategies.fsdp2 import FSDP2Strategy

    process = init_process(read_environment(), timeout_seconds=60)
    policy = options.pop("policy", None)
    options.setdefault("wrap_classes", ("Block",))
    explicit = {"strategy": "fsdp2"} | {f"fsdp.{name}": value for name, value in options.items()}
    resolved = resolve(explicit=explicit, environ={})
    job = TrainJob(model, adamw(model) if train else None, resolved, wrap_policy=policy, scaler=scaler)
    return FSDP2Strategy().prepare(job, build_precision(precision, process.device), process)


def train(unit: Any, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = unit.model(own_rows())
        unit.backward(loss)
        unit.step()
        unit.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train_alone(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = adamw(model)
    losses = []
    for _ in range(steps):
        loss = model(batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def refused(call: Any) -> str:
    """Return the message of the ConfigError that `call` raises."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing was refused")


REFERENCE = pytest.approx(train_alone(build()), abs=1e-6)


# --- activation checkpointing --------------------------------------------------------------------------------------


@SCENARIOS.add
def checkpointed_dropout() -> Any:
    losses, gradients, runs = [], [], []
    for checkpointed in (False, True):
        model = build(dropout=0.5)
        unit = prepare(model, activation_checkpointing=checkpointed)
        torch.manual_seed(11)
        loss = unit.model(own_rows())
        unit.backward(loss)
        losses.append(loss.item())
        gradients.append({name: full(p.grad) for name, p in model.named_parameters()})
        runs.append([block.runs for block in model.blocks])
    return losses, gradients, runs


def test_activations_are_computed_again_with_the_same_dropout():
    for losses, (plain, again), runs in results("checkpointed_dropout"):
        assert losses[0] == losses[1]
        assert runs == [[1, 1, 1], [2, 2, 2]]
        assert plain.keys() == again.keys()
        for name, gradient in plain.items():
            assert torch.equal(gradient, again[name]), name


@SCENARIOS.add
def checkpointed_ties() -> Any:
    model = build()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    unit = prepare(model, activation_checkpointing=True)
    unit.backward(unit.model(own_rows()))
    return [block.runs for block in model.blocks], [isinstance(block, FSDPModule) for block in model.blocks]


def test_blocks_that_share_a_weight_are_checkpointed_although_their_parent_is_the_unit():
    assert results("checkpointed_ties") == [([2, 2, 2], [False, True, False])] * 2


@SCENARIOS.add
def checkpointed_instance_forward() -> Any:
    model = build()
    block = model.blocks[1]
    block.forward = types.MethodType(lambda self, x: x * 3.0, block)
    unit = prepare(model, activation_checkpointing=True)
    return unit.model(own_rows()).item(), block.runs


def test_a_forward_that_was_put_on_a_block_is_the_one_that_is_computed_again():
    model = build()
    model.blocks[1].forward = types.MethodType(lambda self, x: x * 3.0, model.blocks[1])
    for rank, (loss, runs) in enumerate(results("checkpointed_instance_forward")):
        assert loss == pytest.approx(model(batch().chunk(2)[rank]).item())
        assert runs == 0


@SCENARIOS.add
def checkpointing_without_blocks() -> Any:
    model = build()
    message = refused(lambda: prepare(model, activation_checkpointing=True, wrap_policy="none", wrap_classes=()))
    return message, isinstance(model, FSDPModule)


def test_checkpointing_without_blocks_is_refused():
    for message, is_sharded in results("checkpointing_without_blocks"):
        assert message.startswith("fsdp.activation_checkpointing=true")
        assert "no module of Net is a unit of its own" in message
        assert "fsdp.wrap_classes" in message
        assert not is_sharded


@SCENARIOS.add
def checkpointed_language_models() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    kinds: dict[str, dict[str, Any]] = {"llama": tiny, "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16}}
    tokens = torch.arange(12).reshape(2, 6) + dist.get_rank()
    found = []
    for kind, sizes in kinds.items():
        for checkpointed in (False, True):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, vocab_size=32, attn_implementation="eager", **sizes)
            model = AutoModelForCausalLM.from_config(config).train()
            unit = prepare(model, activation_checkpointing=checkpointed, wrap_classes=())
            torch.manual_seed(1)
            loss = unit.model(input_ids=tokens, labels=tokens).loss
            unit.backward(loss)
            gradients = [full(p.grad) for p in model.parameters()]
            # In evaluation the cache must go on working.
            model.eval()
            with torch.no_grad():
                outputs = model(input_ids=tokens)
            found.append((loss.item(), gradients, outputs.past_key_values.get_seq_length()))
    return found


def test_language_models_with_a_cache_can_be_checkpointed():
    for llama, llama_again, gpt2, gpt2_again in results("checkpointed_language_models"):
        for plain, again in ((llama, llama_again), (gpt2, gpt2_again)):
            assert plain[0] == again[0]
            assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))
            assert plain[2] == again[2] == 6


# --- ignored modules -----------------------------------------------------------------------------------------------


@SCENARIOS.add
def ignored() -> Any:
    found = {}
    for name, patterns in {"leaf": ("head",), "block": (r"blocks\.1",), "inside": (r"blocks\.\d\.linear",)}.items():
        model = build()
        unit = prepare(model, ignored_modules=patterns)
        losses = train(unit)
        plain = sorted(name for name, p in model.named_parameters() if not isinstance(p, DTensor))
        found[name] = losses, plain, {name: full(p) for name, p in model.named_parameters()}
    return found


def test_ignored_modules_stay_whole_and_equal_on_all_ranks():
    first, second = results("ignored")
    expected = {
        "leaf": ["head.bias", "head.weight"],
        "block": ["blocks.1.linear.bias", "blocks.1.linear.weight"],
        "inside": [f"blocks.{i}.linear.{kind}" for i in range(3) for kind in ("bias", "weight")],
    }
    for name, plain in expected.items():
        for result in (first, second):
            assert result[name][0] == REFERENCE
            assert result[name][1] == plain
        for parameter, value in first[name][2].items():
            assert torch.equal(value, second[name][2][parameter]), (name, parameter)


@SCENARIOS.add
def ignored_in_windows() -> Any:
    found = []
    for each in (False, True):
        model = build()
        unit = prepare(model, ignored_modules=("head",))
        for index, rows in enumerate(own_rows().chunk(2)):
            unit.set_gradient_sync(each or index == 1)
            unit.backward(unit.model(rows) / 2)
        found.append((full(model.head.weight.grad), full(model.stem.weight.grad)))
    # The loss of two models, sent backward through the unit of the one without ignored modules.
    model, other = build(), build()
    unit = prepare(model, ignored_modules=("head",))
    first = prepare(other)
    first.backward(unit.model(own_rows()) + first.model(own_rows()))
    found.append((full(model.head.weight.grad), full(model.stem.weight.grad)))
    # Frozen when it was laid out, and trained later.
    model = build()
    model.head.requires_grad_(False)
    unit = prepare(model, ignored_modules=("head",), train=False)
    model.head.requires_grad_(True)
    unit.backward(unit.model(own_rows()))
    found.append((full(model.head.weight.grad), full(model.stem.weight.grad)))
    return found


def test_gradients_of_ignored_modules_are_averaged_once_per_window():
    model = build()
    model(batch()).backward()
    for found in results("ignored_in_windows"):
        for head, stem in found:
            torch.testing.assert_close(head, model.head.weight.grad)
            torch.testing.assert_close(stem, model.stem.weight.grad)


# --- memory --------------------------------------------------------------------------------------------------------


@SCENARIOS.add
def offloaded() -> Any:
    model = build()
    unit = prepare(model, offload_params=True)
    losses = train(unit)
    unit.backward(unit.model(own_rows()))
    return losses, unit.clip_grad_norm(model.parameters(), 0.1).item()


def test_offloading_changes_no_number():
    model = build()
    train_alone(model)
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    assert results("offloaded") == [(REFERENCE, pytest.approx(norm, rel=1e-5))] * 2


@SCENARIOS.add
def resharding() -> Any:
    found = {}
    for reshard in (True, False):
        model = build()
        unit = prepare(model, reshard_after_forward=reshard)
        states = []

        def note(model: nn.Module = model, states: list[int] = states) -> None:
            states.append(sum(isinstance(p, DTensor) for p in model.parameters()))

        note()
        with torch.no_grad():
            unit.model(own_rows())
        note()
        loss = unit.model(own_rows())
        note()
        with torch.no_grad():
            unit.model(own_rows())
        unit.backward(loss)
        note()
        norm = unit.clip_grad_norm(model.parameters(), float("inf")).item()
        unit.step()
        with torch.inference_mode():
            unit.model(own_rows())
        note()
        # Names are looked up among the sharded parameters.
        state = unit.checkpoint_io().full_optimizer_state()
        unit.zero_grad()
        found[reshard] = states, norm, len(state.get("state", ())), train(unit, 2)
    return found


def test_parameters_are_shards_again_after_a_forward_without_gradients():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    reference = train_alone(build())[1:]
    for rank, found in enumerate(results("resharding")):
        for reshard, (states, found_norm, names, losses) in found.items():
            # 10 parameters; those of the root (4) stay gathered from a forward to its backward, the blocks' as told.
            assert states == [10, 10, 6 if reshard else 0, 10, 10]
            assert found_norm == pytest.approx(norm, rel=1e-5)
            assert names == (10 if rank == 0 else 0)
            assert losses == pytest.approx(reference, abs=1e-6)


# --- prefetching, wrapping, compiling ------------------------------------------------------------------------------


@SCENARIOS.add
def prefetching() -> Any:
    found = {}
    for options in ({"forward_prefetch": True}, {"backward_prefetch": False}):
        model = build()
        unit = prepare(model, **options)
        states = [block._get_fsdp_state() for block in model.blocks]
        found.update(options)
        found[f"{options}"] = (
            [[states.index(s) for s in state._states_to_forward_prefetch] for state in states],
            [[states.index(s) for s in state._states_to_backward_prefetch] for state in states],
            train(unit),
        )
    return list(found.values())[1::2]


def test_prefetching_is_as_configured():
    for (forward, _, losses), (none, backward, losses_without) in results("prefetching"):
        assert forward == [[1], [2], []]
        assert none == [[], [], []]
        # FSDP2 gathers the next unit unless it is given a list: a unit that is gathered already costs nothing.
        assert backward == [[0], [1], [2]]
        assert losses == losses_without == REFERENCE


@SCENARIOS.add
def callable_policy() -> Any:
    model = build()
    unit = prepare(model, policy=lambda module: isinstance(module, nn.Linear) and module.in_features == 8)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)], train(unit)


def test_a_callable_decides_what_is_sharded():
    linears = [f"blocks.{i}.linear" for i in range(3)]
    assert results("callable_policy") == [(["", *linears, "head"], REFERENCE)] * 2


@SCENARIOS.add
def shared_block() -> Any:
    model = build()
    model.blocks[2] = model.blocks[0]
    return train(prepare(model)), isinstance(model.blocks[0], FSDPModule)


def test_a_block_that_runs_twice_trains_as_one():
    model = build()
    model.blocks[2] = model.blocks[0]
    assert results("shared_block") == [(pytest.approx(train_alone(model), abs=1e-6), True)] * 2


@SCENARIOS.add
def prepared_twice() -> Any:
    model = build()
    first = prepare(model, train=False)
    second = prepare(model, train=True)
    return first.model is second.model, train(second)


def test_a_model_that_is_sharded_already_is_taken_as_it_is():
    assert results("prepared_twice") == [(True, REFERENCE)] * 2


@SCENARIOS.add
def scaled() -> Any:
    found = []
    for bad_rank in (None, 1):
        model = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        unit = prepare(model, scaler=scaler)
        unit.backward(unit.model(own_rows()))
        if dist.get_rank() == bad_rank:
            model.stem.weight.grad.to_local()[0, 0] = float("inf")
        norm = unit.clip_grad_norm(model.parameters(), float("inf")).item()
        before = full(model.stem.weight)
        applied = unit.step().applied
        found.append((norm, applied, torch.equal(before, full(model.stem.weight)), scaler.get_scale()))
    mixed = build()
    scaler = torch.amp.GradScaler("cpu")
    message = refused(lambda: prepare(mixed, scaler=scaler, ignored_modules=("head",)))
    return found, message, isinstance(mixed, FSDPModule)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    for (good, bad), message, is_sharded in results("scaled"):
        assert good == (pytest.approx(norm, rel=1e-5), True, False, 1024.0)
        assert bad[1:] == (False, True, 512.0)
        assert message.startswith("fsdp.ignored_modules=")
        assert "cannot unscale sharded and whole gradients together; use bf16" in message
        assert not is_sharded


@SCENARIOS.add
def hidden_outputs() -> Any:
    class Hidden(Net):
        def forward(self, x: Tensor) -> Any:
            return UserDict(loss=super().forward(x))

    unit = prepare(Hidden())
    with torch.no_grad():
        unit.model(own_rows())
    return refused(lambda: unit.model(own_rows()))


def test_an_output_in_which_fsdp_finds_no_tensor_is_refused():
    for message in results("hidden_outputs"):
        assert "the forward of FSDPHidden returns a UserDict" in message
        assert "would not be averaged; return a tensor, dict" in message


# --- what clips ----------------------------------------------------------------------------------------------------


@SCENARIOS.add
def clipping() -> Any:
    from accel_trainer import Accelerator
    from accel_trainer.plugins import FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Block"]))
    model = build()
    stale = list(model.parameters())
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(model(own_rows()))
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    messages = [
        refused(lambda: accelerator.clip_grad_norm_(stale, 1.0)),
        refused(lambda: accelerator.clip_grad_value_(stale, 1.0)),
    ]
    return norm, messages, str(accelerator.distributed_type), optimizer.optimizer.param_groups[0]["lr"]


def test_parameters_taken_before_sharding_cannot_be_clipped():
    model = build()
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found, messages, kind, _ in results("clipping"):
        assert found == pytest.approx(norm, rel=1e-5)
        for message in messages:
            assert "none of the 10 parameters belongs to a prepared model" in message
            assert "take model.parameters() from the model that prepare() returned" in message
        assert kind == "DistributedType.FSDP"


# --- hybrid sharding -----------------------------------------------------------------------------------------------


def hybrid(options: dict[str, Any]) -> Any:
    model = build()
    unit = prepare(model, ignored_modules=("head",), **options)
    losses = train(unit)
    unit.backward(unit.model(own_rows()))
    norm = unit.clip_grad_norm(model.parameters(), 0.1).item()
    weight = model.stem.weight
    return losses, norm, weight.device_mesh.shape, [str(p) for p in weight.placements], weight.to_local().shape[0]


@pytest.mark.parametrize(
    ("options", "env"),
    [({"replicate_size": 2}, {}), ({"replicate_per_node": True}, {"LOCAL_WORLD_SIZE": "2"})],
)
def test_hybrid_sharding_gives_the_same_losses(options: dict[str, Any], env: dict[str, str]):
    model = build()
    reference = train_alone(model)
    model(batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()

    def environ(rank: int) -> dict[str, str]:
        return env | {"LOCAL_RANK": str(rank % int(env.get("LOCAL_WORLD_SIZE", "4")))}

    for losses, found, shape, placements, rows in run_ranks(hybrid, 4, options, env=environ):
        assert losses == pytest.approx(reference, abs=1e-6)
        assert found == pytest.approx(norm, rel=1e-5)
        assert (tuple(shape), placements, rows) == ((2, 2), ["R", "S(0)"], 4)
