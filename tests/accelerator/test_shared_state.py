"""What a script can ask without the Accelerator at hand, and the random streams that ranks may share."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_trainer import (
    Accelerator,
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    ProjectConfiguration,
)
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.state import is_initialized
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator")


def test_states_without_arguments_show_the_last_accelerators():
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    state, gradients = AcceleratorState(), GradientState()
    assert (state.mixed_precision, state.num_processes, state.distributed_type) == ("bf16", 1, DistributedType.NO)
    assert (state.is_main_process, state.device) == (True, torch.device("cpu"))
    assert gradients.num_steps == 3
    assert is_initialized()
    second = Accelerator(cpu=True)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (3, 1)
    assert AcceleratorState().mixed_precision == "no"
    assert (state.mixed_precision, first.mixed_precision, second.mixed_precision) == ("bf16", "bf16", "no")
    assert pickle.loads(pickle.dumps(second.state)).mixed_precision == "no"


def test_a_gradient_state_follows_the_step_that_its_accelerator_is_in():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    gradients = GradientState()
    synced = []
    for _ in accelerator.prepare(DataLoader(torch.zeros(4, 2), batch_size=1)):
        with accelerator.accumulate(model):
            synced.append((gradients.sync_gradients, gradients.end_of_dataloader))
    assert synced == [(False, False), (True, False), (False, False), (True, True)]


def test_a_state_keeps_its_attributes_where_the_one_that_made_them_is_collected(monkeypatch: pytest.MonkeyPatch):
    # Python 3.13.0 cleared them: a dict that is an instance's own goes with it.
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(GradientState, "_shared_state", {})
    process = replace(Accelerator(cpu=True).process)
    first = [PartialState(process=process), GradientState({"num_steps": 5})]
    second = PartialState(process=process), GradientState()
    first.append(first)  # freed by the collector, and not by its count
    del first, process
    gc.collect()
    assert (second[0].process_index, second[1].plugin_kwargs) == (0, {"num_steps": 5})


def states_alone() -> None:
    """States in a process that never had an Accelerator."""
    assert not is_initialized()
    assert PartialState._shared_state == AcceleratorState._shared_state == GradientState._shared_state == {}
    gradients = GradientState()
    assert (gradients.sync_gradients, gradients.num_steps, gradients.in_dataloader) == (True, 1, False)
    assert GradientState().__dict__ is gradients.__dict__
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    assert is_initialized()
    assert (state.initialized, state.mixed_precision, state.num_processes) == (True, "bf16", 1)
    assert AcceleratorState().mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="already initialized with mixed_precision='bf16', and 'no' is asked for"):
        AcceleratorState(mixed_precision="no")


def test_states_stand_alone():
    run_ranks(states_alone, 1)


def test_states_outlive_their_accelerator_and_do_not_keep_it():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    gone = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert gone() is None
    assert (AcceleratorState().mixed_precision, GradientState().num_steps) == ("bf16", 3)


def test_an_accelerator_goes_without_waiting_for_the_collector():
    """Also in the middle of a pass; models and what optimizers keep of them would stay in a device's memory."""
    accelerator, bare = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        bare, torch.optim.SGD(bare.parameters(), lr=0.1), DataLoader(torch.zeros(4, 2))
    )
    passing = iter(loader)
    accelerator.backward(model(next(passing)).sum())
    optimizer.step()
    gone = [weakref.ref(item) for item in (accelerator, model, loader)]
    gc.collect()
    gc.disable()
    try:
        del accelerator, bare, model, optimizer, loader, passing
        assert [each() for each in gone] == [None, None, None]
    finally:
        gc.enable()


def test_all_partial_states_of_a_job_are_one():
    first = PartialState(cpu=True)
    first.note = "written on one"
    assert PartialState(cpu=True).note == "written on one"
    del first.note


def reset_states() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    partial, state, gradients = PartialState(), AcceleratorState(), GradientState()
    for kind, shown in ((AcceleratorState, state), (PartialState, partial)):
        with pytest.raises(AttributeError, match=f"'{kind.__name__}' object has no attribute 'colour'"):
            _ = shown.colour
        kind._reset_state()
        assert not shown.initialized
        assert kind._shared_state == {}
        for name in ("num_processes", "device", "distributed_type"):
            with pytest.raises(AttributeError, match=f"if `{kind.__name__}._reset_state\\(\\)` was called"):
                getattr(shown, name)
        shown.colour = "green"
        assert shown.colour == "green"
    GradientState._reset_state()
    assert (gradients.num_steps, GradientState().num_steps) == (2, 1)
    assert (accelerator.num_processes, accelerator.gradient_accumulation_steps) == (1, 2)
    assert Accelerator(cpu=True).state.initialized
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


def test_a_reset_takes_the_attributes_of_states_and_leaves_accelerators():
    run_ranks(reset_states, 1)


def ask_after_the_end() -> tuple[tuple[int, int], bool, list[int]]:
    """End the training, and ask for the state on one rank alone; then join again, on both."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    accelerator.end_training()
    state = PartialState() if rank == 0 else accelerator.state
    shown, has_joined = (state.process_index, state.num_processes), torch.distributed.is_initialized()
    again = Accelerator(cpu=True)
    return shown, has_joined, again.gather(torch.tensor([rank])).tolist()


def test_a_state_of_one_rank_alone_after_the_end_joins_nothing():
    assert run_ranks(ask_after_the_end, 2, timeout=30) == [((rank, 2), False, [0, 1]) for rank in range(2)]


def test_the_project_directory_reaches_a_configuration_without_one():
    configuration = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_dir="there", project_config=configuration)
    assert (accelerator.project_dir, accelerator.logging_dir) == ("there", "there")
    assert accelerator.project_configuration is configuration
    logs = Accelerator(cpu=True, project_config=ProjectConfiguration("here", logging_dir="logs"))
    assert (logs.project_dir, logs.logging_dir) == ("here", "logs")
    with pytest.raises(ConfigError, match=r"project_dir='b' was given, and ProjectConfiguration\(project_dir='a'\)"):
        Accelerator(cpu=True, project_dir="b", project_config=ProjectConfiguration("a"))


class Noisy(torch.utils.data.Dataset):
    """A dataset that augments with torch's main stream."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def draw(rng_types: Any) -> dict[str, Any]:
    """Iterate twice over a loader whose dataset draws random numbers; seeds differ by rank."""
    accelerator = Accelerator(cpu=True, rng_types=rng_types)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(Noisy(), batch_size=2))
    return {"noise": [torch.cat(list(loader)).flatten().tolist() for _ in range(2)], "types": accelerator.rng_types}


def test_streams_that_are_asked_for_are_set_to_those_of_rank_0():
    first, second = run_ranks(draw, 2, ["torch", "generator"])
    assert first == second
    assert first["types"] == ("torch",)
    first, second = run_ranks(draw, 2, ["generator"])
    assert first["noise"][0] != second["noise"][0]


@pytest.mark.parametrize("names", [["cuda"], ["torch", "generater"], "numpy"])
def test_a_stream_that_the_ranks_do_not_have_is_an_error(names: Any):
    with pytest.raises(ConfigError, match=r"rng_types has '.*'; expected some of 'torch', 'generator', on ranks whose"):
        Accelerator(cpu=True, rng_types=names)


def fail_first(who: int, local: bool) -> tuple[list[str], list[int]]:
    """Enter a block that the main process, or a rank of its own choice, does not survive."""
    accelerator = Accelerator(cpu=True)
    happened = []
    try:
        with accelerator.local_main_process_first() if local else accelerator.main_process_first():
            happened.append("entered")
            if accelerator.process_index == who:
                raise OSError("the disk is full")
    except OSError as error:
        happened.append(str(error))
    # Whoever failed, all ranks are at the same place again.
    return happened, accelerator.gather(torch.tensor(accelerator.process_index)).tolist()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("local", [False, True])
def test_a_block_that_raises_leaves_nobody_waiting(who: int, local: bool):
    for rank, (happened, ranks) in enumerate(run_ranks(fail_first, 2, who, local)):
        assert happened == ["entered", "the disk is full"][: 1 + (rank == who)]
        assert ranks == [0, 1]


def take_turns(folder: str) -> tuple[Any, ...]:
    """Write a file first on one rank, which the others find, print, and call functions that run on some ranks."""
    state = PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=40))
    with pytest.raises(ConfigError, match="nccl"):
        PartialState(cpu=True, backend="nccl")
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        found = Path(folder, "cache").exists()
        Path(folder, "cache").touch()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("a line", end=".")
    deciders = [
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=1),
        accelerator.on_local_process(local_process_index=1),
    ]
    return state.backend, found, printed.getvalue(), [decide(lambda: state.process_index)() for decide in deciders]


def test_a_decorated_function_asks_when_it_is_called_who_is_the_main_process():
    """Where the first of two ranks is lost, the other one is."""
    state = PartialState(process=ProcessContext(1, 1, 2, 2, torch.device("cpu"), "gloo"))
    log = state.on_main_process(lambda: "logged")
    assert log() is None
    state.process = ProcessContext(0, 0, 1, 1, torch.device("cpu"), "gloo")
    assert log() == "logged"


def test_ranks_take_turns_print_for_their_node_and_run_the_functions_that_are_for_them(tmp_path: Path):
    assert run_ranks(take_turns, 3, str(tmp_path)) == [
        ("gloo", False, "a line.", [0, 0, None, None, None]),
        ("gloo", True, "", [None, None, None, 1, 1]),
        ("gloo", True, "", [None, None, 2, None, None]),
    ]


def test_several_tpus_have_the_name_of_the_field():
    # A device of that kind cannot be made without torch-tpu and a TPU.
    assert DistributedType.of("MULTI", SimpleNamespace(type="tpu")) is DistributedType.XLA  # type: ignore[arg-type]
    assert DistributedType.of("MULTI", torch.device("xpu")) is DistributedType.MULTI_XPU
