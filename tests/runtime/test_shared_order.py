from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_trainer.accelerator.handover import receive, send
from accel_trainer.errors import DesyncError
from accel_trainer.runtime.shared_order import SharedOrder
from tests.ranks import RankFailure, preload, run_ranks, wait_until

preload("accel_trainer.accelerator")


def start() -> tuple[Any, list[str]]:
    """Join the job; return the watch, and what it compares from now on."""
    from accel_trainer import Accelerator
    from accel_trainer.runtime.own_watch import current_watch

    Accelerator(cpu=True)
    watch, compared = current_watch(), []
    assert watch is not None
    compare = watch.all_equal

    def all_equal(value: int, doing: str, **options: Any) -> bool:
        compared.append(doing)
        return compare(value, doing, **options)

    watch.all_equal = all_equal
    return watch, compared


def walk(order: SharedOrder, parts: str) -> None:
    order.begin()
    for part in parts:
        order.note(part)


def alike() -> Any:
    _, compared = start()
    order, counts = SharedOrder("Net"), []
    for parts in ("abc", "abc", "ab", "abxc", "abc", "abxc"):
        walk(order, parts)
        counts.append(len(compared))
    with torch.no_grad():
        order.begin()
    return counts, order.is_on


def test_only_what_is_new_or_one_of_several_is_compared() -> None:
    # Of abxc: what follows b, and c at its new place; then what follows b, each time.
    assert run_ranks(alike, 2) == [([3, 3, 3, 5, 6, 7], False)] * 2


def late_behind_a_handover() -> int:
    _, compared = start()
    if dist.get_rank() == 0:
        send({"values": torch.ones(3)}, 1, torch.device("cpu"))
        time.sleep(3)  # past the first look at ranks that do not come
    elif dist.get_rank() == 1:
        receive(0, torch.device("cpu"))
    walk(SharedOrder("Net"), "ab")
    return len(compared)


def test_who_has_given_a_state_to_another_rank_is_in_no_other_collective() -> None:
    assert run_ranks(late_behind_a_handover, 3) == [2, 2, 2]


def past_while_it_is_asked(folder: Path) -> None:
    """Come late, and have passed the comparison by the time at which the other rank is told where this one is."""
    watch, _ = start()
    looked, passed = folder / "looked", folder / "passed"
    if dist.get_rank() == 0:
        call_roll = watch._call_roll

        def call_late() -> Any:
            looked.touch()
            wait_until(passed.exists)
            return call_roll()

        watch._call_roll = call_late
    else:
        wait_until(looked.exists)
    walk(SharedOrder("Net"), "a")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    passed.touch()
    work.wait()


def test_a_rank_that_comes_and_goes_on_while_it_is_asked_is_in_no_other_collective(tmp_path: Path) -> None:
    run_ranks(past_while_it_is_asked, 2, tmp_path)


def unlike_at_first() -> str:
    start()
    order = SharedOrder("Net")
    with pytest.raises(DesyncError) as caught:
        walk(order, "ab" if dist.get_rank() else "ac")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == 2
    return str(caught.value)


def test_ranks_that_differ_at_first_all_say_how_and_can_go_on() -> None:
    first, second = run_ranks(unlike_at_first, 2)
    assert first == second
    assert first.startswith("ranks use unlike parameters: rank 0: c (Net); rank 1: b (Net). Nothing was sent. All")
    assert first.endswith("or use strategy 'ddp' with find_unused_parameters")


def unlike_later() -> None:
    start()
    order = SharedOrder("Net")
    for parts in ("ab", "ac" if dist.get_rank() else "ab"):
        walk(order, parts)
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_differs_later_raises_where_another_has_gone_on() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 is about to call c \(Net\).*and rank 0 waits for it in all_reduce"):
        run_ranks(unlike_later, 2)


def slow() -> int:
    import time

    _, compared = start()
    order = SharedOrder("Net")
    if dist.get_rank():
        time.sleep(2)  # others look where it is after a second
    walk(order, "ab")
    return len(compared)


def test_a_rank_that_comes_late_is_waited_for() -> None:
    assert run_ranks(slow, 2) == [2, 2]
