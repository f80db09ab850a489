"""One rank's failure is everyone's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import init_process, read_environment
from accel_trainer.runtime.shared_errors import raise_together
from tests.ranks import run_ranks


class Full(OSError):
    """An error class that the other ranks need not know."""


def fail_on(failing: tuple[int, ...]) -> dict[str, Any]:
    process = init_process(read_environment(), timeout_seconds=20)
    seen: list[tuple[str, str]] = []
    begin = time.monotonic()
    for ranks in (failing, ()):
        try:
            with raise_together(process, "save"):
                if process.rank in ranks:
                    raise Full(f"no space on {process.rank}")
            seen.append(("ok", ""))
        except Exception as error:
            seen.append((type(error).__name__, str(error)))
    # The group works afterwards: nobody is one collective ahead.
    total = torch.ones(1)
    dist.all_reduce(total)
    return {"seen": seen, "total": total.item(), "seconds": time.monotonic() - begin}


def test_an_error_on_one_rank_is_everyones_and_the_group_lives_on():
    results = run_ranks(fail_on, 3, (1,))
    for rank, result in enumerate(results):
        name, message = result["seen"][0]
        if rank == 1:
            assert (name, message) == ("Full", "no space on 1")
        else:
            assert name == "RemoteRankError"
            assert "rank 1 failed in save: " in message
            assert "Full: no space on 1" in message
            assert f"This rank ({rank}) stopped with it; nothing of save was published" in message
        assert result["seen"][1] == ("ok", "")
        assert result["total"] == 3.0
        assert result["seconds"] < 10


def test_every_failing_rank_is_named():
    results = run_ranks(fail_on, 3, (0, 2))
    message = results[1]["seen"][0][1]
    assert all(f"rank {rank} failed in save" in message for rank in (0, 2))
    assert [results[rank]["seen"][0][0] for rank in (0, 2)] == ["Full", "Full"]


def exit_on(failing: int) -> str:
    process = init_process(read_environment(), timeout_seconds=20)
    try:
        with raise_together(process, "load"):
            if process.rank == failing:
                raise SystemExit(3)
    except SystemExit as error:
        return f"exit {error.code}"
    except ProcessGroupError as error:
        return str(error)
    return "ok"


def test_a_rank_that_exits_takes_the_others_along():
    left, told = run_ranks(exit_on, 2, 0)
    assert left == "exit 3"
    assert "rank 0 failed in load: SystemExit: 3" in told


def test_one_process_raises_its_own_error():
    process = init_process({})
    with pytest.raises(Full, match="disk"), raise_together(process, "save"):
        raise Full("disk")
    with raise_together(process, "save"):
        pass
