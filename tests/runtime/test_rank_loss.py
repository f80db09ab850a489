"""What ranks that are left know of each other: connections, and a group of ranks that are not there."""

from __future__ import annotations

import math
import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_trainer.config.dialects.environment import RETURNS_VARIABLE
from accel_trainer.errors import RankLostError
from accel_trainer.runtime import rank_loss
from accel_trainer.runtime.process import init_process, read_environment
from accel_trainer.runtime.rank_loss import (
    LossNotice,
    Survivors,
    ask_seconds,
    close_connections,
    join_alike_group,
    noting_connections,
)
from tests.ranks import run_ranks, wait_until


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list descriptors")
def test_a_look_at_the_connections_leaves_no_descriptor_open() -> None:
    with tempfile.TemporaryFile():
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with noting_connections():
                pass
        assert len(os.listdir("/proc/self/fd")) == len(before)


def send_and_close(folder: Path) -> None:
    """Rank 0 sends; both close their connections when rank 1 is ready to receive, which rank 0 has not read yet."""
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=60)
    if process.rank == 1:
        wait_until((folder / "stopped").exists)
        works = [dist.irecv(torch.zeros(4), 0) for _ in range(2)]
        close_connections()
        time.sleep(0.5)  # until gloo has seen it
        (folder / "ready").touch()
    else:
        works, stopped = [dist.isend(torch.ones(4), 1) for _ in range(2)], os.getpid()
        if (pid := os.fork()) == 0:
            os.kill(stopped, signal.SIGSTOP)
            (folder / "stopped").touch()
            wait_until((folder / "ready").exists)
            close_connections()  # the same as the other process's
            os.kill(stopped, signal.SIGCONT)
            os._exit(0)
        os.waitpid(pid, 0)
    for work in works:
        with suppress(RuntimeError):  # closed before, or behind it
            work.wait()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list descriptors")
def test_none_waits_whose_partner_was_ready_as_both_closed_their_connections(tmp_path: Path) -> None:
    run_ranks(send_and_close, 2, tmp_path, timeout=20)


def lose_and_close() -> tuple[list[bool], bool, int]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notice, survivors = LossNotice(store, 3), Survivors(store, 0, 3)
    time.sleep(0.3)  # the thread waits by now
    known = []
    for rank in (1, 2):
        notice.tell(rank)
        known.append(survivors.knows_loss())
        survivors.members.remove(rank)
        time.sleep(0.3)
    survivors.close()
    return known, survivors._thread.is_alive(), len(survivors.lost)


def test_word_of_each_loss_comes_to_a_thread_that_waits_and_ends_at_once() -> None:
    assert run_ranks(lose_and_close, 1)[0] == ([True, True], False, 2)


def lose_replicas() -> tuple[list[int], str, int]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notice, survivors = LossNotice(store, 4), Survivors(store, 0, 4)
    survivors.take_replicas(2)
    survivors.lost = frozenset((1, 2))
    with pytest.raises(RankLostError) as found:
        survivors.agree({}, 1)
    survivors.lost = frozenset((1,))
    with pytest.raises(SystemExit) as ended:
        survivors.agree({}, 1)
    survivors.close()
    return notice.going_on([0, 2, 3]), str(found.value), ended.value.code  # type: ignore[return-value]


def test_a_rank_goes_with_its_replica_and_all_where_none_is_whole() -> None:
    assert run_ranks(lose_replicas, 1)[0] == ([2, 3], "every replica (dp_replicate_size) has lost a rank", 0)


def replace_replicas() -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notice, own = LossNotice(store, 4), dist.PrefixStore(rank_loss.PREFIX, store)
    own.set("replica_size", "2")
    notice.tell(3)
    notice.tell(2)  # which goes with it
    found = [notice.lost, notice.is_lost(2), notice.is_lost(0), notice.awaits(2)]
    found += [notice.replace(3), notice.awaits(2), notice.replace(2), notice.awaits(2), notice.num_replaced]
    found += [notice.forget(0), notice.forget(2), notice.replace(2), notice.awaits(3), notice.replace(3)]
    own.set("fate/3", "refused")
    found.append(notice.forget(3))
    notice.replace(3)
    own.set("fate/4", "joined")
    return [*found, notice.forget(3), notice.num_replaced]


def test_the_launcher_starts_a_replica_as_often_as_one_has_ended() -> None:
    """Of a process that was refused, or whose replica is lost already, nobody is told; of one that has joined, all."""
    lost, goes_along, other, awaited, *found = run_ranks(replace_replicas, 1)[0]
    assert (lost, goes_along, other, awaited) == ([3], True, False, False)
    names = [value.get(RETURNS_VARIABLE) if isinstance(value, dict) else value for value in found]
    assert names == ["5/4/2", True, "4/4/2", False, 1, False, True, "6/4/2", True, "7/4/2", True, False, 3]


def ask_for_replicas() -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own, survivors = dist.PrefixStore(rank_loss.PREFIX, store), Survivors(store, 0, 2, replica_size=2)
    survivors.returning = frozenset((2, 4, 5))  # 3 has not said that it waits
    found: list[Any] = [survivors.find_due(7)]
    for number in (4, 5):
        for rank in (0, 1):
            own.set(f"seen/{number}/{rank}", "")
    found += [survivors.find_due(7), survivors.find_due(8)]
    own.set("fate/1", "gone")
    found += [survivors.find_due(7), survivors.returning, own.get("boundary/1")]
    survivors.close()
    return found


def test_a_replica_of_which_a_rank_has_ended_is_waited_for_no_more() -> None:
    assert run_ranks(ask_for_replicas, 1)[0] == [None, None, 2, None, {4, 5}, b"-1"]


def wait_for_a_late_rank(folder: Path) -> bool:
    """Return whether the last rank, which comes late, had come when this one had waited."""
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    rank, num_ranks = process.rank, process.world_size
    survivors = Survivors(store, rank, num_ranks)
    survivors.take_replicas(2)
    survivors.prepare_to_wait()
    if rank == num_ranks - 1:
        if num_ranks == 4:
            wait_until((folder / "waited").exists)
        time.sleep(0.3)
        (folder / "came").touch()
    survivors.wait_for_all()
    has_come = (folder / "came").exists()
    if rank == 0:
        (folder / "waited").touch()
    survivors.close()
    return has_come


@pytest.mark.parametrize(("num_ranks", "first"), [(4, False), (6, True)])
def test_ranks_wait_for_those_that_a_loss_may_leave_beside_them(num_ranks: int, first: bool, tmp_path: Path) -> None:
    """Of two replicas a loss leaves one: its ranks step together, whatever the others do. Of three it leaves two."""
    waited = run_ranks(wait_for_a_late_rank, num_ranks, tmp_path)
    assert (waited[0], waited[-2:]) == (first, [True, True])


def connect_together(num_members: int, late: int) -> tuple[list[list[int]], float]:
    """Form a group of `num_members`, to which rank `late` comes after 0.5 s; return who connected, and when it did."""
    rank, connected, connect = int(os.environ["RANK"]), [], Survivors._connect
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    survivors, notice = Survivors(store, rank, num_members), LossNotice(store, num_members)

    def connect_noted(self: Survivors, *seconds: float) -> str:
        connected.append(self.members)
        return connect(self, *seconds)

    Survivors._connect = connect_noted  # type: ignore[method-assign]
    store.set(f"begins/{rank}", "")
    store.wait([f"begins/{each}" for each in range(3)])
    if rank == late:
        time.sleep(0.5)
        if num_members > 3:
            notice.tell(3)
    begin = time.monotonic()
    survivors.form_group(30)
    seconds = time.monotonic() - begin
    dist.all_reduce(torch.zeros(1))
    survivors.close()
    return connected, seconds


@pytest.mark.parametrize("num_members", [3, 4])
def test_all_that_are_left_meet_before_any_of_them_connects(num_members: int) -> None:
    """Where one comes later than a connecting takes, or is lost before it comes, which none but that one knows yet."""
    for rank, (connected, seconds) in enumerate(run_ranks(connect_together, 3, num_members, 1)):
        assert connected == [[0, 1, 2]], rank
        assert seconds < 5


def say_where_it_listens(rank: int, size: int, store: dist.Store) -> None:
    """Put into `store` the address of a rank of gloo's that answers nobody, and is to call the others itself.

    Of two, that with the higher address calls: its port becomes the highest.
    """
    own = dist.HashStore()
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=0.1))
    host = socket.inet_aton("127.0.0.1")
    for key in own.list_keys():
        value = own.get(key)
        at = value.find(host)
        store.set(key, value if at < 0 else value[: at - 2] + b"\xff\xff" + value[at:])


def connect_to_one_that_is_lost() -> tuple[list[int], float]:
    """Form a group of three, of which the last is lost when it has said where it listens; return who is left, when."""
    rank, connect = int(os.environ["RANK"]), Survivors._connect
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    survivors = Survivors(store, rank, 3)
    if rank == 2:
        survivors.agree({}, 30)
        say_where_it_listens(rank, 3, dist.PrefixStore(f"{rank_loss.PREFIX}/group 1", store))
        survivors.is_alone = True
        survivors.close()
        store.set("listened", "")
        store.wait(["connects/0", "connects/1"])
        time.sleep(0.5)  # in which they connect to each other
        LossNotice(store, 3).tell(2)
        return [], 0

    def connect_then(self: Survivors, *seconds: float) -> str:
        store.wait(["listened"])
        store.set(f"connects/{rank}", "")
        return connect(self, *seconds)

    Survivors._connect = connect_then  # type: ignore[method-assign]
    begin = time.monotonic()
    survivors.form_group(30)
    seconds = time.monotonic() - begin
    dist.all_reduce(torch.zeros(1))
    survivors.close()
    return survivors.members, seconds


@pytest.mark.parametrize("num_ranks", [1, 4, 64, 4096])
def test_many_ranks_ask_the_store_no_more_than_it_serves_and_those_that_come_more_often(num_ranks: int) -> None:
    at_first, later, always = (num_ranks / ask_seconds(num_ranks, waited) for waited in (0.0, 60.0, math.inf))
    assert 2 * later < at_first < 5_001
    assert later == always < 2_001


def test_one_that_is_lost_before_it_calls_the_others_holds_them_up_for_3_s_at_most() -> None:
    """It was 27 s: for the first call gloo waits five times its timeout."""
    for members, seconds in run_ranks(connect_to_one_that_is_lost, 3)[:2]:
        assert members == [0, 1]
        assert seconds < 8  # with what a busy machine takes


def call_collectives() -> dict[str, Any]:
    join_alike_group(0, 3, 60)
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, {"own": 1})
    sent: list[Any] = ["own"]
    dist.broadcast_object_list(sent, src=0)
    received: list[Any] = [None]
    dist.scatter_object_list(received, ["a", "b", "c"], src=0)
    gathered: list[Any] = [None] * 3
    dist.gather_object("own", gathered, dst=0)
    summed, largest, flat = torch.ones(2), torch.ones(2), torch.empty(6)
    dist.all_reduce(summed)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_gather_into_tensor(flat, torch.arange(2.0))
    dist.barrier()
    model = nn.Linear(2, 1)
    replicas = DistributedDataParallel(model)
    replicas(torch.ones(4, 2)).sum().backward()
    sizes = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    tensors = [summed.tolist(), largest.tolist(), flat.tolist(), model.weight.grad.tolist()]
    return {"objects": [objects, sent, received, gathered], "tensors": tensors, "sizes": sizes}


def test_ranks_that_are_not_there_have_what_the_one_has() -> None:
    found = run_ranks(call_collectives, 1)[0]
    assert found["objects"] == [[{"own": 1}] * 3, ["own"], ["a"], ["own"] * 3]
    # DDP's mean is that of equal gradients.
    assert found["tensors"] == [[3.0, 3.0], [1.0, 1.0], [0.0, 1.0] * 3, [[4.0, 4.0]]]
    assert found["sizes"] == (0, 3)
