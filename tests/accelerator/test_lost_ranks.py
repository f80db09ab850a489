"""A loop goes on without a rank that was killed: the same samples in each update, and the same weights."""

from __future__ import annotations

import functools
import io
import itertools
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from accel_trainer import Accelerator
from accel_trainer.accelerator import lost_ranks
from accel_trainer.accelerator.lost_ranks import LostRanks
from accel_trainer.config.dialects.environment import RETURNS_VARIABLE
from accel_trainer.local_sgd import LocalSGD
from accel_trainer.runtime import rank_loss
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.process import find_rank
from accel_trainer.runtime.rank_loss import Survivors
from accel_trainer.runtime.whereabouts import waits
from accel_trainer.strategies.ddp import DDPUnit
from tests.cells import beyond, crossed
from tests.fault_injection import fault_env
from tests.ranks import RankFailure, map_jobs, preload, run_ranks, wait_until

preload("accel_trainer.accelerator")

CONTINUE = {"ACCEL_TRAINER_LAUNCH__ON_RANK_LOSS": "continue"}
REPLACE = {"ACCEL_TRAINER_LAUNCH__ON_RANK_LOSS": "replace", "ACCEL_TRAINER_LAUNCH__MAX_RESTARTS": "9"}


class Setup(NamedTuple):
    """A run of some epochs."""

    num_steps: int = 1
    batch_size: int = 2
    even_batches: bool = True
    by_tokens: bool = False
    num_workers: int = 0
    strategy: str = "ddp"
    width: int = 8
    ema_decay: float | None = None
    num_epochs: int = 2
    gathers: bool = True
    """Whether each micro-batch ends with a collective of the loop."""
    meets_ahead: bool = False
    """Whether all ranks wait for each other between a batch and its micro-batch, too."""
    zeroes_always: bool = True
    """Whether gradients are zeroed in each micro-batch, and not only where the optimizer has stepped."""
    waits: tuple[int, ...] = ()
    """Updates behind which the ranks that are left wait for some that return."""
    num_at_once: int = 1
    """Of those that return."""
    num_replicas: int = 0
    """Of shards, of fsdp2."""


class Killed(NamedTuple):
    """Where a rank is killed: before which call of its micro-batch `number`, counted from 0 over the epochs."""

    rank: int
    number: int
    place: str


class Centered(nn.Module):
    """Takes the mean of the micro-batch off, so that the loss is none of single samples, and moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return x - x.mean(0)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), Centered(), nn.Linear(width, 1))

    def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - x.sum(1, keepdim=True)).square()


class Counts:
    """What a loop counts, and a rank that joins the others goes on with."""

    def __init__(self) -> None:
        self.updates = self.attempt = self.number = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def build(setup: Setup, folder: Path | None = None) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"data": {"even_batches": setup.even_batches}, "strategy": setup.strategy}
    if setup.num_replicas:
        options |= {"parallel": {"dp_replicate_size": setup.num_replicas}, "fsdp": {"wrap_classes": ["Linear"]}}
    if setup.ema_decay is not None:
        options["ema_decay"] = setup.ema_decay
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=setup.num_steps, config=options)
    data = [{"index": i, "x": torch.randn(4, generator=torch.Generator().manual_seed(i)).double()} for i in range(30)]
    net = Net(setup.width).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data, setup.batch_size, shuffle=True, num_workers=setup.num_workers)
    wait_for_others(folder if setup.waits else None, setup.num_at_once)
    return accelerator, net, *accelerator.prepare(net, optimizer, loader, scheduler)


def train(killed: tuple[Killed, ...], setup: Setup, folder: Path | None = None, spoils: bool = False) -> Any:
    """Return parameters, updates, size of the job and rank; write which samples were taken into which update."""
    launched_as = find_rank()
    accelerator, net, model, optimizer, loader, scheduler = build(setup, folder)
    counts = Counts()
    accelerator.register_for_checkpointing(counts)

    def pass_place(name: str) -> None:
        if Killed(launched_as, counts.number, name) in killed:
            kill_oneself()

    pass_inner_places(accelerator, net, accelerator.unit_of(model), pass_place)
    accelerator.load_state("nowhere", missing_ok=True)
    for _ in range(loader.epoch, setup.num_epochs):
        for inputs in loader:
            valid = loader.rows.rows[accelerator.process_index]
            if folder is not None:
                note_samples(folder / str(launched_as), accelerator, counts, inputs["index"][:valid].tolist())
            pass_place("data")
            with begin_micro_batch(accelerator, model, setup):
                losses = model(**inputs)
                pass_place("backward")
                accelerator.backward(mean_of(losses, accelerator, setup))
                pass_place("optimizer")
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                zero_gradients(optimizer, accelerator, setup)
            if spoils and launched_as == 0 and counts.number == 2:
                accelerator.lost_ranks.num_updates += 2
            pass_place("gather")
            if setup.gathers:  # one that is given a result has that of the ranks before
                assert len(accelerator.gather(torch.ones(1))) >= accelerator.num_processes
            if accelerator.sync_gradients:
                counts.updates, counts.attempt = counts.updates + 1, 0
            elif loader.num_given == 0:  # a rank was lost
                counts.attempt += 1
            pass_place("callback")
            counts.number += 1
            if folder is not None and accelerator.sync_gradients and counts.updates in setup.waits:
                wait_for_return(accelerator, folder, counts.updates, setup.num_at_once)
    values = values_of(net, accelerator.unit_of(model).averages)
    check_end(accelerator, counts, scheduler)
    facts = counts.updates, accelerator.num_processes, accelerator.process_index
    accelerator.end_training()
    return values, *facts


def pass_inner_places(accelerator: Accelerator, net: nn.Module, unit: Any, pass_place: Callable[[str], None]) -> None:
    """Have places passed in the middle of a forward and of a backward, before the vote, and before the step."""
    step, lost = unit.step, accelerator.lost_ranks

    def pass_then(place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*args: Any, **kwargs: Any) -> Any:
            pass_place(place)
            return call(*args, **kwargs)

        return passed

    if not unit.needs_vote:
        return
    net.body[3].register_forward_pre_hook(pass_then("forward", lambda *_: None), prepend=True)
    net.body[0].register_full_backward_pre_hook(pass_then("reduction", lambda *_: None))
    unit.step = pass_then("step", step)
    if lost is not None:
        lost.vote = pass_then("vote", lost.vote)  # type: ignore[method-assign]


def check_end(accelerator: Accelerator, counts: Counts, scheduler: Any) -> None:
    assert counts.updates == scheduler.last_epoch
    # Gathers would wait for a rank that has none.
    assert (current_watch() is None) == (accelerator.num_processes == 1)
    if accelerator.lost_ranks is not None:  # the connection for the next group stays where a loss closes this one's
        survivors = accelerator.lost_ranks._survivors
        wait_until(lambda: survivors._tidying is None or not survivors._tidying.is_alive())
        assert survivors._spare is not None
        present, own = rank_loss._sockets(), rank_loss._connections
        assert all(own.get(number) != present[number] for number in survivors._spare[1])
        peers = [ends[1] for number, ends in present.items() if own.get(number) != ends and isinstance(ends[1], tuple)]
        assert all(port == survivors._base.port for _, port, *_ in peers), "a group that was left has not ended"


def values_of(net: nn.Module, averages: Any) -> dict[str, torch.Tensor]:
    values = {name: value.detach().clone() for name, value in net.named_parameters()}
    if averages is not None:
        values |= {f"average of {name}": averages.of(value).detach() for name, value in net.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def begin_micro_batch(accelerator: Accelerator, model: nn.Module, setup: Setup) -> AbstractContextManager[None]:
    if setup.meets_ahead:
        accelerator.wait_for_everyone()
    return accelerator.accumulate(model)


def mean_of(losses: torch.Tensor, accelerator: Accelerator, setup: Setup) -> torch.Tensor:
    if not setup.zeroes_always:
        accelerator.gather(torch.ones(1))
    return accelerator.global_token_mean(losses.sum(), losses.numel()) if setup.by_tokens else losses.mean()


def zero_gradients(optimizer: Any, accelerator: Accelerator, setup: Setup) -> None:
    if setup.zeroes_always or accelerator.sync_gradients:
        optimizer.zero_grad()


def wait_for_return(accelerator: Any, folder: Path, update: int, num_at_once: int = 1) -> None:
    """Wait behind an update until those that return wait to join, and they for this."""
    (folder / f"waits behind {update}").touch()
    survivors = accelerator.lost_ranks._survivors
    wait_until(lambda: len(survivors.returning) >= num_at_once * survivors.replica_size)


def wait_for_others(folder: Path | None, num_at_once: int = 1) -> None:
    """Wait, in a process that returns, until the others wait for it."""
    number, num_first, size = map(int, os.environ.get(RETURNS_VARIABLE, "0/1/1").split("/"))
    if folder is not None:
        wait_until(lambda: len([*folder.glob("waits*")]) > (number - num_first) // (num_at_once * size))


def note_samples(path: Path, accelerator: Accelerator, counts: Counts, samples: list[int]) -> None:
    # A rank may have begun an update, and be lost, before the others have had the gather that comes before it.
    num_meetings = 0 if accelerator.lost_ranks is None else accelerator.lost_ranks._survivors._num_meetings
    with open(path, "a") as file:
        file.write(json.dumps([counts.updates, [num_meetings, counts.attempt], samples]) + "\n")


def samples_of_updates(folder: Path) -> list[list[int]]:
    """Return the samples of each update's last attempt, over all ranks, those that were killed included."""
    found: dict[int, dict[int, dict[str, tuple[int, list[int]]]]] = {}
    for path in folder.glob("[0-9]"):
        for update, (meeting, attempt), samples in map(json.loads, path.read_text().splitlines()):
            ranks = found.setdefault(update, {}).setdefault(meeting, {})
            # Behind a meeting a rank reads what it alone has begun once more: attempts are each rank's own.
            before, noted = ranks.get(path.name, (attempt, []))
            ranks[path.name] = attempt, [*(noted if attempt == before else []), *samples]
    last = [meetings[max(meetings)] for _, meetings in sorted(found.items())]
    return [sorted(itertools.chain.from_iterable(noted for _, noted in ranks.values())) for ranks in last]


def undisturbed(setup: Setup, world_size: int) -> Any:
    """Return what DDP gives without a loss, whatever shards the model, reads the data, or waits."""
    plain = Setup()
    same = {
        name: getattr(plain, name)
        for name in ("num_workers", "strategy", "gathers", "meets_ahead", "zeroes_always", "num_replicas")
    }
    return _undisturbed(setup._replace(**same, waits=(), num_at_once=1), world_size)


@functools.cache
def _undisturbed(setup: Setup, world_size: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(train, world_size, (), setup, Path(folder))[0], samples_of_updates(Path(folder))


def check(
    folder: Path,
    killed: tuple[Killed, ...],
    setup: Setup,
    world_size: int = 4,
    left: list[int] | None = None,
    run: Callable[..., Any] | None = None,
) -> None:
    (expected, *_), samples = undisturbed(setup, world_size)
    env = REPLACE if setup.waits else CONTINUE
    run = run or functools.partial(run_ranks, train)
    num_returning = len(setup.waits) * setup.num_at_once
    results = run(world_size, killed, setup, folder, env=env, outlives=True, replaces=num_returning, timeout=90)
    lost = [each.rank for each in killed]
    # Those that return are the last, in the order in which they do.
    left = left or [rank for rank in range(world_size) if rank not in lost] + lost * bool(setup.waits)
    assert samples_of_updates(folder) == samples
    for number, rank in enumerate(left):
        values, *numbers = results[rank]
        assert numbers == [len(samples), len(left), number]
        for name, value in expected.items():
            bound = 1e-6 if setup.by_tokens else 1e-12  # the factor of tokens is float32
            assert (values[name] - value).abs().max() < bound, name
        assert all(map(torch.equal, values.values(), results[left[0]][0].values()))


# The others of the places are met where rank after rank is lost.
@pytest.mark.parametrize(
    ("place", "rank"),
    [
        *crossed(["optimizer", "gather"], [0, 2]),
        *map(beyond, itertools.product(["data", "backward", "callback"], [0, 2])),
    ],
)
def test_updates_are_those_of_the_run_without_a_loss(place: str, rank: int, tmp_path: Path) -> None:
    check(tmp_path, (Killed(rank, 3, place),), Setup())


@pytest.mark.parametrize(
    "setup",
    [
        Setup(num_steps=3, num_workers=2),
        Setup(num_steps=2, batch_size=3, even_batches=False),
        Setup(num_steps=2, by_tokens=True, even_batches=False),
    ],
    ids=str,
)
def test_windows_of_several_micro_batches_begin_again(setup: Setup, tmp_path: Path) -> None:
    check(tmp_path, (Killed(1, 4, "backward"),), setup)


@pytest.mark.parametrize("place", ["data", "backward"], ids=["in its forward", "in a gather behind its forward"])
def test_gradients_of_a_micro_batch_that_is_given_up_come_into_no_update(place: str, tmp_path: Path) -> None:
    """Also in a loop that zeroes gradients behind a step alone."""
    check(tmp_path, (Killed(0, 3, place),), Setup(zeroes_always=False), world_size=3)


def test_a_batch_that_is_in_hand_in_a_collective_is_trained_once(tmp_path: Path) -> None:
    """Also by a rank that was behind an update, whose loop has not come to the batch."""
    for name in ("level", "behind"):
        (tmp_path / name).mkdir()
    check(tmp_path / "level", (Killed(1, 3, "data"),), Setup(num_steps=2, meets_ahead=True), world_size=3)
    run = functools.partial(run_ranks, train_behind, failing=Killed(1, 2, "backward"))
    check(tmp_path / "behind", (Killed(2, 3, "data"),), Setup(gathers=False, meets_ahead=True), world_size=3, run=run)


def train_two_loaders(where: str) -> Any:
    """Train over two loaders, beside a teacher; return updates and weights.

    Where a rank is lost before the first, the second is prepared behind that.
    """
    launched_as = find_rank()
    accelerator, net, model, optimizer, first, _ = build(Setup())
    teacher = accelerator.prepare_model(nn.Linear(4, 1).double(), evaluation_mode=True)
    second = DataLoader([{"index": i, "x": torch.full((4,), i / 36).double()} for i in range(36)], 2)
    if where != "before the first":
        second = accelerator.prepare(second)
    elif launched_as == 1:
        kill_oneself()
    accelerator.gather(torch.ones(1))
    num_updates = 0
    for loader in (first, second):
        for inputs in accelerator.prepare(loader):
            if where == "within the first" and num_updates == 2 and launched_as == 1:
                kill_oneself()
            with accelerator.accumulate(model):
                accelerator.backward((model(**inputs) - teacher(inputs["x"]).detach()).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            num_updates += accelerator.sync_gradients
    return num_updates, values_of(net, None)


@pytest.mark.parametrize("where", ["before the first", "within the first"])
def test_loaders_that_are_trained_first_behind_a_loss_have_the_updates_of_a_run_without_one(where: str) -> None:
    num_updates, expected = run_ranks(train_two_loaders, 3, "")[0]
    results = run_ranks(train_two_loaders, 3, where, env=CONTINUE, outlives=True, timeout=60)
    for rank in (0, 2):
        assert results[rank][0] == num_updates
        assert all((results[rank][1][name] - value).abs().max() < 1e-6 for name, value in expected.items())


def test_loses_rank_after_rank_until_one_is_left(tmp_path: Path) -> None:
    check(tmp_path, (Killed(3, 2, "data"), Killed(0, 6, "backward"), Killed(1, 15, "callback")), Setup())


@waits("a collective")
def wait_in_vain() -> None:
    time.sleep(60)


def train_in_vain(killed: tuple[Killed, ...], setup: Setup, folder: Path) -> Any:
    if find_rank() == 0:
        globals()["kill_oneself"] = wait_in_vain
    return train(killed, setup, folder)


def test_a_rank_whose_collective_does_not_end_gives_itself_up(tmp_path: Path) -> None:
    """As one that gloo has forgotten: closing the job's connections does not wake it."""
    killed = Killed(0, 3, "backward"), Killed(2, 3, "backward")
    check(tmp_path, killed, Setup(), world_size=3, run=functools.partial(run_ranks, train_in_vain))


def test_begins_the_first_update_again(tmp_path: Path) -> None:
    check(tmp_path, (Killed(1, 0, "backward"),), Setup(), world_size=2)


def test_a_loss_where_the_order_of_buckets_is_exchanged(tmp_path: Path) -> None:
    """In the second forward of a wrapper, and of one that has begun an update again."""
    check(tmp_path, (Killed(1, 1, "data"), Killed(0, 4, "data")), Setup())


def say_why(parallel: dict[str, int]) -> str:
    accelerator = Accelerator(cpu=True, config={"strategy": "fsdp2", "parallel": parallel})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    config = AutoConfig.for_model("llama", num_attention_heads=2, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert accelerator.lost_ranks is not None
    return accelerator.lost_ranks._survivors._said["able"]


@pytest.mark.parametrize(
    ("world_size", "parallel", "reason"),
    [
        (2, {}, "its shards of the model, or of the optimizer's state, are lost with the rank"),
        (4, {"dp_replicate_size": 2, "tp_size": 2}, "its mesh has other axes than those of replicas and shards"),
    ],
    ids=["shards", "parts"],
)
def test_shards_are_refused_by_name(world_size: int, parallel: dict[str, int], reason: str) -> None:
    assert all(said.startswith(reason) for said in run_ranks(say_why, world_size, parallel, env=CONTINUE))


def say_why_of_two() -> str:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    accelerator.prepare(model, *(torch.optim.SGD(layer.parameters(), 0.1) for layer in model))
    assert accelerator.lost_ranks is not None
    return accelerator.lost_ranks._survivors._said["able"]


def test_several_optimizers_are_refused_by_name() -> None:
    said = run_ranks(say_why_of_two, 2, env=CONTINUE)
    assert all(each.startswith("its model has several optimizers") for each in said)


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_behind(killed: tuple[Killed, ...], setup: Setup, folder: Path, failing: Killed) -> Any:
    """Train; on a rank the exchange of a backward, or a gather, fails when the others have had what it sent."""
    calls = itertools.count()

    def fail_once(result: Any) -> Any:
        if next(calls) == failing.number and find_rank() == failing.rank:
            raise RuntimeError("gloo: Connection closed by peer")
        return result

    backward, call = DDPUnit.backward, LostRanks.call
    if failing.place == "backward":
        DDPUnit.backward = lambda *args, **kwargs: fail_once(backward(*args, **kwargs))  # type: ignore[method-assign]
    else:
        LostRanks.call = lambda self, collective, **kwargs: call(  # type: ignore[method-assign]
            self, lambda: fail_once(collective()), **kwargs
        )
    rejoin, launched_as = lost_ranks.rejoin, find_rank()

    def rejoin_or_die(*args: Any) -> None:
        if any(each.rank == launched_as and each.place == "meeting" for each in killed):
            kill_oneself()
        rejoin(*args)

    lost_ranks.rejoin = rejoin_or_die
    return train(killed, setup, folder)


def test_those_ahead_are_lost_too_where_they_would_give_an_update(tmp_path: Path) -> None:
    """The one that is left, which had not completed it, begins it again."""
    run = functools.partial(run_ranks, train_behind, failing=Killed(1, 2, "backward"))
    check(tmp_path, (Killed(2, 2, "optimizer"), Killed(0, 2, "meeting")), Setup(), world_size=3, left=[1], run=run)


def train_levelling(killed: tuple[Killed, ...], setup: Setup, folder: Path, third: int) -> Any:
    """Train; rank 1 is behind the others, and another rank, or it, is killed while it is given what it lacks."""
    level = LostRanks._level

    def level_or_die(self: LostRanks, *args: Any) -> Any:
        if self._survivors.rank == third:
            kill_oneself()
        wait_until(lambda: third in self._survivors.lost)
        return level(self, *args)

    LostRanks._level = level_or_die  # type: ignore[method-assign]
    return train_behind(killed, setup, folder, Killed(1, 2, "backward"))


@pytest.mark.parametrize("third", [0, 1, 3], ids=["the one that gives", "the one that takes", "another"])
def test_a_rank_is_lost_while_one_is_given_an_update(third: int, tmp_path: Path) -> None:
    run = functools.partial(run_ranks, train_levelling, third=third)
    check(tmp_path, (Killed(2, 2, "optimizer"),), Setup(), left=[r for r in (0, 1, 3) if r != third], run=run)


def test_the_only_one_ahead_is_lost_while_it_gives_an_update(tmp_path: Path) -> None:
    """The one that is left, which had not completed it, begins it again."""
    run = functools.partial(run_ranks, train_levelling, third=0)
    check(tmp_path, (Killed(2, 2, "optimizer"),), Setup(), world_size=3, left=[1], run=run)


@pytest.mark.parametrize(
    ("failing", "killed", "setup"),
    [
        beyond((Killed(1, 2, "backward"), Killed(2, 2, "optimizer"), Setup())),  # as where a third is lost, above
        (Killed(1, 2, "backward"), Killed(2, 3, "backward"), Setup(gathers=False)),
        (Killed(3, 3, "backward"), Killed(1, 3, "optimizer"), Setup(num_steps=2, by_tokens=True, even_batches=False)),
        (Killed(1, 3, "gather"), Killed(2, 3, "callback"), Setup()),
    ],
    ids=str,
)
def test_a_rank_behind_the_others_is_given_what_they_have(
    failing: Killed, killed: Killed, setup: Setup, tmp_path: Path
) -> None:
    check(tmp_path, (killed,), setup, run=functools.partial(run_ranks, train_behind, failing=failing))


def test_samples_of_an_update_that_a_lost_rank_alone_had_begun_are_taken_once(tmp_path: Path) -> None:
    run = functools.partial(run_ranks, train_behind, failing=Killed(1, 2, "gather"))
    check(tmp_path, (Killed(0, 3, "data"),), Setup(), world_size=2, run=run)


def test_ranks_at_different_updates_give_up_together() -> None:
    with pytest.raises(
        RankFailure, match="some had completed an update, or a collective, that others had not"
    ) as failed:
        run_ranks(train, 4, (Killed(2, 3, "backward"),), Setup(), spoils=True, env=CONTINUE, outlives=True)
    assert len(failed.value.failures) == 3


def warn_of_no_launcher() -> str:
    """Ask for ranks that outlive others where nothing has started them that would tell of a loss."""
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("accel_trainer").addHandler(handler)
    assert Accelerator(cpu=True).lost_ranks is None  # connects them, by the store of the test's own launcher
    os.environ |= {**CONTINUE, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert Accelerator(cpu=True).lost_ranks is None
    return handler.stream.getvalue()


def test_without_a_launcher_that_outlives_the_ranks_a_line_says_so() -> None:
    first, second = run_ranks(warn_of_no_launcher, 2)
    assert "launch.on_rank_loss is continue, and has no effect: what has started these ranks is no launcher" in first
    assert not second


def save_and_evaluate(folder: Path, killed: bool) -> Any:
    """Train an update, save, train another, evaluate; a rank may be killed in the evaluation."""
    accelerator, _, model, optimizer, loader, _ = build(Setup())
    evaluated = accelerator.prepare(DataLoader(torch.arange(24.0).reshape(24, 1), 2))
    for number, inputs in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        if number == 0:
            accelerator.save_state(folder / "state")
        if number == 1:
            break
    weights = accelerator.unwrap_model(model).state_dict()
    for step, batch in enumerate(evaluated):
        if killed and step == 1 and accelerator.process_index == 2:
            kill_oneself()
        accelerator.gather_for_metrics(batch)
    return weights


def load_whole(folders: list[Path]) -> None:
    accelerator = build(Setup())[0]
    accelerator.prepare(DataLoader(torch.arange(24.0).reshape(24, 1), 2))
    for folder in folders:
        accelerator.load_state(folder)


# Beyond the sample: before a vote a rank that has written one file is as one that has written all, and behind it a rank
# that does not rename does nothing until it gives the next.
@pytest.mark.parametrize(
    "points", [("begin", "before_vote", "after_vote"), beyond((("after_shard", "before_rename", "after_rename"),))]
)
def test_a_state_is_saved_by_those_left(points: tuple[str, ...], tmp_path: Path) -> None:
    def save(point: str) -> list[Any]:
        env = CONTINUE | fault_env(f"kill9@save.{point}:rank=2")
        return run_ranks(save_and_evaluate, 4, tmp_path / point, False, env=env, outlives=True, timeout=60)

    for point, results in map_jobs(save, points).items():
        assert results[2] is None, point
    run_ranks(load_whole, 2, [tmp_path / point / "state" for point in points])


def lose_without_knowing_samples(how: str) -> None:
    """Lose a rank where nobody knows which samples are in an update, or where replicas are apart."""
    die = kill_oneself if find_rank() == 1 else nullcontext
    accelerator, _, model, optimizer, loader, _ = build(Setup())
    plain = [{"index": torch.arange(2), "x": torch.ones(2, 4).double()} for _ in range(4)]
    apart = LocalSGD(accelerator, model, 4) if how == "apart" else nullcontext()
    with apart:
        for number, inputs in enumerate(plain if how == "plain" else loader):
            if how == "plain" and number == 2:
                die()
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs).mean())
                optimizer.step()
                optimizer.zero_grad()
            if how == "apart":
                die()
                accelerator.gather(torch.ones(1))
    for inputs in loader:
        die()
        accelerator.gather_for_metrics(inputs["index"])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("plain", "its batches come from no loader that was prepared"),
        ("apart", "its replicas are updated apart"),
        ("evaluates over the loader that it trains", "it was evaluating"),
    ],
)
def test_a_loss_where_samples_or_replicas_are_not_known_ends_all_together(how: str, reason: str) -> None:
    with pytest.raises(RankFailure, match=reason) as failed:
        run_ranks(lose_without_knowing_samples, 3, how, env=CONTINUE, outlives=True, timeout=60)
    assert len(failed.value.failures) == 2


def test_a_loss_in_an_evaluation_of_a_loop_ends_all_together(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="this job cannot go on without it: it was evaluating") as failed:
        run_ranks(save_and_evaluate, 4, tmp_path, True, env=CONTINUE, outlives=True)
    assert len(failed.value.failures) == 3


@pytest.mark.parametrize(
    "setup",
    [
        beyond(Setup(waits=(2,))),
        beyond(Setup(waits=(3,))),
        Setup(num_steps=3, num_workers=2, waits=(1,)),
        Setup(num_steps=2, batch_size=3, even_batches=False, waits=(2,)),
        Setup(by_tokens=True, even_batches=False, waits=(2,)),
        Setup(width=140_000, ema_decay=0.5, num_epochs=1, waits=(2,)),  # gradients of two buckets
    ],
    ids=str,
)
def test_a_rank_returns_between_two_updates(setup: Setup, tmp_path: Path) -> None:
    check(tmp_path, (Killed(1, 1, "backward"),), setup)


def test_the_other_of_two_ranks_returns(tmp_path: Path) -> None:
    check(tmp_path, (Killed(1, 1, "backward"),), Setup(waits=(2,)), world_size=2)


def test_two_ranks_return_at_once(tmp_path: Path) -> None:
    """Both wait behind one update; the first of them takes part in taking in the second."""
    check(tmp_path, (Killed(1, 1, "backward"), Killed(2, 3, "data")), Setup(waits=(2,), num_at_once=2))


def test_ranks_return_one_after_the_other(tmp_path: Path) -> None:
    """Rank 0 among them, whose process is killed once more, and not replaced then."""
    killed = (Killed(0, 1, "backward"), Killed(3, 6, "data"), Killed(0, 13, "optimizer"))
    check(tmp_path, killed, Setup(waits=(2, 5)), left=[1, 2, 3])


def train_meeting_late(killed: tuple[Killed, ...], setup: Setup, folder: Path, late: str) -> Any:
    """Train; one that returns is sent what the others have, or takes it, later than ranks may need to connect."""
    call, meet, port = getattr(lost_ranks, late), LostRanks._meet, int(os.environ["MASTER_PORT"])

    def call_late(*args: Any) -> Any:
        time.sleep(1.5)
        return call(*args)

    def connections() -> set[Any]:
        return {ends[0] for ends in rank_loss._sockets().values() if ends[1][1:2] == (port,)}

    def meet_unconnected(self: LostRanks, *args: Any, **kwargs: Any) -> None:
        survivors, tidy_up = self._survivors, self._survivors.tidy_up
        wait_until(lambda: survivors._spare is not None)
        before = connections()
        survivors.tidy_up = lambda: None  # type: ignore[method-assign]
        meet(self, *args, **kwargs)
        # Whoever connects to the store looks a name up, and may wait 5 s for a resolver.
        assert before
        assert connections() <= before
        tidy_up()
        survivors.tidy_up = tidy_up  # type: ignore[method-assign]

    setattr(lost_ranks, late, call_late)
    LostRanks._meet = meet_unconnected  # type: ignore[method-assign]
    return train(killed, setup, folder)


@pytest.mark.parametrize("late", ["send", "receive"])
def test_what_others_have_is_waited_for_longer_than_connections(late: str, tmp_path: Path) -> None:
    """And no rank connects to the job's store where they meet."""
    run = functools.partial(run_ranks, train_meeting_late, late=late)
    check(tmp_path, (Killed(1, 1, "backward"),), Setup(waits=(2,)), world_size=3, run=run)


def train_joining(killed: tuple[Killed, ...], setup: Setup, folder: Path, lost: int) -> Any:
    """Train; where one returns as number 4, `lost` is killed before it connects, and some hear that too early.

    They know of the loss before they know that the one who is lost, or they themselves, are members.
    """
    number = int(os.environ.get(RETURNS_VARIABLE, str(find_rank())).partition("/")[0])
    settle, connect, wait, rejoin = (
        Survivors.settle,
        Survivors._connect,
        Survivors.wait_for_admission,
        lost_ranks.rejoin,
    )

    def settle_late(self: Survivors, returning: int, refused: str = "") -> None:
        if lost == 4 and number == 3:
            wait_until(lambda: lost in self.lost)
            time.sleep(0.5)
        settle(self, returning, refused)

    def wait_late(self: Survivors) -> str:
        refused = wait(self)
        # As one whose thread has read of the loss before this one has read that it is a member.
        if lost == number:
            kill_oneself()
        members, self.members = self.members, [number]
        wait_until(lambda: lost in self.lost)
        time.sleep(0.5)  # in which the thread finds nothing to do, and waits for another word
        self.members = members
        return refused

    def connect_soon(self: Survivors, *seconds: float) -> str:
        begin = time.monotonic()
        problem = connect(self, *seconds)
        assert time.monotonic() - begin < 10
        return problem

    def rejoin_or_die(process: Any, survivors: Survivors) -> None:
        if number == lost and 4 in survivors.members:
            kill_oneself()
        rejoin(process, survivors)

    Survivors.settle, Survivors._connect = settle_late, connect_soon  # type: ignore[method-assign]
    Survivors.wait_for_admission, lost_ranks.rejoin = wait_late, rejoin_or_die  # type: ignore[method-assign]
    return train(killed, setup, folder)


@pytest.mark.parametrize(("lost", "left"), [(2, [0, 3, 1]), (4, [0, 2, 3])], ids=["another", "the one that returns"])
def test_a_rank_is_lost_while_one_that_returns_connects(lost: int, left: list[int], tmp_path: Path) -> None:
    """Nobody waits for it until the connecting would be given up after 30 s."""
    run = functools.partial(run_ranks, train_joining, lost=lost)
    check(tmp_path, (Killed(1, 1, "backward"),), Setup(waits=(2,)), left=left, run=run)
