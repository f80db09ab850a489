"""Training on one device: a CUDA device where there is one, else the accelerator that stands in for it.

docs/gpu.md says when this was last run on a card. What only the stand-in shows is in test_stand_in.py.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration, GradScalerKwargs, InitProcessGroupKwargs
from accel_trainer.checkpoint.safetensors_file import StagingMemory
from tests import stand_in
from tests.cells import crossed
from tests.loops import updates
from tests.ranks import preload, run_ranks
from tests.scenarios import Outcome, Scenarios
from tests.strategies.parallel.test_sequence_parallel import tiny_model

preload("accel_trainer.accelerator", "tests.stand_in", "tests.trainer_jobs")
pytestmark = pytest.mark.timeout(400)  # of which a compiler may take one minute, once

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda:0" if HAS_CUDA else "stand_in:0"
ON_DEVICE = Scenarios(env=stand_in.ALONE, timeout=300)


def run_on_device() -> dict[str, Outcome]:
    if not HAS_CUDA:
        stand_in.install()
    return ON_DEVICE.run()


def on_device(name: str) -> Any:
    if not HAS_CUDA:
        stand_in.build()
    return ON_DEVICE.results(name, run_on_device, 1)[0]


def begin(**options: Any) -> Accelerator:
    from accel_trainer.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(**options)


def build(accelerator: Accelerator, **optimizer_options: Any) -> tuple[Any, ...]:
    """Prepare a small regression with its optimizer, loader and schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer_options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    return accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8), schedule)


def train(accelerator: Accelerator, parts: tuple[Any, ...]) -> list[float]:
    """Train an epoch; return the losses."""
    model, optimizer, loader, schedule = parts
    seen = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def draw() -> float:
    """Return the next number of the device's own random stream."""
    return torch.rand(1, device=DEVICE).item() if HAS_CUDA else torch.stand_in.draw()  # type: ignore[attr-defined]


# --- precision -----------------------------------------------------------------------------------------------------


@ON_DEVICE.add
def train_in_each_precision() -> dict[str, Any]:
    cpu = begin(cpu=True)
    seen: dict[str, Any] = {"cpu": train(cpu, build(cpu))}
    for precision in ("no", "bf16", "fp16"):
        # The default scale overflows in the second update.
        scaler = [GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else []
        accelerator = begin(mixed_precision=precision, kwargs_handlers=scaler)
        parts = build(accelerator)
        seen[precision] = train(accelerator, parts)
        x, _ = next(iter(parts[2]))
        with accelerator.autocast():
            hidden = parts[0][0](x)
        dtypes = {p.dtype for p in parts[0].parameters()}
        seen[f"{precision} lies on"] = str(x.device), dtypes, parts[0](x).dtype, hidden.dtype
    return seen


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_the_losses_are_those_of_the_cpu(precision: str, tolerance: float):
    seen = on_device("train_in_each_precision")
    assert seen[precision] == pytest.approx(seen["cpu"], rel=tolerance)
    inside = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert seen[f"{precision} lies on"] == (DEVICE, {torch.float32}, torch.float32, inside)


@ON_DEVICE.add
def overflow() -> dict[str, Any]:
    accelerator = begin(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**60)])
    model, optimizer, loader, schedule = build(accelerator)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    schedule.step()
    return {
        "skipped": accelerator.optimizer_step_was_skipped,
        "scale": accelerator.scaler.get_scale(),
        "schedule": schedule.last_epoch,
        "same": all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)),
    }


def test_an_overflow_skips_the_update_and_the_schedule_and_halves_the_scale():
    assert on_device("overflow") == {"skipped": True, "scale": 2.0**59, "schedule": 0, "same": True}


# --- resuming ------------------------------------------------------------------------------------------------------


@ON_DEVICE.add
def resume_the_trainer() -> dict[str, Any]:
    from tests.trainer_jobs import build_trainer

    losses: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        for name, resume, extra in (
            ("host", None, {"use_cpu": True}),
            ("whole", None, {"use_cpu": False}),
            ("resumed", 2, {"use_cpu": False}),
            ("whole fp16", None, {"use_cpu": False, "fp16": True}),
            ("resumed fp16", 2, {"use_cpu": False, "fp16": True}),
        ):
            trainer = build_trainer(Path(folder, *map(str, extra)), **options, **extra)
            checkpoint = str(Path(trainer.args.output_dir, f"checkpoint-{resume}")) if resume else None
            trainer.train(resume_from_checkpoint=checkpoint)
            losses[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            losses["device"] = str(next(trainer.model.parameters()).device)
            losses["optimizer"] = trainer.args.optim
    return losses


def test_a_trainer_resumes_with_its_default_optimizer():
    seen = on_device("resume_the_trainer")
    assert (seen["device"], seen["optimizer"]) == (DEVICE, "adamw_torch_fused")
    assert seen["resumed"] == seen["whole"]
    assert seen["resumed fp16"] == seen["whole fp16"]
    assert seen["whole"] == pytest.approx(seen["host"], rel=1e-4)
    assert seen["whole fp16"] == pytest.approx(seen["host"], rel=1e-2)


@ON_DEVICE.add
def load_in_every_way() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "foreach": ({}, {"foreach": True}),
        "fused": ({}, {"fused": True}),
        "fp16": (
            {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=256.0, growth_interval=3)]},
            {"fused": True},
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (options, optimizer_options) in ways.items():
            accelerator = begin(**options)
            parts = build(accelerator, **optimizer_options)
            train(accelerator, parts)
            accelerator.save_state(Path(folder, "state"))
            drawn = draw()
            seen[name] = train(accelerator, parts)
            accelerator.load_state(Path(folder, "state"))
            in_full = accelerator.unit_of(parts[0]).checkpoint_io().full_optimizer_state()
            seen[f"{name} again"] = train(accelerator, parts)
            accelerator = begin(**options)
            parts = build(accelerator, **optimizer_options)
            accelerator.load_state(Path(folder, "state"))
            scale = accelerator.scaler.get_scale() if accelerator.scaler else None
            seen[f"{name} anew"] = train(accelerator, parts)
            accelerator.load_state(Path(folder, "state"))
            accelerator.unit_of(parts[0]).checkpoint_io().load_full_optimizer_state(in_full)
            seen[f"{name} in full"] = train(accelerator, parts)
            accelerator.load_state(Path(folder, "state"))
            seen[f"{name} drew"] = drawn == draw(), scale
    return seen


def test_states_load_on_the_device_and_continue_there():
    seen = on_device("load_in_every_way")
    for kind in ("foreach", "fused", "fp16"):
        assert seen[f"{kind} again"] == seen[f"{kind} anew"] == seen[f"{kind} in full"] == seen[kind]
        # The scale has doubled once, after the third of four updates.
        assert seen[f"{kind} drew"] == (True, 512.0 if kind == "fp16" else None)


@ON_DEVICE.add
def warm_up_before_prepare() -> list[list[float]]:
    seen = []
    for cpu in (True, False):
        for fused in (False, True):
            accelerator = begin(cpu=cpu)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
            parts = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8), schedule)
            seen.append(train(accelerator, parts))
    return seen


def test_an_optimizer_that_has_state_is_prepared_with_its_model():
    host, _, foreach, fused = on_device("warm_up_before_prepare")
    assert foreach == pytest.approx(host, rel=1e-3)
    assert fused == pytest.approx(host, rel=1e-3)


# --- copies beside the computation ---------------------------------------------------------------------------------


def load(is_ahead: bool, num_workers: int) -> list[float]:
    accelerator = begin(dataloader_config=DataLoaderConfiguration(prefetch_to_device=is_ahead))
    rows = torch.arange(6.0)[:, None].expand(6, 1 << 16)
    loader = DataLoader(TensorDataset(rows.contiguous()), batch_size=1, num_workers=num_workers)
    busy = torch.eye(256, device=accelerator.device)
    seen, kept = [], []
    for (batch,) in accelerator.prepare(loader):
        for _ in range(20):  # still at work when the next batch is copied
            busy = busy @ busy
        seen.append((batch * busy[0, 0]).mean())
        kept.append(batch.mul_(2))
    return [value.item() for value in (*seen, *(batch.mean() for batch in kept))]


@ON_DEVICE.add
def copy_batches_ahead() -> list[list[float]]:
    return [load(is_ahead, num_workers) for is_ahead in (False, True) for num_workers in (0, 2)]


def test_batches_that_are_copied_ahead_are_whole_when_they_are_used_and_stay_it():
    own, doubled = [float(i) for i in range(6)], [2.0 * i for i in range(6)]
    assert on_device("copy_batches_ahead") == [own + doubled] * 4


@ON_DEVICE.add
def save_while_it_trains() -> dict[str, Any]:
    accelerator = begin()
    torch.manual_seed(0)
    # More than two pinned buffers of 16 MiB hold, and a buffer that every forward changes.
    model = nn.Sequential(nn.Linear(3000, 3000), nn.BatchNorm1d(3000))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 3000, device=accelerator.device)

    def step() -> None:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Tensor]:
        return {name: value.cpu().clone() for name, value in model.state_dict().items()}

    has_trained, wait = threading.Event(), StagingMemory.wait

    def wait_late(memory: StagingMemory) -> None:
        has_trained.wait(60)
        wait(memory)

    step()
    found = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(StagingMemory, "wait", wait_late):
        for is_async in (True, False):
            expected = state()
            accelerator.save_state(Path(folder, "state"), async_=is_async)
            for _ in range(2):
                step()
            has_trained.set()
            accelerator.wait_for_checkpoint()
            moved = not torch.equal(state()["0.weight"], expected["0.weight"])
            accelerator.load_state(Path(folder, "state"))
            found[is_async] = moved, all(torch.equal(value, expected[name]) for name, value in state().items())
    return found


def test_a_save_holds_what_was_there_when_it_was_asked_for():
    assert on_device("save_while_it_trains") == {True: (True, True), False: (True, True)}


# --- compiled, offloaded, out of memory ----------------------------------------------------------------------------


@ON_DEVICE.add
def train_compiled() -> list[list[float]]:
    seen = []
    for backend in (None, "inductor" if HAS_CUDA and shutil.which("gcc") else "aot_eager"):
        accelerator = begin(dynamo_backend=backend, mixed_precision="bf16")
        seen.append(train(accelerator, build(accelerator)))
    return seen


def test_a_compiled_model_trains_alike():
    eager, compiled = on_device("train_compiled")
    assert compiled == pytest.approx(eager, rel=2e-2)


@ON_DEVICE.add
def offload() -> tuple[list[Tensor], list[set[str]]]:
    import copy

    from accel_trainer import cpu_offload, dispatch_model

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).eval()
    x = torch.ones(2, 16)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        places = {"0": DEVICE, "1": "cpu", "2": "disk", "3": "cpu"}
        dispatched = dispatch_model(copy.deepcopy(model), places, main_device=DEVICE, offload_dir=folder)
        offloaded = cpu_offload(copy.deepcopy(model), DEVICE)
        results = [each(x.to(DEVICE)) for each in (dispatched, dispatched, offloaded, offloaded)]
        devices = [{str(result.device) for result in results}, {str(p.device) for p in offloaded.parameters()}]
        return [result.cpu() - model(x) for result in results], devices


def test_offloaded_layers_compute_on_the_device_what_they_compute_on_the_host():
    differences, devices = on_device("offload")
    assert all(difference.abs().max() < 1e-3 for difference in differences)  # a card's products have another order
    assert devices == [{DEVICE}, {"meta"}]


@ON_DEVICE.add
def search_for_memory() -> list[int]:
    from accel_trainer.utils import find_executable_batch_size

    accelerator, tried = begin(), []
    free = torch.get_device_module(DEVICE).mem_get_info()[0]

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda size: size // 2)
    def attempt(batch_size: int) -> None:
        tried.append(batch_size)
        accelerator.free_memory()
        torch.empty(batch_size * free // 6, dtype=torch.uint8, device=accelerator.device)

    attempt()
    return tried


def test_a_search_for_the_batch_size_takes_the_devices_own_error():
    assert on_device("search_for_memory") == [64, 32, 16, 8, 4]


# --- with a process group ------------------------------------------------------------------------------------------


def losses_of_a_job(strategy: str, backend: str | None, cpu: bool) -> tuple[str, list[float]]:
    group = [] if backend is None else [InitProcessGroupKwargs(backend=backend)]
    data = DataLoaderConfiguration(split_batches=True)
    accelerator = begin(strategy=strategy, cpu=cpu, kwargs_handlers=group, dataloader_config=data)
    parts = build(accelerator)
    own = torch.tensor(train(accelerator, parts), device=accelerator.device)
    return str(accelerator.backend), accelerator.reduce(own, "mean").tolist()


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_a_job_of_one_rank_has_an_nccl_group_and_the_same_losses():
    ((backend, seen),) = run_ranks(losses_of_a_job, 1, "ddp", None, cpu=False)
    assert backend == "nccl"
    assert seen == pytest.approx(on_device("train_in_each_precision")["cpu"], rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_on_one_device_have_the_losses_of_one(strategy: str):
    # On the CPU without a card: gloo carries nothing of the stand-in. nccl refuses two ranks of one card.
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for _, seen in run_ranks(losses_of_a_job, 2, strategy, "gloo", cpu=not HAS_CUDA, env=env, timeout=100):
        assert seen == pytest.approx(on_device("train_in_each_precision")["cpu"], rel=1e-4)


def losses_of_sequences(sizes: dict[str, int], precision: str, cpu: bool, is_packed: bool) -> list[float]:
    from accel_trainer import ParallelismConfig

    model = tiny_model("llama", max_position_embeddings=230)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = [InitProcessGroupKwargs(backend="gloo")] if sizes else []
    layout = ParallelismConfig(**sizes)
    accelerator = begin(cpu=cpu, mixed_precision=precision, kwargs_handlers=group, parallelism_config=layout)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(3, 64, (4, 230), generator=torch.Generator().manual_seed(1)).to(accelerator.device)
    batch = {"input_ids": ids, "labels": ids}
    if is_packed:
        places = torch.cat([torch.arange(length) for length in (90, 40, 100)]).to(ids.device)
        batch = {**batch, "labels": ids.masked_fill(places == 0, -100), "position_ids": places.expand(4, -1)}
    return updates(model, optimizer, [batch] * 3, accelerator)


RING = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device: a CPU has none of the kernels")
GATHERED_RING = pytest.mark.skipif(
    HAS_CUDA, reason="torch's ring gathers by gloo, which cannot of a card (torch#152645)"
)


WAYS = [
    pytest.param("allgather", False, marks=GATHERED_RING),
    ("allgather", True),
    pytest.param("alltoall", False, marks=RING),
]
PRECISIONS = [("no", 1e-4), ("bf16", 5e-2)]


# A card has all of them, whose kernels differ; on a CPU each way and each precision are in the sample.
@pytest.mark.parametrize(
    ("strategy", "is_packed", "precision", "tolerance"),
    [
        pytest.param(*cell.values, marks=[mark for mark in cell.marks if not (HAS_CUDA and mark.name == "cell")])
        for cell in crossed(WAYS, PRECISIONS)
    ],
)
def test_shared_sequences_on_one_device_have_the_losses_of_one_rank(
    strategy: str, is_packed: bool, precision: str, tolerance: float
):
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PARALLELISM_CONFIG_CP_COMM_STRATEGY": strategy}
    given = {"precision": precision, "cpu": not HAS_CUDA, "is_packed": is_packed}
    (alone,) = run_ranks(losses_of_sequences, 1, {}, **given)
    for seen in run_ranks(losses_of_sequences, 2, {"cp_size": 2}, **given, env=env, timeout=100):
        assert seen == pytest.approx(alone, rel=tolerance)
