"""What a GPU is strict about, and a CPU forgives: on an accelerator that stands in for one (tests/stand_in.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests import stand_in
from tests.ranks import preload
from tests.scenarios import Outcome, Scenarios

preload("accel_trainer.accelerator", "tests.stand_in", "tests.trainer_jobs")
pytestmark = pytest.mark.timeout(400)  # of which a compiler may take one minute, once

ALONE = Scenarios(env=stand_in.ALONE, timeout=200)
LAUNCHED = Scenarios(env={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})


def run_alone() -> dict[str, Outcome]:
    stand_in.install()
    return ALONE.run()


def run_launched() -> dict[str, Outcome]:
    stand_in.install()
    return LAUNCHED.run()


def alone(name: str) -> Any:
    stand_in.build()
    return ALONE.results(name, run_alone, 1)[0]


def launched(name: str) -> Any:
    stand_in.build()
    return LAUNCHED.results(name, run_launched, 1)[0]


# --- the stand-in itself -------------------------------------------------------------------------------------------


@ALONE.add
def mix_devices() -> list[str]:
    here, host = torch.ones(3, device="stand_in"), torch.ones(3)
    parameter = nn.Parameter(here.clone())
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = here.clone()
    optimizer.step()
    optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].cpu()
    late = here.to("cpu", non_blocking=True)
    before = late.tolist()
    here.tolist()  # waits; torch 2.11's synchronize() leaves a device alone that it has not started
    failures = [f"{before[0]} {late[0].item()}"]
    for call in (lambda: here + host, optimizer.step):
        try:
            call()
        except RuntimeError as error:
            failures.append(str(error))
    return failures


def test_the_stand_in_refuses_what_a_gpu_refuses_and_copies_late():
    copied, added, fused = alone("mix_devices")
    assert copied == "nan 1.0"
    assert "two devices, stand_in:0 and cpu" in added
    assert "aten::_fused_adamw_: expected all tensors to be on the same device" in fused


# --- gradients, copies, devices ------------------------------------------------------------------------------------


@ALONE.add
def scale_gradients_on_two_devices() -> tuple[float, list[Tensor]]:
    from accel_trainer.strategies.gradients import clip_grad_norm, clip_grad_value, scale_gradients

    parameters = [nn.Parameter(torch.zeros(2, device=device)) for device in ("stand_in", "cpu", "stand_in")]
    for each in parameters:
        each.grad = torch.full_like(each, 4.0)
    scale_gradients(parameters, torch.tensor(0.5, device="stand_in"))
    norm = clip_grad_norm(parameters, 1.0)
    clip_grad_value(parameters, 0.25)
    return norm.item(), [each.grad.cpu() for each in parameters]


def test_gradients_on_several_devices_are_scaled_and_clipped_as_one_vector():
    norm, gradients = alone("scale_gradients_on_two_devices")
    assert norm == pytest.approx(24**0.5)
    assert [gradient.tolist() for gradient in gradients] == [[0.25] * 2] * 3


@ALONE.add
def clip_shards_on_the_host_beside_plain_gradients() -> tuple[float, list[float], list[float]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from accel_trainer.strategies.gradients import clip_grad_norm

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain = nn.Parameter(torch.zeros(2, device="stand_in"))
    shards = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    plain.grad = torch.tensor([3.0, 0.0], device="stand_in")
    shards.grad = distribute_tensor(torch.tensor([0.0, 4.0]), mesh, [Shard(0)])
    norm = clip_grad_norm([shards, plain], 1.0)
    dist.destroy_process_group()
    return norm.item(), shards.grad.to_local().tolist(), plain.grad.tolist()


def test_shards_on_the_host_and_plain_gradients_on_a_device_have_one_norm():
    norm, shards, plain = alone("clip_shards_on_the_host_beside_plain_gradients")
    assert norm == pytest.approx(5.0)
    assert shards + plain == pytest.approx([0.0, 0.8, 0.6, 0.0], abs=1e-5)


@ALONE.add
def scale_losses_of_offloaded_parameters() -> list[Any]:
    from accel_trainer.strategies.gradients import LossScale

    class Unit:
        optimizers: list[torch.optim.Optimizer]

    seen: list[Any] = []
    for fused, devices in (
        (None, ("cpu",)),
        (None, ("cpu", "stand_in")),
        (None, ("stand_in", "cpu")),
        (True, ("cpu",)),
    ):
        parameters = [nn.Parameter(torch.zeros(2, device=device)) for device in devices]
        unit, scale = Unit(), LossScale(torch.amp.GradScaler("stand_in", init_scale=4.0))
        unit.optimizers = [torch.optim.SGD(parameters, lr=1.0, fused=fused)]
        scale.serve(unit)
        for overflow in (0.0, float("inf")):
            scale.scale(torch.ones((), device="stand_in"))
            for each in parameters:
                each.grad = torch.full_like(each, 8.0) + (overflow if each.is_cpu else 0.0)
            applied = scale.step(unit.optimizers[0])
            seen.append((applied, {number for each in parameters for number in each.tolist()}))
        seen.append(scale.scaler.get_scale())
    return seen


def test_gradients_on_the_host_are_unscaled_and_their_overflows_are_found():
    assert alone("scale_losses_of_offloaded_parameters") == [(True, {-2.0}), (False, {-2.0}), 2.0] * 4


@ALONE.add
def average_states_on_two_devices() -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from accel_trainer.strategies.broadcast_values import broadcast_tensors
    from accel_trainer.strategies.local_replicas import LocalReplicas

    dist.init_process_group("cpu:fake,stand_in:fake", store=FakeStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False).to("stand_in"))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # whose count of steps is on the host
    replicas = LocalReplicas(model, [optimizer])
    replicas.begin()
    model(torch.ones(1, 2, device="stand_in")).sum().backward()
    optimizer.step()
    before = {name: value.cpu().clone() for name, value in next(iter(optimizer.state.values())).items()}
    replicas.end_update(8)
    replicas.finish()
    after = next(iter(optimizer.state.values()))
    broadcast_tensors([torch.ones(2), torch.ones(2, device="stand_in")], torch.device("stand_in:0"))
    dist.destroy_process_group()
    return {name: (str(value.device), torch.equal(value.cpu(), before[name])) for name, value in after.items()}


def test_local_sgd_averages_the_state_of_an_optimizer_that_is_on_the_host_and_on_the_device():
    seen = alone("average_states_on_two_devices")
    assert seen == {"step": ("cpu", True), "exp_avg": ("stand_in:0", True), "exp_avg_sq": ("stand_in:0", True)}


@ALONE.add
def watch_losses_of_a_graph() -> list[Any]:
    from accel_trainer.errors import NonFiniteError
    from accel_trainer.runtime.nonfinite import NonFiniteGuard
    from accel_trainer.runtime.process import ProcessContext

    process = ProcessContext(0, 0, 1, 1, torch.device("stand_in:0"), None)
    guard = NonFiniteGuard("raise", process, is_late=False, is_sharded=False)
    static = torch.empty((), device="stand_in:0")  # the memory of a graph's output
    seen: list[Any] = []
    for losses in ([1.0, 2.0], [float("nan"), 2.0]):
        for value in losses:
            guard.add_loss(static.fill_(value))
        seen.append(guard.loss.item())
        guard.skips()
    try:
        guard.look()
    except NonFiniteError as error:
        seen.append(str(error))
    return seen


def test_the_sum_of_losses_is_right_where_a_graph_overwrites_its_output():
    first, second, found = alone("watch_losses_of_a_graph")
    assert (first, str(second)) == (3.0, "nan")
    assert "update 2: the norm of the gradients is NaN or infinite" in found


@ALONE.add
def watch_norms_of_another_device() -> list[Any]:
    from accel_trainer.runtime.nonfinite import NonFiniteGuard
    from accel_trainer.runtime.process import ProcessContext

    process = ProcessContext(0, 0, 1, 1, torch.device("stand_in:0"), None)
    guard = NonFiniteGuard("warn", process, is_late=False, is_sharded=False)
    guard.norm = torch.ones((), device="stand_in:1")
    guard.add_loss(torch.ones((), device="stand_in:0"))
    with mock.patch.object(torch, "stack", side_effect=torch.stack) as stack:
        guard.skips()
    (stacked,) = stack.call_args.args
    return [{str(each.device) for each in stacked}, str(guard._event.device)]


def test_the_guard_looks_at_a_norm_where_it_is_and_not_on_the_current_device():
    assert alone("watch_norms_of_another_device") == [{"stand_in:1"}, "stand_in:1"]


@ALONE.add
def compare_values_in_threads() -> set[int]:
    from accel_trainer.runtime.process import ProcessContext
    from accel_trainer.strategies import broadcast_values

    def current(value: Tensor) -> int:
        return torch.accelerator.current_device_index()

    process = ProcessContext(1, 1, 2, 2, torch.device("stand_in:1"), None)
    with mock.patch.object(broadcast_values, "_fact", current):
        return set(broadcast_values._facts({"x": torch.ones(1, device="stand_in:1")}, process).values())


def test_threads_that_compare_values_use_the_ranks_own_device():
    assert alone("compare_values_in_threads") == {1}


@ALONE.add
def choose_a_device() -> list[str]:
    from accel_trainer import Accelerator
    from accel_trainer.runtime.process import current_process
    from accel_trainer.state import AcceleratorState

    seen = []
    for index in (1, 0):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.accelerator.set_device_index(index)
        seen += [str(current_process().device), str(Accelerator().device)]
    module: Any = torch.get_device_module("stand_in")
    with (
        mock.patch.object(module, "is_initialized", return_value=False),
        mock.patch.object(torch.accelerator, "current_device_index", side_effect=AssertionError("it is started")),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        return [*seen, str(Accelerator().device)]


def test_a_process_alone_trains_on_the_current_device_and_starts_none_to_ask_for_it():
    assert alone("choose_a_device") == ["stand_in:1"] * 2 + ["stand_in:0"] * 3


@ALONE.add
def copy_to_the_host() -> list[list[float]]:
    from accel_trainer.big_models.module_tensors import set_module_tensor_to_device
    from accel_trainer.utils import send_to_device

    batch = {"x": torch.full((4,), 7.0, device="stand_in")}
    layer = nn.Linear(1, 1, bias=False).to("stand_in")
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.full((1, 1), 3.0), non_blocking=True)
    moved = layer.weight.tolist()
    layer = layer.to("stand_in")
    set_module_tensor_to_device(layer, "weight", "cpu", non_blocking=True)
    return [send_to_device(batch, "cpu", non_blocking=True)["x"].tolist(), *moved, *layer.weight.tolist()]


def test_nobody_gets_host_memory_that_is_still_being_written():
    assert alone("copy_to_the_host") == [[7.0] * 4, [3.0], [3.0]]


def read_with(data: Any, **options: Any) -> list[Any]:
    """Read a loader without workers; return device and values of each batch, and how many tensors were pinned."""
    from torch.utils.data import DataLoader

    from accel_trainer import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader, pin, pinned = accelerator.prepare(DataLoader(data, batch_size=2)), Tensor.pin_memory, []

    def count(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return pin(tensor)

    with mock.patch.object(Tensor, "pin_memory", count):
        return [*((str(batch.device), batch.tolist()) for batch in loader), len(pinned)]


@ALONE.add
def read_batches_that_this_process_makes() -> list[list[Any]]:
    rows, stream = torch.arange(4.0), TwoRows()
    return [read_with(rows.to("stand_in")), read_with(rows), read_with(stream), read_with(rows, pin_memory=False)]


class TwoRows(IterableDataset[float]):
    """Numbers, as a stream."""

    def __iter__(self) -> Iterator[float]:
        return iter((0.0, 1.0))


def test_a_dataset_may_lie_on_the_device_already_and_batches_of_the_host_are_pinned():
    both = [("stand_in:0", [0.0, 1.0]), ("stand_in:0", [2.0, 3.0])]
    there, host, stream, unpinned = alone("read_batches_that_this_process_makes")
    assert (there, host, unpinned) == ([*both, 0], [*both, 2], [*both, 0])
    assert stream == [both[0], 1]


@ALONE.add
def compare_values_of_devices() -> list[bool]:
    from accel_trainer.strategies import broadcast_values

    value = torch.randn(9 << 20)  # more than two pinned buffers of 16 MiB
    facts = [
        broadcast_values._fact(value.to("stand_in")),
        broadcast_values._fact(value + 1),
        broadcast_values._fact(value),
    ]
    return [fact == facts[-1] for fact in facts]


def test_a_value_on_a_device_has_the_fingerprint_that_it_has_on_the_host():
    assert alone("compare_values_of_devices") == [True, False, True]


@ALONE.add
def load_by_an_automatic_map() -> tuple[set[str], float, str]:
    from accel_trainer import Accelerator, cpu_offload_with_hook, init_empty_weights, load_checkpoint_and_dispatch

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    with init_empty_weights():
        other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    with tempfile.TemporaryDirectory() as folder:
        Accelerator(cpu=True).save_model(model, folder)
        other = load_checkpoint_and_dispatch(other, folder, device_map="auto")
    expected, found = model(torch.ones(1, 4)), other(torch.ones(1, 4, device="stand_in"))
    _, hook = cpu_offload_with_hook(nn.Linear(2, 2))
    return (
        {p.device.type for p in other.parameters()},
        (found.cpu() - expected).abs().item(),
        str(hook.hook.execution_device),
    )


def test_an_automatic_map_uses_the_accelerator():
    devices, difference, offloaded_to = alone("load_by_an_automatic_map")
    assert devices == {"stand_in"}
    assert difference < 1e-6
    assert offloaded_to == "stand_in:0"


@ALONE.add
def compute_offloaded_layers_in_bf16() -> list[tuple[str, torch.dtype, torch.dtype]]:
    from accel_trainer import Accelerator, dispatch_model

    accelerator, seen = Accelerator(mixed_precision="bf16"), []
    for places in ({"0": "disk", "1": "stand_in:0"}, {"0": "disk", "1": "cpu"}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            dispatched = dispatch_model(model, places, main_device="stand_in:0", offload_dir=folder, force_hooks=True)
            inner: list[torch.dtype] = []
            model[0].register_forward_hook(lambda module, args, output, inner=inner: inner.append(output.dtype))
            output = accelerator.prepare(dispatched)(torch.ones(2, 4, device="stand_in:0"))
        seen.append((str(output.device), output.dtype, *inner))
    return seen


def test_layers_on_disk_compute_in_the_precision_that_was_asked_for():
    assert alone("compute_offloaded_layers_in_bf16") == [("stand_in:0", torch.float32, torch.bfloat16)] * 2


@LAUNCHED.add
def before_the_job_is_joined() -> dict[str, Any]:
    from accel_trainer import load_checkpoint_in_model
    from accel_trainer.big_models.module_hooks import CpuOffload
    from accel_trainer.runtime.process import with_index
    from accel_trainer.utils import init_on_device

    seen = {"cpu": str(with_index("cpu")), "own": str(with_index("stand_in")), "named": str(with_index("stand_in:0"))}
    shared = nn.Linear(2, 2, device="stand_in:1")
    with init_on_device("stand_in"):
        tied = nn.Linear(2, 2)
        tied.weight = shared.weight
    seen["tied"] = tied.weight is shared.weight, str(tied.bias.device)
    seen["offload"] = str(CpuOffload().execution_device)
    model = nn.Linear(2, 2)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder, "pytorch_model.bin"))
        model = nn.Linear(2, 2, device="meta")
        load_checkpoint_in_model(model, folder, {"": "stand_in"})
    seen["loaded"] = {str(p.device) for p in model.parameters()}
    return seen


def test_a_device_without_index_is_the_ranks_own_before_it_joins_its_job():
    seen = launched("before_the_job_is_joined")
    assert (seen["cpu"], seen["own"], seen["named"]) == ("cpu", "stand_in:1", "stand_in:0")
    assert seen["tied"] == (True, "stand_in:1")
    assert (seen["offload"], seen["loaded"]) == ("stand_in:1", {"stand_in:1"})


@ALONE.add
def draw_on_both_devices() -> list[list[float]]:
    """Draw on both devices after a save, after `load_state`, and after it on the other device."""
    from accel_trainer import Accelerator

    module = torch.get_device_module()
    accelerator = Accelerator()
    for device in (1, 0, 1):
        module.draw(device)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(f"{folder}/state")
        drawn = [[module.draw(device) for device in (0, 1)]]
        for current in (0, 1):
            with mock.patch.object(module, "current_device", lambda current=current: current):
                accelerator.load_state(f"{folder}/state")
                drawn.append([module.draw(device) for device in (0, 1)])
    return drawn


def test_random_streams_of_all_devices_are_saved_and_loaded():
    saved, loaded, moved = alone("draw_on_both_devices")
    assert saved == loaded
    assert saved[0] != saved[1]
    assert moved[1] == saved[0]  # the current device goes on, whatever its number
