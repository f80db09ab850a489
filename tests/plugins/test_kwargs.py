"""Option objects: what they set reaches torch, agrees with what is passed beside them, or is an error."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from accel_trainer import Accelerator, FullyShardedDataParallelPlugin
from accel_trainer.errors import ConfigError
from accel_trainer.plugins import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


class Net(nn.Module):
    """A linear layer that remembers in which dtype it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.computed: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.computed = y.dtype
        return y


def prepared(*handlers: KwargsHandler, **options: Any) -> Net:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers, **options)
    return accelerator.prepare(Net())


def test_autocast_kwargs_switch_autocast_off_in_the_model():
    model = prepared(AutocastKwargs(enabled=False))
    model(torch.ones(1, 4))
    assert model.computed is torch.float32


def test_outputs_are_fp32_unless_they_are_kept():
    x = torch.ones(1, 4)
    assert prepared()(x).dtype is torch.float32
    kept = prepared(AutocastKwargs(output_dtype="kept"))
    assert kept(x).dtype is torch.bfloat16
    assert prepared(config={"output_dtype": "kept"})(x).dtype is torch.bfloat16
    assert copy.deepcopy(kept)(x).dtype is torch.bfloat16
    assert pickle.loads(pickle.dumps(kept))(x).dtype is torch.bfloat16


class Losing(Net):
    """A model that returns its loss, too."""

    def forward(self, x: Tensor, as_tuple: bool = False) -> Any:  # type: ignore[override]
        """Return loss and logits."""
        logits = super().forward(x)
        loss = logits.sum()
        return (loss, logits) if as_tuple else ModelOutput(loss=loss, logits=logits)


def dtypes(strategy: str | None, **options: Any) -> list[Any]:
    """Return the dtypes of loss and logits, in training and without gradients; and whether the class is the model's."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", strategy=strategy, **options)
    model = accelerator.prepare(Losing())
    seen = []
    for is_training, as_tuple in ((True, False), (True, True), (False, False)):
        with torch.set_grad_enabled(is_training):
            output = model(torch.ones(1, 4), as_tuple=as_tuple)
        loss, logits = output if as_tuple else (output["loss"], output["logits"])
        assert type(output) is (tuple if as_tuple else ModelOutput)
        seen += [loss.dtype, logits.dtype]
        if is_training:
            accelerator.backward(loss)
    return seen


def on_ranks() -> tuple[list[list[Any]], torch.dtype]:
    """Return the dtypes under each strategy, and that of a sharded model's output that is kept as it is."""

    def shard_with(handler: KwargsHandler) -> torch.dtype:
        accelerator = Accelerator(cpu=True, strategy="fsdp2", mixed_precision="bf16", kwargs_handlers=[handler])
        return accelerator.prepare(Net())(torch.ones(1, 4)).dtype

    with pytest.raises(ConfigError, match="FSDP2 has no autocast to switch off: it gathers parameters in"):
        shard_with(AutocastKwargs(enabled=False))
    ways = [(strategy, kind) for strategy in ("ddp", "fsdp2") for kind in ("auto", "fp32")]
    seen = [dtypes(strategy, config={"output_dtype": kind}) for strategy, kind in ways]
    return seen, shard_with(AutocastKwargs(output_dtype="kept"))


FP32, BF16 = torch.float32, torch.bfloat16


def test_logits_stay_as_they_are_once_the_model_has_computed_its_loss():
    """A cast would add the logits once more, in fp32, to the peak of memory: 2 GiB for 8 x 2,048 x 32,768."""
    assert dtypes(None) == [FP32, BF16, FP32, BF16, FP32, FP32]
    assert dtypes(None, config={"output_dtype": "fp32"}) == [FP32] * 6
    assert dtypes(None, config={"output_dtype": "kept"}) == [BF16] * 6


@pytest.mark.multirank
def test_logits_stay_as_they_are_on_ranks_and_a_sharded_model_keeps_its_outputs_and_refuses_to_go_without_autocast():
    for seen, kept in run_ranks(on_ranks, 2):
        assert seen == [[FP32, BF16, FP32, BF16, FP32, FP32], [FP32] * 6] * 2
        assert kept is torch.bfloat16


def test_an_unknown_output_dtype_is_an_error():
    with pytest.raises(ConfigError, match=r"output_dtype.*is 'bf16'; expected one of 'auto', 'fp32', 'kept'"):
        prepared(AutocastKwargs(output_dtype="bf16"))


def weights_cast(cache: bool | None) -> int:
    """How many weights are cast by two products with the same weight, in the context of an Accelerator."""
    handlers = [] if cache is None else [AutocastKwargs(cache_enabled=cache)]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    weight = torch.ones(2, 2, requires_grad=True)
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, accelerator.autocast():
        x @ weight
        x @ weight
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")


def test_the_cache_of_autocast_is_as_asked_for():
    assert [weights_cast(None), weights_cast(True), weights_cast(False)] == [1, 1, 2]


def test_autocast_takes_other_options_for_one_block():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    x = torch.ones(2, 2)
    with accelerator.autocast():
        assert (x @ x).dtype is torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype is torch.float32
    off = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with off.autocast():
        assert (x @ x).dtype is torch.float32
    with off.autocast(autocast_handler=AutocastKwargs(enabled=True)):
        assert (x @ x).dtype is torch.bfloat16
    with Accelerator(cpu=True).autocast(AutocastKwargs(enabled=True)):
        assert (x @ x).dtype is torch.float32


def test_a_block_cannot_say_what_models_return():
    with pytest.raises(ConfigError, match="says what prepared models return; pass it to Accelerator"):
        Accelerator(cpu=True).autocast(AutocastKwargs(output_dtype="kept"))


@torch._dynamo.register_backend(name="accel_trainer_recording")
def recording(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
    """A backend that compiles nothing and remembers how it was called."""
    calls.append(options)
    return graph.forward


calls: list[dict[str, Any]] = []


class Blocks(nn.Module):
    """Three equal blocks and a head."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Own(Net):
    """A block with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Stock(nn.Sequential):
    """A block whose forward is torch's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU())


def compile_with(plugin: TorchDynamoPlugin, model: nn.Module | None = None, **options: Any) -> list[dict[str, Any]]:
    """The backend's options of each graph that a prepared model's forward compiles."""
    torch.compiler.reset()
    calls.clear()
    model = Accelerator(cpu=True, dynamo_plugin=plugin, **options).prepare(model or Blocks(Own))
    model(torch.ones(2, 4, requires_grad=True))
    torch.compiler.reset()
    return list(calls)


def test_the_dynamo_plugin_compiles_the_whole_model_once():
    assert compile_with(TorchDynamoPlugin(backend="accel_trainer_recording", fullgraph=True)) == [{}]


def test_a_regional_compilation_compiles_the_equal_blocks_once():
    plugin = TorchDynamoPlugin(backend="accel_trainer_recording", use_regional_compilation=True)
    assert compile_with(plugin) == [{}]
    # Under bf16 the first block gets fp32 and the others bf16.
    assert compile_with(plugin, mixed_precision="bf16") == [{}, {}]
    assert compile_with(plugin, Blocks(Stock)) == [{}]


def test_a_model_whose_forward_is_torchs_own_is_compiled_too():
    # nn.Sequential(...).compile() by itself compiles nothing, in torch 2.13.
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plugin = TorchDynamoPlugin(backend="accel_trainer_recording")
    assert compile_with(plugin, model) == [{}]
    assert torch.equal(pickle.loads(pickle.dumps(model))(torch.ones(1, 4)), copy.deepcopy(model)(torch.ones(1, 4)))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("given", [{"options": {"epilogue_fusion": True}}, {"mode": "reduce-overhead"}])
def test_options_and_mode_reach_the_backend(given: dict[str, Any]):
    assert compile_with(TorchDynamoPlugin(backend="accel_trainer_recording", **given)) == [given]


def test_the_plugin_can_switch_a_configured_compilation_off():
    configured = {"compile": {"backend": "accel_trainer_recording"}}
    assert compile_with(TorchDynamoPlugin(), config=configured) == [{}]
    assert compile_with(TorchDynamoPlugin(disable=True), config=configured) == []
    off = TorchDynamoPlugin(backend="inductor", options={"epilogue_fusion": True}, disable=True)
    assert compile_with(off, config=configured) == []


def test_a_compiled_model_under_bf16_has_one_graph():
    plugin = TorchDynamoPlugin(backend="accel_trainer_recording", fullgraph=True)
    handlers = [AutocastKwargs(cache_enabled=False, output_dtype="kept")]
    assert compile_with(plugin, mixed_precision="bf16", kwargs_handlers=handlers) == [{}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dynamo_plugin": TorchDynamoPlugin(mode="max-autotune", options={})},
            r"sets mode, and compile.backend=no .* does not compile; pass TorchDynamoPlugin\(backend='inductor'\)",
        ),
        ({"dynamo_plugin": TorchDynamoPlugin(options={"a": 1})}, "sets options, and compile.backend=no"),
        (
            {"dynamo_plugin": TorchDynamoPlugin(backend="eager"), "dynamo_backend": "inductor"},
            r"dynamo_backend='inductor' and a TorchDynamoPlugin were both given",
        ),
        ({"dynamo_plugin": TorchDynamoPlugin(backend="eager", mode="fast")}, r"compile.mode.*'fast'"),
        (
            {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
            "kwargs_handlers holds two AutocastKwargs; pass one",
        ),
        (
            {"kwargs_handlers": [AORecipeKwargs(pad_inner_dim=False)]},
            "holds an AORecipeKwargs, and mixed_precision=no .default.; pass mixed_precision='fp8'",
        ),
        (
            {"kwargs_handlers": [GradientAccumulationPlugin()]},
            "holds a GradientAccumulationPlugin; known: AORecipeKwargs, AutocastKwargs.*ProfileKwargs",
        ),
    ],
)
def test_what_cannot_be_honoured_is_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **arguments)


def test_a_mode_and_options_exclude_each_other():
    with pytest.raises(ConfigError, match=r"mode='max-autotune', options=.*takes one of them"):
        TorchDynamoPlugin(backend="inductor", mode="max-autotune", options={"a": 1})


def test_a_value_equal_to_the_default_counts_as_given():
    # D13: upstream cannot tell the two apart.
    assert GradScalerKwargs(init_scale=65536.0).given() == {"init_scale": 65536.0}
    assert AutocastKwargs(enabled=True).autocast_options() == {"enabled": True}


def trace_with(tmp_path: Path, steps: int = 1, **options: Any) -> list[str]:
    profiler = ProfileKwargs(output_trace_dir=tmp_path / "traces", **options).build(rank=3)
    with profiler:
        for _ in range(steps):
            torch.ones(2) + 1
            profiler.step()
    for path in (tmp_path / "traces").iterdir():
        assert json.loads(path.read_text())["traceEvents"]
    return sorted(path.name for path in (tmp_path / "traces").iterdir())


def test_a_trace_is_written_for_the_rank(tmp_path: Path):
    assert trace_with(tmp_path, activities=["cpu"], record_shapes=True) == ["profile_3.json"]


def test_each_cycle_of_a_schedule_is_a_file_and_the_users_callback_is_called(tmp_path: Path):
    seen: list[int] = []
    schedule = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    names = trace_with(tmp_path, 6, schedule_option=schedule, on_trace_ready=lambda trace: seen.append(trace.step_num))
    assert names == ["profile_3.json", "profile_3_1.json"]
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["cpuu"]}, r"unknown activity 'cpuu'; did you mean 'cpu'\?; known: cpu, cuda"),
        ({"schedule_option": {"active": 1}}, r"schedule does not take it .*; give wait, warmup and active"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "active": 0}}, r"schedule does not take it .*; give wait"),
    ],
)
def test_a_profile_that_torch_cannot_make_is_an_error(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ProfileKwargs(**options).build(rank=0)


def test_options_as_arguments_are_those_that_differ_from_the_defaults():
    assert GradScalerKwargs().to_kwargs() == {}
    given = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 2})
    assert given.to_kwargs() == {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}}
    assert given.to_dict()["bucket_cap_mb"] is None
    given.to_kwargs()["comm_state_option"].clear()
    assert given.comm_state_option == {"start_powerSGD_iter": 2}


# --- beside arguments and files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"split_batches": True, "dataloader_config": DataLoaderConfiguration(split_batches=False)},
            r"dataloader_config sets split_batches=False, and Accelerator\(split_batches=True\) was given beside it",
        ),
        (
            {"strategy": "single", "fsdp_plugin": FullyShardedDataParallelPlugin()},
            r"fsdp_plugin sets strategy='fsdp2', and Accelerator\(strategy='single'\) was given beside it; pass one",
        ),
    ],
)
def test_an_argument_and_an_object_that_disagree_are_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **arguments)


def test_an_object_may_repeat_an_argument():
    configuration = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = Accelerator(cpu=True, split_batches=True, dataloader_config=configuration)
    assert (accelerator.split_batches, accelerator.even_batches) == (True, False)


def test_a_plugin_leaves_what_it_does_not_set_to_the_file():
    file = {"accumulation": {"num_steps": 8, "sync_with_dataloader": False}}
    plugin = GradientAccumulationPlugin(sync_each_batch=True)
    accelerator = Accelerator(cpu=True, config=file, gradient_accumulation_plugin=plugin)
    accumulation = accelerator.config.accumulation
    assert (accumulation.num_steps, accumulation.sync_with_dataloader, accumulation.sync_each_batch) == (8, False, True)
    assert accelerator.gradient_state.plugin_kwargs == {"sync_each_batch": True}
    assert accelerator.gradient_state.num_steps == 8


def test_no_handlers_may_be_written_as_none():
    assert Accelerator(cpu=True, kwargs_handlers=None).scaler is None
