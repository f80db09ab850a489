"""Local SGD: the weights of a hand-written one, and a resumed run that is the interrupted one, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator
from accel_trainer.checkpoint.interop.huggingface import find_weights
from accel_trainer.errors import ConfigError
from accel_trainer.local_sgd import LocalSGD
from tests.ranks import run_ranks

ROUND, STEPS, BATCH = 3, 8, 2
INPUTS = torch.linspace(-1, 1, 2 * STEPS * BATCH * 3).reshape(-1, 3).sin()
State = dict[str, torch.Tensor]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.norm(self.first(inputs)))).square().mean()


def build() -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Small()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def prepare(**options: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer, DataLoader]:
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer = build()
    ranks = accelerator.num_processes
    loader = DataLoader(TensorDataset(INPUTS), BATCH * 2 // ranks)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copy everything that training has changed on this rank."""
    state = {name: tensor.clone() for name, tensor in getattr(model, "module", model).state_dict().items()}
    for index, entry in enumerate(optimizer.state_dict()["state"].values()):
        state |= {f"{index}.{key}": value.clone() for key, value in entry.items()}
    return state


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def train(
    block: LocalSGD, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, stop: int = STEPS
) -> None:
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs))
            optimizer.step()
            optimizer.zero_grad()
            block.step()
        if block.num_steps == stop:
            return


def ours() -> tuple[State, State]:
    """Return the state before and after the block is left."""
    accelerator, model, optimizer, loader = prepare()
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=ROUND) as block:
        train(block, accelerator, model, optimizer, loader)
        before = state_of(model, optimizer)
    return before, state_of(model, optimizer)


def by_hand(build_outer: Any = None) -> tuple[State, State]:
    """The exchanges after steps 3 and 6, and that of leaving the block after step 8; of DiLoCo, if it is asked for."""
    accelerator = Accelerator(cpu=True)  # for the loader alone
    model, optimizer = build()
    loader = accelerator.prepare(DataLoader(TensorDataset(INPUTS), BATCH))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    outer_weights = [nn.Parameter(parameter.detach().clone()) for parameter in trained]
    outer = build_outer and build_outer(outer_weights)

    def average(tensors: Any) -> None:
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.numel():
                dist.all_reduce(tensor)
                tensor /= 2

    def synchronize() -> None:
        average(parameter.detach() for parameter in trained)
        if outer:
            for parameter, weight in zip(trained, outer_weights, strict=True):
                weight.grad = weight.detach() - parameter.detach()
            outer.step()
            for parameter, weight in zip(trained, outer_weights, strict=True):
                parameter.data.copy_(weight)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    for step, (inputs,) in enumerate(loader, 1):
        model(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % ROUND == 0:
            synchronize()
    before = state_of(model, optimizer)
    synchronize()
    average(value for entry in optimizer.state.values() for value in entry.values())
    return before, state_of(model, optimizer)


def both() -> tuple[tuple[State, State], tuple[State, State]]:
    return ours(), by_hand()


@pytest.mark.multirank
def test_replicas_are_those_of_a_loop_by_hand() -> None:
    (first, reference), (second, other_reference) = run_ranks(both, 2)
    for own, expected in ((first, reference), (second, other_reference)):
        assert same(own[0], expected[0])
        assert same(own[1], expected[1])
    assert not same(first[0], second[0])
    assert same(first[1], second[1])


def save_in_the_middle(directory: Path, stop: int, after: int) -> tuple[State, State]:
    """Save after some steps, and go on to the end; return the states after one more step and at the end."""
    accelerator, model, optimizer, loader = prepare(config={"local_steps": ROUND, "local_steps_after": after})
    with LocalSGD(accelerator, model) as block:
        train(block, accelerator, model, optimizer, loader, stop)
        accelerator.save_state(directory)
        after_one = go_on(block, accelerator, model, optimizer, loader, stop)
    return after_one, state_of(model, optimizer)


def go_on(block: LocalSGD, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, done: int) -> State:
    """Train to the end, and return the state after the first step."""
    train(block, accelerator, model, optimizer, accelerator.skip_first_batches(loader, done), block.num_steps + 1)
    state = state_of(model, optimizer)
    train(block, accelerator, model, optimizer, accelerator.skip_first_batches(loader, done + 1))
    return state


def resume(directory: Path, stop: int, after: int, in_block: bool) -> tuple[tuple[State, State], list[int]]:
    """Load before the block or in it; return the states after a step and at the end, and the exchanges on the way."""
    accelerator, model, optimizer, loader = prepare()
    if not in_block:
        accelerator.load_state(directory)
    exchanges = []
    with LocalSGD(accelerator, model, ROUND, begin_after=after) as block:
        if in_block:
            accelerator.load_state(directory)
        average = block._replicas.average_weights
        block._replicas.average_weights = lambda: (exchanges.append(block.num_steps), average())[1]
        after_one = go_on(block, accelerator, model, optimizer, loader, stop)
    return (after_one, state_of(model, optimizer)), exchanges


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("stop", "after", "in_block", "exchanges"),
    [(5, 0, True, [1, 3]), (6, 0, False, [2]), (2, 3, False, [4, 6])],
)
def test_a_resumed_run_is_the_interrupted_one(
    tmp_path: Path, stop: int, after: int, in_block: bool, exchanges: list[int]
) -> None:
    """The last one is saved in the updates that exchange gradients, where buffers go on as rank 0's."""
    whole = run_ranks(save_in_the_middle, 2, tmp_path / "state", stop, after)
    resumed = run_ranks(resume, 2, tmp_path / "state", stop, after, in_block)
    for rank in range(2):
        states, done = resumed[rank]
        assert all(same(own, expected) for own, expected in zip(states, whole[rank], strict=True))
        assert done == exchanges  # the last one is that of leaving the block


def save_apart(directory: Path) -> State:
    accelerator, model, optimizer, loader = prepare()
    with LocalSGD(accelerator, model, ROUND) as block:
        train(block, accelerator, model, optimizer, loader, stop=4)
        accelerator.save_state(directory)
        return state_of(model, optimizer)


def load_alone(directory: Path) -> State:
    accelerator, model, optimizer, _ = prepare()
    accelerator.load_state(directory)
    return state_of(model, optimizer)


def load_sharded(directory: Path) -> State:
    accelerator, model, *_ = prepare(strategy="fsdp2")
    accelerator.load_state(directory)
    return accelerator.get_state_dict(model)


@pytest.mark.multirank
def test_other_ranks_and_strategies_load_the_mean_of_the_replicas(tmp_path: Path) -> None:
    first, second = run_ranks(save_apart, 2, tmp_path / "state")
    mean = {
        name: (first[name] + second[name]) / 2 if first[name].is_floating_point() else first[name] for name in first
    }
    assert same(load_alone(tmp_path / "state"), mean)
    weights = {name: mean[name] for name in Small().state_dict()}
    assert same(run_ranks(load_sharded, 2, tmp_path / "state")[0], weights)
    exported = find_weights(tmp_path / "state")
    assert same({name: exported[name] for name in exported}, weights)


def go_on_without_a_block(directory: Path) -> None:
    accelerator, model, optimizer, loader = prepare()
    accelerator.load_state(directory)
    with pytest.raises(ConfigError, match=r"replicas of Small are apart.*Enter LocalSGD\(accelerator, model"):
        train(LocalSGD(accelerator, model, ROUND), accelerator, model, optimizer, loader)
    with LocalSGD(accelerator, model, ROUND):
        pass
    states = [None, None]
    dist.all_gather_object(states, state_of(model, optimizer))
    assert same(*states)  # type: ignore[arg-type]


@pytest.mark.multirank
def test_replicas_that_are_apart_are_not_trained_outside_of_a_block(tmp_path: Path) -> None:
    run_ranks(save_apart, 2, tmp_path / "state")
    run_ranks(go_on_without_a_block, 2, tmp_path / "state")


def what_is_refused() -> None:
    accelerator, model, *_ = prepare()
    with pytest.raises(ConfigError, match=r"local_sgd_steps=0\) is no number of updates; give 1 or more"):
        LocalSGD(accelerator, model, 0)
    with LocalSGD(accelerator, model, ROUND):
        with pytest.raises(ConfigError, match="apart already; leave that block first"), LocalSGD(accelerator, model, 2):
            pass
        with (
            pytest.raises(ConfigError, match="cannot be exchanged within a LocalSGD block"),
            accelerator.trigger_sync_in_backward(model),
        ):
            pass
    evaluated = accelerator.prepare_model(Small(), evaluation_mode=True)
    with pytest.raises(ConfigError, match=r"strategy 'ddp' keeps none here.*prepare the model for training"):
        LocalSGD(accelerator, evaluated, ROUND)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match=r"LocalSGD was asked for with mixed_precision='fp16'.*use bf16"):
        LocalSGD(accelerator, model, ROUND)
    sharding, sharded, *_ = prepare(strategy="fsdp2")
    with pytest.raises(ConfigError, match="strategy 'fsdp2' keeps none here; use strategy 'ddp'"):
        LocalSGD(sharding, sharded, ROUND)
    asked, model, optimizer, loader = prepare(config={"local_steps": ROUND})
    with pytest.raises(ConfigError, match="local_steps is set, and Small is updated outside of a LocalSGD block"):
        train(LocalSGD(asked, model, enabled=False), asked, model, optimizer, loader)
    static, model, *_ = prepare(config={"ddp": {"static_graph": True}})
    with pytest.raises(ConfigError, match=r"static_graph=True.*leave static_graph out"), LocalSGD(static, model, ROUND):
        pass


def outer_optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def diloco(directory: Path) -> list[State]:
    """Return the weights by hand, of a run, and of runs that went on from its states in a round and between two."""
    results = [by_hand(outer_optimizer)[1]]
    for load, done in (("", 0), ("4", 4), ("6", 6)):
        accelerator, model, optimizer, loader = prepare()
        block = LocalSGD(accelerator, model, ROUND, outer_optimizer=outer_optimizer)
        if load:
            accelerator.load_state(directory / load)
            loader = accelerator.skip_first_batches(loader, done)
        with block:
            for step, (inputs,) in enumerate(loader, done + 1):
                accelerator.backward(model(inputs))
                optimizer.step()
                optimizer.zero_grad()
                block.step()
                if not load and step in (4, 6):
                    accelerator.save_state(directory / str(step))
        results.append(state_of(model, optimizer))
    return results


@pytest.mark.multirank
def test_an_outer_optimizer_is_that_of_a_loop_by_hand_also_after_a_resume(tmp_path: Path) -> None:
    first, second = run_ranks(diloco, 2, tmp_path)
    assert all(same(own, other) for own, other in zip(first, second, strict=True))
    by_hand, whole, within_a_round, between_rounds = first
    for name, expected in by_hand.items():
        torch.testing.assert_close(whole[name], expected, rtol=1e-6, atol=1e-7)
    assert same(within_a_round, whole)
    assert same(between_rounds, whole)
    accelerator, model, optimizer, _ = prepare()
    assert not LocalSGD(accelerator, model, ROUND, outer_optimizer=outer_optimizer).enabled
    accelerator.load_state(tmp_path / "6")
    assert state_of(model, optimizer).keys() == whole.keys()


def fail_in_block() -> None:
    accelerator, model, optimizer, loader = prepare()

    def fail() -> None:
        with LocalSGD(accelerator, model, ROUND) as block:
            train(block, accelerator, model, optimizer, loader, stop=2)
            raise KeyError("no collective follows")

    with pytest.raises(KeyError):
        fail()
    with LocalSGD(accelerator, model, ROUND) as block:
        assert block._replicas.num_steps == 2  # none was averaged


class Counting(torch.optim.SGD):
    """Keeps integers, options that it learns, and a state on rank 1 only."""

    def step(self, closure: Any = None) -> Any:
        rank = dist.get_rank()
        for group in self.param_groups:
            group["d"] = rank
            for parameter in group["params"]:
                self.state[parameter]["codes"] = torch.full_like(parameter, rank + 1, dtype=torch.uint8)
        if rank == 1:
            self.state[group["params"][0]]["only here"] = 3
        self.state["updates"] = 10 + rank
        return super().step(closure)


def unite_odd_state() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    bare = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(bare, Counting(bare.parameters(), lr=0.1, momentum=0.9))
    with LocalSGD(accelerator, model, 5):
        accelerator.backward(model(torch.ones(1, 2) * accelerator.process_index).sum())
        optimizer.step()
    states = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    assert str(states[0]) == str(states[1])
    return {**states[0]["state"][0], "d": states[0]["param_groups"][0]["d"], **dict(optimizer.state)}  # type: ignore[index]


@pytest.mark.multirank
def test_state_that_has_no_mean_becomes_rank_zeros() -> None:
    first, second = run_ranks(unite_odd_state, 2)
    for state in (first, second):
        assert state["codes"].unique().tolist() == [1]
        assert "only here" not in state
        assert (state["d"], state["updates"]) == (0, 10)
        assert state["momentum_buffer"].unique().tolist() == [0]  # rank 0's, with the codes that belong to it


def count_updates() -> None:
    """A step is an update, and the others send nothing."""
    accelerator, model, optimizer, loader = prepare(gradient_accumulation_steps=2)
    exchanges, sequence = [], dist.distributed_c10d._get_default_group()._get_sequence_number_for_group
    with LocalSGD(accelerator, model, 2) as block:
        for micro_batch, (inputs,) in enumerate(loader, 1):
            before = sequence()
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                block.step()
            if sequence() > before:
                exchanges.append(micro_batch)
    assert (exchanges, block.num_steps) == ([4, 8], 4)


def leave_early() -> None:
    """Blocks that are left before the replicas have parted delay no other one, and go on where they are entered."""
    accelerator, model, optimizer, loader = prepare()
    late = [LocalSGD(accelerator, model, 1000, begin_after=4) for _ in range(2)]
    for block, error in zip(late, (None, KeyError("no collective follows")), strict=True):
        with nullcontext() if error is None else pytest.raises(KeyError), block:
            train(block, accelerator, model, optimizer, loader, stop=3)
            if error is not None:
                raise error
        with LocalSGD(accelerator, model, 1000) as another:
            assert another._replicas.is_apart
    for block in late:
        with block:
            train(block, accelerator, model, optimizer, loader, stop=4)
            assert block._replicas.is_apart


@pytest.mark.multirank
@pytest.mark.parametrize(
    "job", [what_is_refused, fail_in_block, count_updates, leave_early], ids=lambda job: job.__name__
)
def test_replicas_that_cannot_be_apart_are_refused_and_errors_or_micro_batches_exchange_nothing(job: Any) -> None:
    run_ranks(job, 2)


def test_one_process_has_nothing_to_average() -> None:
    accelerator, model, optimizer, loader = prepare()
    with LocalSGD(accelerator, model, None) as block:
        train(block, accelerator, model, optimizer, loader)
    assert (block.enabled, block.num_steps) == (False, STEPS)


def be_no_number_on_one_rank() -> bool:
    accelerator, model, optimizer, loader = prepare()
    with LocalSGD(accelerator, model, 2) as block:
        for inputs, *_ in loader:
            factor = float("nan") if accelerator.process_index == 1 else 1.0
            accelerator.backward(model(inputs) * factor)
            optimizer.step()
            optimizer.zero_grad()
            block.step()
    return any(bool(parameter.isnan().any()) for parameter in model.parameters())


@pytest.mark.multirank
def test_a_rank_whose_replica_is_no_number_calls_for_nobody() -> None:
    assert run_ranks(be_no_number_on_one_rank, 2, timeout=40) == [True, True]


def blocks_by_epoch(directory: Path) -> list[Any]:
    accelerator, model, optimizer, loader = prepare()
    for epoch in range(2):
        with LocalSGD(accelerator, model, ROUND, outer_optimizer=outer_optimizer) as block:
            for (inputs,) in loader:
                accelerator.backward(model(inputs))
                optimizer.step()
                optimizer.zero_grad()
                block.step()
        accelerator.save_state(directory / str(epoch))
    again, model, *_ = prepare()
    LocalSGD(again, model, ROUND, outer_optimizer=outer_optimizer)
    again.load_state(directory / "1")
    return list(accelerator._registered.objects)


@pytest.mark.multirank
def test_blocks_of_several_epochs_have_one_outer_optimizer(tmp_path: Path) -> None:
    assert run_ranks(blocks_by_epoch, 2, tmp_path) == [["OuterOptimizer"]] * 2


def test_free_memory_forgets_the_outer_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    for width in (2, 3):
        accelerator.free_memory()
        model = nn.Linear(width, 1)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        LocalSGD(accelerator, model, ROUND, outer_optimizer=outer_optimizer)
    assert list(accelerator._registered.objects) == ["OuterOptimizer"]
