"""Members that scripts written for similar libraries ask an Accelerator for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_trainer import (
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    ParallelismConfig,
    skip_first_batches,
)
from accel_trainer.errors import ConfigError
from accel_trainer.state import PartialState
from accel_trainer.utils import (
    AutocastKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from tests.ranks import preload
from tests.scenarios import Scenarios, refused

preload("accel_trainer.accelerator", "tests.scenarios")

SCENARIOS = Scenarios()
results = SCENARIOS.results


def facts(accelerator: Accelerator) -> tuple[bool, bool, bool, str]:
    return accelerator.is_fsdp2, AcceleratorState().is_fsdp2, accelerator.multi_device, accelerator.fp8_backend


def test_there_is_no_recipe_for_fp8_without_one():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    recipes = [getattr(accelerator, f"{kind}_recipe_handler") for kind in ("fp8", "ao", "te", "msamp")]
    assert recipes == [None] * 4
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler) == (False, False)
    assert accelerator.native_amp
    assert not Accelerator(cpu=True).native_amp


@SCENARIOS.add
def layouts() -> Any:
    return [facts(Accelerator(cpu=True, strategy=strategy)) for strategy in ("ddp", "fsdp2")]


def test_replicas_are_many_devices_on_the_cpu_too_and_shards_or_one_process_are_not():
    assert facts(Accelerator(cpu=True)) == (False, False, False, "NO")
    for found in results("layouts"):
        assert found == [(False, False, True, "NO"), (True, True, False, "NO")]


@SCENARIOS.add
def loaders_filled_up_or_not() -> Any:
    accelerator = Accelerator(cpu=True)
    counts = []
    for is_filled_up in (True, False):
        accelerator.even_batches = is_filled_up
        loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
        steps = [(len(x), loader.remainder, accelerator.gradient_state.remainder) for x in loader]
        counts.append((accelerator.dataloader_config.even_batches, loader.even_batches, steps))
    accelerator.dataloader_config.dispatch_batches = True
    dispatched = accelerator.prepare(DataLoader(range(4), batch_size=2))
    return counts, accelerator.dispatch_batches, [batch.tolist() for batch in dispatched]


def test_options_of_loaders_that_are_set_later_hold_for_loaders_that_are_prepared_later():
    for rank, (counts, is_dispatched, batches) in enumerate(results("loaders_filled_up_or_not")):
        # 5 samples in steps of 4: of the last one 1 counts, whether it is filled up, or a rank without samples takes
        # part with one of weight zero.
        assert counts == [(True, True, [(2, -1, -1), (2, 1, 1)]), (False, False, [(2, -1, -1), (1, 1, 1)])]
        assert is_dispatched
        assert batches == [[2 * rank, 2 * rank + 1]]


def mapped(device_map: dict[str, Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].hf_device_map = device_map
    return model


@SCENARIOS.add
def spread_over_devices() -> str:
    return refused(lambda: Accelerator(cpu=True).prepare(mapped({"0": "cpu", "1": "disk"})))


@SCENARIOS.add
def wrapped_by_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    accelerator = Accelerator(cpu=True)
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=accelerator.device)
    for model in (wrapped, nn.Sequential(wrapped)):
        message = (
            rf"{type(model).__name__} is wrapped by torch.distributed.fsdp.FullyShardedDataParallel \(FSDP1\).*"
            r"give prepare\(\) the bare model, and shard it with strategy 'fsdp2'"
        )
        with pytest.raises(ConfigError, match=message):
            accelerator.prepare(model)


def test_a_model_that_fsdp1_wraps_is_refused():
    results("wrapped_by_fsdp1")


def test_a_model_that_is_spread_over_devices_is_seen_and_stays_where_it_is():
    accelerator = Accelerator(cpu=True)
    assert accelerator.verify_device_map(mapped({"0": "cpu", "1": "disk"}))
    assert accelerator.verify_device_map(mapped({"0": 0, "1": 1}))
    assert not accelerator.verify_device_map(mapped({"0": 0, "1": 0}))
    assert not accelerator.verify_device_map(mapped({"": "cpu"}))
    assert not accelerator.verify_device_map(nn.Linear(1, 1))
    one_device, spread = mapped({"": "cpu"}), mapped({"0": "cpu", "1": "disk"})
    assert accelerator.prepare(one_device) is one_device
    assert accelerator.prepare(spread) is spread
    for error in results("spread_over_devices"):
        assert "Sequential was loaded with a device_map that spreads it over several devices" in error
        assert "load it without device_map, and shard it with strategy 'fsdp2'" in error


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("disk", "in 8-bit or 4-bit precision with CPU or disk offload.*load it with device_map={'': 0}"),
        (3, r"precision on cpu:3, and this process trains on cpu; load it with device_map={'': accelerator.local_"),
        ("cpu", None),
    ],
)
def test_a_quantised_model_is_trained_on_the_device_that_it_was_loaded_on(device: Any, message: str | None):
    model, accelerator = nn.Linear(2, 2), Accelerator(cpu=True)
    model.is_loaded_in_8bit, model.hf_device_map = True, {"": device}
    if message is None:
        assert accelerator.prepare_model(model) is model
    else:
        with pytest.raises(ConfigError, match=message):
            accelerator.prepare_model(model)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def rows(rank: int, index: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + index))


@SCENARIOS.add
def within_a_window() -> Any:
    """Exchange on the first micro-batch of a window of two, and as ever on the second."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    own = build()
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.5))
    seen = []
    for index in range(2):
        with accelerator.accumulate(model):
            loss = model(rows(accelerator.process_index, index)).square().mean()
            if index == 0:
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(loss)
            else:
                accelerator.backward(loss)
            seen.append(own.weight.grad.clone())
            optimizer.step()
    return seen, own.weight.detach().clone()


def test_a_backward_may_exchange_before_its_window_ends():
    model = build()
    expected = []
    for index in range(2):
        (sum(model(rows(rank, index)).square().mean() for rank in range(2)) / 4).backward()
        expected.append(model.weight.grad.clone())
    stepped = model.weight.detach() - 0.5 * model.weight.grad
    for seen, weight in results("within_a_window"):
        torch.testing.assert_close(seen, expected)
        torch.testing.assert_close(weight, stepped)  # one step, at the end


@SCENARIOS.add
def with_unused_parameters() -> None:
    for option in ("find_unused_parameters", "static_graph"):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**{option: True})])
        model = accelerator.prepare(build())
        message = rf"with {option}=True DDP looks at the outputs of the forward.* last forward outside of no_sync\(\)"
        with pytest.raises(ConfigError, match=message), accelerator.trigger_sync_in_backward(model):
            raise AssertionError("the block was entered")


def test_what_ddp_decides_in_the_forward_is_refused():
    results("with_unused_parameters")


@SCENARIOS.add
def places() -> Any:
    found = []
    for options in ({"strategy": "ddp"}, {"strategy": "fsdp2"}):
        made = Accelerator(cpu=True, **options)
        with made.maybe_context_parallel(buffers=[]):
            ranks = [made.data_parallel_rank, made.data_parallel_shard_rank]
        others = [made.tensor_parallel_rank, made.pipeline_parallel_rank, made.context_parallel_rank]
        facts = [made.should_save_model, made.is_composable_parallelism_enabled, made.torch_device_mesh]
        found.append((ranks, others, facts, made.deepspeed_plugin))
    made = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    return found, made.torch_device_mesh.mesh_dim_names


def test_the_place_of_a_rank_in_a_mesh():
    for rank, (found, names) in enumerate(results("places")):
        assert names == ("dp_replicate",)
        assert found == [
            ([rank, 0], [0, 0, 0], [rank == 0, False, None], None),
            ([rank, rank], [0, 0, 0], [rank == 0, True, None], None),
        ]


def test_handlers_are_those_that_were_given():
    given = [AutocastKwargs(), GradScalerKwargs(growth_interval=3), InitProcessGroupKwargs(), ProfileKwargs()]
    accelerator = Accelerator(cpu=True, kwargs_handlers=[*given, DistributedDataParallelKwargs()])
    kinds = ("autocast", "scaler", "init", "profile")
    assert [getattr(accelerator, f"{kind}_handler") for kind in kinds] == given
    assert isinstance(accelerator.ddp_handler, DistributedDataParallelKwargs)
    assert [getattr(Accelerator(cpu=True), f"{kind}_handler") for kind in (*kinds, "ddp")] == [None] * 5


def test_states_tell_of_devices_windows_and_loaders():
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(2, True, False))
    state = accelerator.gradient_state
    assert (state.sync_with_dataloader, state.adjust_scheduler, state.is_xla_gradients_synced) == (False, True, False)
    loader = accelerator.prepare(DataLoader(range(2)))
    assert [state.dataloader_references for _ in loader] == [[None, loader]] * 2
    assert state.dataloader_references == [None]
    assert PartialState().default_device == torch.device("cpu")
    assert (accelerator.state.debug, accelerator.parallelism_config, accelerator.state.parallelism_config) == (
        False, None, None,
    )  # fmt: skip
    assert Accelerator(cpu=True, config={"debug": True}).state.debug


def test_the_state_shows_precision_and_compilation():
    state = Accelerator(cpu=True, mixed_precision="bf16").state
    assert str(state).startswith("Distributed environment: DistributedType.NO\nNum processes: 1\n")
    assert str(state).endswith("Device: cpu\n\nMixed precision type: bf16\n")
    assert "precision" not in str(PartialState())
    assert (state.dynamo_plugin.backend, state.dynamo_plugin.mode) == (DynamoBackend.NO, "default")
    plugin = TorchDynamoPlugin(backend="eager", dynamic=True, options={"a": 1})
    shown = Accelerator(cpu=True, dynamo_plugin=plugin).state.dynamo_plugin
    assert (shown.backend, shown.dynamic, shown.options) == (DynamoBackend.EAGER, True, {"a": 1})
    AcceleratorState._reset_state()
    assert AcceleratorState().dynamo_plugin.backend == DynamoBackend.NO


def test_a_loader_shows_where_its_batches_go_and_where_its_pass_begins():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    assert accelerator.use_stateful_dataloader
    assert not Accelerator(cpu=True).use_stateful_dataloader
    assert (loader.device, loader.use_stateful_dataloader, loader.skip_batches) == (torch.device("cpu"), True, 0)
    assert (skip_first_batches(loader, 2).skip_batches, len(skip_first_batches(loader))) == (2, 3)
    assert [loader.remainder for _ in loader] == [-1, -1, -1]  # one process pads nothing
    assert not Accelerator(cpu=True).prepare(DataLoader(range(2))).use_stateful_dataloader


class Placed(DataLoader[Any]):
    """A loader class of a user, with a device of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = "elsewhere"
        super().__init__(*args, **kwargs)


def test_a_loader_class_of_ones_own_keeps_its_device():
    loader = Accelerator(cpu=True).prepare(Placed(range(2)))
    assert loader.device == "elsewhere"
    loader.device = "moved"
    assert skip_first_batches(loader, 1).device == "moved"


def test_a_process_alone_runs_what_is_for_another_rank():
    # A script for eight processes that is tried out on one does all its work.
    accelerator = Accelerator(cpu=True)
    assert accelerator.on_process(lambda: 3, process_index=3)() == 3
    assert accelerator.on_local_process(local_process_index=1)(lambda: 1)() == 1


def test_arguments_that_have_nothing_to_do_are_taken_and_said_so(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(2)), slice_fn_for_dispatch=print)
    assert "slice_fn_for_dispatch is not called: batches are collated for their rank" in caplog.text
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, nn.Linear(1, 1)) is loader
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state", {"weights_only": False}, map_location="cpu")
    assert "load_state(load_kwargs={'weights_only': False}) is without effect" in caplog.text
    with pytest.raises(ConfigError, match=r"strict=False\) would leave .*load_checkpoint_in_model"):
        accelerator.load_state(tmp_path / "state", strict=False)


class Fused(torch.optim.Optimizer):
    """An optimizer of the kind of LOMO: it steps in the backward, and has no step of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters(), {"lr": 1.0})

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None


def test_lomo_updates_in_the_backward():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"with 0 LOMO optimizer\(s\)"):
        accelerator.lomo_backward(torch.ones(()), 0.5)
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    model, optimizer = accelerator.prepare(model, Fused(model))
    assert accelerator.has_lomo_optimizer
    with pytest.raises(ConfigError, match="learning_rate=None"):
        accelerator.backward(model(torch.ones(1)).sum())
    accelerator.backward(model(torch.ones(1)).sum(), learning_rate=0.5)
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(before - 0.5)
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2"):
        accelerator.lomo_backward(model(torch.ones(1)).sum(), 0.5)


@SCENARIOS.add
def lomo_on_two() -> str:
    model = nn.Linear(1, 1)
    return refused(lambda: Accelerator(cpu=True).prepare(model, Fused(model)))


def test_lomo_on_several_processes_is_refused():
    for message in results("lomo_on_two"):
        assert "Fused updates each parameter in the backward, before all processes have given" in message
