"""A unit's state is written in parts by name, and loads on every other layout with the same values (R6)."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.errors import CorruptCheckpointError, IncompatibleCheckpointError
from accel_trainer.strategies.parameter_state.base_io import Reads
from accel_trainer.strategies.parameter_state.torch_io import TorchCheckpointIO
from tests.publishing import ALONE, publish_directory
from tests.ranks import preload, run_ranks
from tests.sharded import assert_same

preload("accel_trainer.accelerator")

LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2, "hsdp": 4}
OF_SIZE = {1: ["single"], 2: ["ddp", "fsdp2"], 4: ["hsdp"]}


class Odd(nn.Module):
    """Rows that do not divide, a scalar, a buffer, tied weights, and a state of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.note = 0

    def get_extra_state(self) -> Tensor:
        return torch.full((self.note,), 7)

    def set_extra_state(self, state: Tensor) -> None:
        self.note = len(state)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.head(torch.tanh(self.first(x) + self.second(x))) * self.scale


def prepare(layout: str, seed: int) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    from accel_trainer import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(replicate_size=2) if layout == "hsdp" else None
    strategy = "fsdp2" if layout == "hsdp" else layout
    accelerator = Accelerator(cpu=True, strategy=strategy, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = Odd()
    sgd = [{"params": [model.scale, model.head.bias], "lr": 0.5}]
    rest = [p for p in model.parameters() if p is not model.scale and p is not model.head.bias]
    optimizers = torch.optim.AdamW(rest, lr=0.01, amsgrad=True), torch.optim.SGD(sgd, momentum=0.9)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    return accelerator, model, optimizers


def update(accelerator: Any, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> float:
    loss = model(torch.linspace(-1, 1, 12).reshape(4, 3)).square().mean()
    accelerator.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def contents(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    """Everything the unit holds, whole."""
    io = accelerator.unit_of(model).checkpoint_io()
    return {"model": io.full_model_state(), "optimizer": io.full_optimizer_state()}


def save(layout: str, folder: str) -> dict[str, Any]:
    accelerator, model, optimizers = prepare(layout, seed=1)
    accelerator.unwrap_model(model).note = 3
    for _ in range(2):
        update(accelerator, model, optimizers)
    with publish_directory(Path(folder), accelerator.process) as staged:
        accelerator.unit_of(model).checkpoint_io().save(staged, "unit_0")
    return {**contents(accelerator, model), "next": [update(accelerator, model, optimizers) for _ in range(2)]}


def load(layout: str, folder: str) -> dict[str, Any]:
    """Load each of the states into objects that have trained on: at first on their own, then from the one before."""
    accelerator, model, optimizers = prepare(layout, seed=2)
    update(accelerator, model, optimizers)
    results = {}
    for name in LAYOUTS:
        accelerator.unwrap_model(model).note = 0
        stored = open_checkpoint(f"{folder}/{name}", accelerator.process)
        opened = []
        tensors = stored.tensors
        stored.tensors = lambda name, opened=opened, tensors=tensors: opened.append(name) or tensors(name)
        accelerator.unit_of(model).checkpoint_io().load(stored, "unit_0")
        results[name] = {**contents(accelerator, model), "note": accelerator.unwrap_model(model).note, "opened": opened}
        results[name]["next"] = [update(accelerator, model, optimizers) for _ in range(2)]
    return results


def run_all(step: Any, folder: str) -> dict[str, Any]:
    """Save the states of the layouts of this many ranks, each in a folder of its own, or load all states on them."""
    layouts = OF_SIZE[int(os.environ["WORLD_SIZE"])]
    return {layout: step(layout, f"{folder}/{layout}" if step is save else folder) for layout in layouts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("units")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, dict[str, Any]]:
    """What the state of every layout holds, and the losses that followed."""
    return {name: found for size in OF_SIZE for name, found in run_ranks(run_all, size, save, str(folder))[0].items()}


@pytest.fixture(scope="module")
def loaded(saved: dict[str, dict[str, Any]], folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank of a layout has of each of the states."""

    @functools.cache
    def load_all(world_size: int) -> list[dict[str, Any]]:
        return run_ranks(run_all, world_size, load, str(folder))

    return lambda layout: [found[layout] for found in load_all(LAYOUTS[layout])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r6_a_state_of_every_layout_loads_bit_equal_on_every_other(
    saved: dict[str, dict[str, Any]], loaded: Any, layout: str
):
    for name, found in loaded(layout)[0].items():
        assert_same(found["model"], saved[name]["model"])
        assert_same(found["optimizer"], saved[name]["optimizer"])
        assert found["note"] == 3
        if name == layout:
            assert found["next"] == saved[name]["next"]
        assert found["next"] == pytest.approx(saved[name]["next"], rel=1e-6)


def test_r6_each_rank_writes_its_part_and_reads_only_what_it_needs(loaded: Any, folder: Path):
    of_ranks = loaded("fsdp2")
    stored = open_checkpoint(folder / "fsdp2", ALONE)
    parts = stored.manifest.tensors
    whole = {"first.weight": (5, 3), "first.bias": (5,), "second.bias": (5,), "head.weight": (1, 5)}
    for name, shape in whole.items():
        sizes = [parts[f"unit_0.model.{rank:05d}.safetensors"].get(name) for rank in (0, 1)]
        assert all(entry is None or entry.shape == shape for entry in sizes)
        rows = [0 if entry is None else entry.box.sizes[0] for entry in sizes]
        # As torch.chunk cuts them: 3 and 2 rows of 5, and nothing of one row for the second rank.
        assert rows == ([1, 0] if name == "head.weight" else [3, 2])
    for rank, found in enumerate(of_ranks):
        sharded = [name for name in found["fsdp2"]["opened"] if f"{rank:05d}" in name]
        assert f"unit_0.optimizer.{rank:05d}.safetensors" in sharded


@pytest.mark.usefixtures("saved")
def test_replicated_tensors_are_shared_out_over_the_ranks(folder: Path):
    for layout in ("ddp", "hsdp"):
        tensors = open_checkpoint(folder / layout, ALONE).manifest.tensors
        names = [(name, entry.box.offsets) for entries in tensors.values() for name, entry in entries.items()]
        assert len(names) == len(set(names)), "each part is written once"
        assert len({file.split(".")[2] for file in tensors}) == LAYOUTS[layout], "and every rank writes some"


def unit(width: int = 3, bias: bool = True) -> TorchCheckpointIO:
    model = nn.Linear(width, 1, bias=bias)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return TorchCheckpointIO(model, [optimizer])


def write(folder: Path, io: TorchCheckpointIO) -> Any:
    with publish_directory(folder, ALONE) as staged:
        io.save(staged, "unit_0")
    return open_checkpoint(folder, ALONE)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 4}, r"weight is \(1, 3\) in the checkpoint and \(1, 4\) in the model"),
        ({"bias": False}, r"not in the model: 'bias'\. Build the model that was saved"),
    ],
)
def test_r6_what_differs_is_listed_and_nothing_is_loaded(tmp_path: Path, other: dict[str, Any], message: str):
    stored = write(tmp_path / "s", unit())
    io = unit(**other)
    before = {name: tensor.clone() for name, tensor in io.full_model_state().items()}
    with pytest.raises(IncompatibleCheckpointError, match=message):
        io.load(stored, "unit_0")
    assert_same(io.full_model_state(), before)


def test_r6_an_optimizer_is_never_reset_silently(tmp_path: Path):
    io = unit()
    stored = write(tmp_path / "s", TorchCheckpointIO(io.module))
    with pytest.raises(IncompatibleCheckpointError, match="holds no optimizer state for Linear, which has an opt"):
        io.load(stored, "unit_0")


def test_state_from_before_the_first_update_clears_what_has_gathered_since(tmp_path: Path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    io = TorchCheckpointIO(model, [optimizer])
    stored = write(tmp_path / "s", io)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    io.load(stored, "unit_0")
    assert not optimizer.state


def test_a_state_of_another_engine_is_refused_with_the_way_out(tmp_path: Path):
    with publish_directory(tmp_path / "s", ALONE) as staged:
        staged.write_json("unit_0.json", {"engine": "deepspeed"})
    stored = open_checkpoint(tmp_path / "s", ALONE)
    with pytest.raises(IncompatibleCheckpointError, match=r"saved by 'deepspeed'.*`accel-trainer ckpt export .*s OUT`"):
        unit().load(stored, "unit_0")


def test_parts_that_leave_gaps_are_an_error(tmp_path: Path):
    with publish_directory(tmp_path / "s", ALONE) as staged:
        half = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
        staged.write_tensors("unit_0.model.00000.safetensors", half, slices={"weight": ((1, 3), (0, 0))})
        staged.write_json("unit_0.json", {"engine": "torch", "tied": {}, "optimizer": None})
    stored = open_checkpoint(tmp_path / "s", ALONE)
    with pytest.raises(CorruptCheckpointError, match=r"does not hold all of 'weight': 1 shard\(s\) leave gaps in"):
        TorchCheckpointIO(unit().module).load(stored, "unit_0")


def places(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """Return the devices of an optimizer's state by its keys."""
    found: dict[str, set[str]] = {}
    for entry in optimizer.state.values():
        for key, value in entry.items():
            found.setdefault(key, set()).add(str(value.device))
    return found


class Planned(Reads):
    """The devices of planned targets by their keys; nothing is read, since a tensor on meta would get memory then."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, set[str]] = {}

    def add(self, stored: Any, name: str, target: Tensor) -> None:
        super().add(stored, name, target)
        self.places.setdefault(name.rpartition(".")[2], set()).add(str(target.device))


def load_in_full(target: TorchCheckpointIO, source: TorchCheckpointIO, folder: Path) -> dict[str, set[str]]:
    target.load_full_optimizer_state(source.full_optimizer_state())
    return places(target.optimizers[0])


def plan_in_shards(target: TorchCheckpointIO, source: TorchCheckpointIO, folder: Path) -> dict[str, set[str]]:
    planned = Planned()
    target.new_reads = lambda: planned
    target.plan_load(write(folder / "s", source), "unit_0", weights=False)
    return planned.places


def on_meta(io: TorchCheckpointIO) -> TorchCheckpointIO:
    """Return a unit of the same model on another device, with a new optimizer."""
    module = copy.deepcopy(io.module).to("meta")
    return TorchCheckpointIO(module, [type(io.optimizers[0])(module.parameters())])


@pytest.mark.parametrize("load", [load_in_full, plan_in_shards])
@pytest.mark.parametrize("kernel", ["for loop", "foreach", "fused", "capturable"])
def test_state_goes_to_where_torchs_own_load_puts_it(load: Any, kernel: str, tmp_path: Path):
    # A fused or capturable update reads the counter in a kernel on the device, by its address.
    io = unit()
    io.optimizers[0].param_groups[0][kernel] = True
    target = on_meta(io)
    reference = torch.optim.AdamW(target.module.parameters())
    reference.load_state_dict(io.optimizers[0].state_dict())
    assert places(reference)["step"] == {"meta" if kernel in ("fused", "capturable") else "cpu"}
    assert load(target, io, tmp_path) == places(reference)


def test_a_counter_that_the_optimizer_has_moves_where_the_saved_options_have_it_read(tmp_path: Path):
    plain, fused = unit(), unit()
    fused.optimizers[0].param_groups[0]["fused"] = True
    target = on_meta(plain)
    load_in_full(target, plain, tmp_path)
    assert plan_in_shards(target, fused, tmp_path)["step"] == {"meta"}


@pytest.mark.parametrize("load", [load_in_full, plan_in_shards])
def test_factored_state_goes_to_the_parameters_device(load: Any, tmp_path: Path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    io = TorchCheckpointIO(model, [optimizer])
    found = load(on_meta(io), io, tmp_path)
    assert found.pop("step") == {"cpu"}
    assert found.keys() == {"row_var", "col_var", "variance"}
    assert all(devices == {"meta"} for devices in found.values())


def test_optimizers_that_keep_lists_and_small_tensors_come_back(tmp_path: Path):
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    model, optimizer = build(1)
    run(model, optimizer)
    stored = write(tmp_path / "s", TorchCheckpointIO(model, [optimizer]))
    expected = run(model, optimizer)
    model, optimizer = build(2)
    TorchCheckpointIO(model, [optimizer]).load(stored, "unit_0")
    assert run(model, optimizer) == expected


class Counting(torch.optim.SGD):
    """An optimizer with a state that is of no parameter, and with something in its state_dict() besides."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["about"] = {"norm": torch.tensor(2.5)}
        self.state["trace"] = torch.tensor([1.5, self.state["steps"]])
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mood": "good"}


def test_what_an_optimizer_keeps_for_all_its_parameters_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        return model, Counting(groups, lr=0.1, momentum=0.9)

    model, optimizer = build()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    stored = write(tmp_path / "s", TorchCheckpointIO(model, [optimizer]))
    assert "Counting.state_dict() also has 'mood', which is not saved with the model" in caplog.text
    whole = TorchCheckpointIO(model, [optimizer]).full_optimizer_state()
    for load in (lambda io: io.load(stored, "unit_0"), lambda io: io.load_full_optimizer_state(whole)):
        other, fresh = build()
        load(TorchCheckpointIO(other, [fresh]))
        assert fresh.state["steps"] == 2
        assert fresh.state["about"]["norm"].item() == 2.5
        assert fresh.state["trace"].tolist() == [1.5, 2.0]
        assert fresh.state[other.weight].keys() == {"momentum_buffer"}
        assert all(group.keys() == optimizer.param_groups[0].keys() for group in fresh.param_groups)


def test_a_run_with_such_an_optimizer_is_saved_and_resumed(tmp_path: Path):
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, Counting(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "s")
    optimizer.step()
    accelerator.load_state(tmp_path / "s")
    assert optimizer.state["steps"] == 1
