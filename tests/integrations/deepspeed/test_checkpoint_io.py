"""An engine's state in parts: who writes what, who reads what, and what can read it besides."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("deepspeed")

from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.errors import IncompatibleCheckpointError
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO
from tests.loops import take_update
from tests.publishing import publish_directory
from tests.ranks import preload
from tests.scenarios import Scenarios, refused
from tests.zero import accelerator, adamw, batch, build, layout, own_rows

preload("accel_trainer.accelerator", "deepspeed")

SCENARIOS = Scenarios(timeout=300)
results = SCENARIOS.results
PIECES = {"stage3_param_persistence_threshold": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2 round robin": {"stage": 2, "round_robin_gradients": True},
    "zero2 offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3, **PIECES},
    "zero3 sub-groups": {"stage": 3, "sub_group_size": 300},
    "zero3 offload": {"stage": 3, **PIECES, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
HALF = {"zero1 bf16": {"stage": 1}, "zero2 bf16": {"stage": 2}, "zero3 bf16": {"stage": 3, **PIECES}}
# At stage 1, the engine has another optimizer for that.
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


class Odd(nn.Module):
    """Nothing in it divides by two, and partitions end within rows; with a tie, a frozen part and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 63)
        self.fixed = nn.Parameter(torch.randn(5, 63) / 5, requires_grad=False)
        self.cube = nn.Parameter(torch.randn(3, 63, 41))
        self.factor = nn.Parameter(torch.full((1,), 0.5))
        self.same = self.stem
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        hidden = hidden + hidden @ self.fixed.T @ self.fixed
        return (self.factor * torch.einsum("bi,kij->bkj", hidden, self.cube)).square().mean()


def groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [model.cube, model.factor]}, {"params": model.stem.parameters(), "lr": 0.02}])


def prepare(zero: dict[str, Any], seed: int, config: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Return an Accelerator with a model and optimizer that have made updates; all of it is other for other seeds."""
    made = accelerator(0, config={"zero_optimization": zero, **(config or {})}, **options)
    torch.manual_seed(seed)
    model = Odd()
    model.count += seed
    model, optimizer = made.prepare(model, groups(model))
    for step in range(1 + seed % 2):
        update(made, model, optimizer, step)
    return made, model, optimizer


def update(made: Any, model: Any, optimizer: Any, step: int) -> float:
    return float(take_update(model(own_rows(step)), optimizer, made))


def contents(made: Any, model: Any) -> dict[str, Any]:
    """Everything that the unit holds, whole, on rank 0."""
    io = made.unit_of(model).checkpoint_io()
    return {"model": io.full_model_state(), "optimizer": io.full_optimizer_state()}


class Scaled(nn.Module):
    """Has a parameter of no dimension, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x)


class Traffic(TorchDispatchMode):
    """Counts the bytes of all tensors that are handed to collectives."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.num_bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def shared_folder_of(made: Any) -> Path:
    """Return a new folder, the same on all ranks, which an Accelerator has joined."""
    from accel_trainer.utils import broadcast_object_list

    return Path(broadcast_object_list([tempfile.mkdtemp()])[0])


def exchange(variants: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Have each variant save, and the next one load what it has saved."""
    folder = shared_folder_of(accelerator(1))
    runs, saved, traffic = {}, {}, {}
    for seed, (name, zero) in enumerate(variants.items()):
        runs[name] = made, model, optimizer = prepare(zero, seed, **options)
        with Traffic() as counted:
            saved[name] = contents(made, model)
        traffic[name] = [counted.num_bytes]
        with Traffic() as counted:
            made.save_state(folder / name)
        traffic[name].append(counted.num_bytes)
        saved[name]["next"] = [update(made, model, optimizer, step) for step in (5, 6)]
    loaded = {}
    for name, other in zip(variants, [*list(variants)[1:], *variants], strict=False):
        made, model, optimizer = runs[name]
        with Traffic() as counted:
            made.load_state(folder / other)
        traffic[name].append(counted.num_bytes)
        loaded[f"{name} from {other}"] = contents(made, model), other
        made.load_state(folder / name)
        following = [update(made, model, optimizer, step) for step in (5, 6)]
        loaded[name] = {"next": following}, name
    sizes = {name: {path.name: path.stat().st_size for path in (folder / name).iterdir()} for name in variants}
    return {"saved": saved, "loaded": loaded, "traffic": traffic, "sizes": sizes}


@SCENARIOS.add
def exchanged() -> dict[str, Any]:
    return exchange(VARIANTS)


@SCENARIOS.add
def exchanged_halves() -> dict[str, Any]:
    return exchange(HALF, mixed_precision="bf16", config=SUMS)


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}.{key}")
    else:
        assert found == expected, path


@pytest.mark.parametrize("scenario", ["exchanged", "exchanged_halves"])
def test_every_stage_loads_what_every_other_has_saved_to_the_bit(scenario: str):
    first, second = results(scenario)
    assert len(first["loaded"]) == 2 * len(first["saved"])
    for result in (first, second):
        for name, (found, source) in result["loaded"].items():
            expected = result["saved"][source]
            assert_same(found, {key: expected[key] for key in found}, name)
    assert all(state["optimizer"]["state"] for state in first["saved"].values())


@pytest.mark.parametrize("scenario", ["exchanged", "exchanged_halves"])
def test_each_rank_writes_its_own_share(scenario: str):
    for sizes in results(scenario)[0]["sizes"].values():
        shares: Counter[int] = Counter()
        for name, size in sizes.items():
            if match := re.fullmatch(r"unit_0\.\w+\.(\d+)\.safetensors", name):
                shares[int(match[1]) % 2] += size
        assert shares[0] == pytest.approx(shares[1], rel=0.2), sizes


@pytest.mark.parametrize("scenario", ["exchanged", "exchanged_halves"])
def test_nothing_is_gathered_to_save_or_to_load(scenario: str):
    values = Odd()
    largest, all_of_it = values.cube.nbytes, 3 * sum(p.nbytes for p in values.parameters() if p.requires_grad)
    for gathering, saving, loading in results(scenario)[0]["traffic"].values():
        assert gathering >= all_of_it, "it is counted"
        assert saving < largest
        assert loading < largest


def native(number: float) -> TorchCheckpointIO:
    """Return a native unit with a state of its own for each parameter, and updates that were counted."""
    model = build()
    optimizer = adamw(model)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(parameter, number)}
    return TorchCheckpointIO(model, [optimizer])


@SCENARIOS.add
def from_elsewhere() -> Any:
    """Load what a native unit wrote, by itself and with torch's functions; and be refused what does not fit."""
    made, model, _ = layout(3, config={"zero_optimization": {"stage": 3, **PIECES}})
    io, folder = made.unit_of(model).checkpoint_io(), shared_folder_of(made)

    def load(name: str) -> Any:
        try:
            io.load(open_checkpoint(folder / name, made.process), "u")
        except IncompatibleCheckpointError as error:
            return str(error), contents(made, model)
        return contents(made, model)

    def write(name: str, source: Any) -> str:
        with publish_directory(folder / name, made.process) as staged:
            source.save(staged, "u")
        return name

    native(0.7).save_sharded_optimizer(folder / "dcp")
    io.load_sharded_optimizer(folder / "dcp")
    found = {"dcp": contents(made, model)["optimizer"], "native": load(write("native", native(0.5)))}
    rows, fewer, new = native(0.1), build(), build()
    rows.optimizers[0].state[rows.module.head.weight]["row"] = torch.ones(7)
    found["rows"] = load(write("rows", rows))
    found["weights"] = load(write("weights", TorchCheckpointIO(build())))
    found["fewer"] = load(write("fewer", TorchCheckpointIO(fewer, [adamw(fewer.stem)])))
    found["before its first step"] = load(write("new", TorchCheckpointIO(new, [adamw(new)])))
    return found


@SCENARIOS.add
def numbers() -> Any:
    def run(made: Any, shift: float) -> tuple[Any, Any, Any]:
        model = Scaled()
        model.scale.data += shift + made.process_index  # rank 0's counts
        model, optimizer = made.prepare(model, adamw(model))
        return made, model, optimizer

    folder = shared_folder_of(accelerator(2))
    message = refused(lambda: run(accelerator(3), 0.0))
    made, model, optimizer = run(accelerator(2), 0.0)
    losses = [update(made, model, optimizer, step) for step in range(2)]
    made.save_state(folder / "s")
    losses = [float(made.reduce(torch.tensor(loss), "mean")) for loss in losses]
    saved = contents(made, model)
    made, model, optimizer = run(accelerator(1), 1.0)
    made.load_state(folder / "s")
    return message, losses, saved, contents(made, model)


def test_a_parameter_of_no_dimension_is_trained_and_saved_and_refused_by_zero3():
    message, losses, saved, loaded = results("numbers")[0]
    model = Scaled()
    optimizer, expected = adamw(model), []
    for step in range(2):
        expected.append(take_update(model(batch(step)), optimizer).item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert saved["model"]["scale"].shape == saved["optimizer"]["state"]["scale"]["exp_avg"].shape == ()
    assert saved["optimizer"]["state"]["scale"]["exp_avg"] != 0
    assert_same(loaded, saved)
    assert "'scale' of Scaled is a parameter of no dimension, which ZeRO-3 of DeepSpeed cannot lay out" in message


def test_a_state_of_a_native_unit_and_one_of_torch_distributed_checkpoint_are_loaded():
    found = results("from_elsewhere")[0]
    assert_same(found["native"]["model"], native(0.5).full_model_state())
    assert_same(found["native"]["optimizer"]["state"], native(0.5).full_optimizer_state()["state"])
    assert_same(found["dcp"]["state"], native(0.7).full_optimizer_state()["state"])


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_changes():
    kept = results("from_elsewhere")[0]["native"]
    for rank, found in enumerate(results("from_elsewhere")):
        for name, message in (
            ("rows", r"holds a state that DeepSpeed cannot shard: row of head\.weight is \(7,\), and the parameter is"),
            ("weights", "holds no optimizer state for Net, which has an optimizer; an optimizer is never reset"),
            ("fewer", r"was saved for 1 group\(s\) of 2 parameter\(s\), and this optimizer has 1 group\(s\) of 4"),
        ):
            assert re.search(message, found[name][0]), found[name][0]
            assert rank or assert_same(found[name][1], kept, name) is None


def test_a_state_from_before_the_first_step_leaves_no_other_behind():
    assert results("from_elsewhere")[0]["before its first step"]["optimizer"]["state"] == {}
