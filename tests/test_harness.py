"""The harness itself: what a failing, dead, hanging or leaking test is told."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import compile_collectives
from tests.ranks import RankFailure, run_ranks

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Answer:
    """Defined in a test module on purpose: results may be of such classes."""

    rank: int
    total: float


def sum_ranks(offset: float, *, scale: float = 1.0) -> Answer:
    dist.init_process_group("gloo")
    total = torch.tensor([scale * dist.get_rank() + offset])
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total.item())


def read_variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def fail_on(failing_rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == failing_rank:
        raise ValueError(f"boom on {failing_rank}")
    dist.barrier()


def wait_for_ever_unless(failing_rank: int) -> None:
    if int(os.environ["RANK"]) == failing_rank:
        raise ValueError("boom")
    time.sleep(3600)


def kill_self(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(rank: int, stop: bool = False) -> None:
    if int(os.environ["RANK"]) == rank:
        if stop:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)


def nothing() -> tuple[int, str, int]:
    return torch.get_num_threads(), os.getcwd(), os.getpid()


def unpicklable() -> object:
    return lambda: None


def test_results_come_back_by_rank() -> None:
    assert run_ranks(sum_ranks, 2, 10.0, scale=3.0) == [Answer(0, 23.0), Answer(1, 23.0)]


def test_one_rank_is_a_process_group_too() -> None:
    assert run_ranks(sum_ranks, 1, 1.0) == [Answer(0, 1.0)]


def test_rank_zero_hosts_the_store_without_an_agent() -> None:
    assert [answer.total for answer in run_ranks(sum_ranks, 2, 1.0, env={"TORCHELASTIC_USE_AGENT_STORE": None})] == [
        3.0,
        3.0,
    ]


def test_each_rank_has_its_place_and_the_variables_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
        "SEEN_BY_RANKS",
        "EXTRA",
    )
    first, second = run_ranks(read_variables, 2, *names, env={"EXTRA": "1", "MASTER_ADDR": None})
    assert first == ["0", "0", "2", "2", None, "1", "yes", "1"]
    assert second == ["1", "1", "2", "2", None, "1", "yes", "1"]


def test_variables_may_depend_on_the_rank() -> None:
    assert run_ranks(read_variables, 2, "SLURM_PROCID", env=lambda rank: {"SLURM_PROCID": str(rank)}) == [["0"], ["1"]]


def test_each_rank_has_one_thread_and_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = run_ranks(nothing, 2)
    assert [result[:2] for result in results] == [(1, str(tmp_path))] * 2
    assert len({os.getpid(), *(result[2] for result in results)}) == 3


def read_null() -> None:
    ctypes.string_at(0)


def cpu_seconds() -> float:
    """What this process has computed since it was forked."""
    return time.process_time()


def test_a_rank_costs_a_fraction_of_importing_torch() -> None:
    # Not by the clock: the machine may be busy.
    assert max(run_ranks(cpu_seconds, 2)) < 0.5


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(RankFailure, match="ValueError: boom on 1") as caught:
        run_ranks(fail_on, 2, 1)
    assert "in fail_on" in caught.value.failures[1]


def test_every_failing_rank_is_reported() -> None:
    with pytest.raises(RankFailure, match="2 of 2 ranks failed") as caught:
        run_ranks(os.strerror, 2, "not a number")
    assert all("TypeError" in caught.value.failures[rank] for rank in (0, 1))


def test_ranks_left_alone_by_a_failing_one_are_ended_soon_and_say_where_they_were() -> None:
    with pytest.raises(RankFailure, match="boom") as caught:
        run_ranks(wait_for_ever_unless, 2, 0, grace_seconds=0.5)
    assert "was still running 0.5 s after another rank had failed" in caught.value.failures[1]
    assert "in wait_for_ever_unless" in caught.value.failures[1]


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died without an answer: killed by signal 9 \(SIGKILL\)") as caught:
        run_ranks(kill_self, 2, 1)
    assert list(caught.value.failures) == [1]


def test_a_crash_shows_where_the_rank_was() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 died without an answer: killed by signal 11 \(SIGSEGV\)") as caught:
        run_ranks(read_null, 1)
    assert re.search(r"Segmentation fault(.|\n)* in read_null", caught.value.failures[0])


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 had not finished after 1\.5 s") as caught:
        run_ranks(sleep_on, 2, 1, timeout=1.5)
    assert list(caught.value.failures) == [1]
    assert "in sleep_on" in caught.value.failures[1]


def test_a_stopped_rank_is_named() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 had not finished after 1\.5 s") as caught:
        run_ranks(sleep_on, 2, 0, stop=True, timeout=1.5)
    assert "in sleep_on" in caught.value.failures[0]


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankFailure, match="pickle") as caught:
        run_ranks(unpicklable, 1)
    assert list(caught.value.failures) == [0]


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(lambda: None, 1)


def tell_start_method() -> str:
    return multiprocessing.get_start_method()


def test_processes_of_a_rank_begin_as_those_of_a_script() -> None:
    (method,) = run_ranks(tell_start_method, 1)
    assert method == multiprocessing.get_all_start_methods()[0]  # the platform's own


LEAKS = {
    "environment variable LEFT_BEHIND set to '1'": "os.environ['LEFT_BEHIND'] = '1'",
    "environment variable HOME removed": "del os.environ['HOME']",
    "thread 'left-behind'": "threading.Thread(target=threading.Event().wait, name='left-behind', daemon=True).start()",
    "an initialised process group": "dist.init_process_group('fake', rank=0, world_size=2, store=dist.HashStore())",
    "left_behind.txt": "open('left_behind.txt', 'w').close()",
    "torch default dtype = torch.float64": "torch.set_default_dtype(torch.float64)",
}
INNER = """
import os, threading, torch, torch.distributed as dist, torch.testing._internal.distributed.fake_pg

def test_clean(): pass
"""


def test_a_test_that_leaks_fails_and_the_others_do_not(tmp_path: Path) -> None:
    """One inner session for all leaks: every leaking test must fail for its own reason, and only it."""
    inner_path = tmp_path / "tests"
    inner_path.mkdir()
    settings = (ROOT / "tests" / "conftest.py").read_text()
    (inner_path / "conftest.py").write_text(settings.replace("_SETTLE_SECONDS = 2.0", "_SETTLE_SECONDS = 0.2"))
    leaking = [f"def test_leak_{number}(): {code}\n" for number, code in enumerate(LEAKS.values())]
    (inner_path / "test_inner.py").write_text(INNER + "".join(leaking))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    # pytest counts the failing fixture beside the test that passed before it.
    assert f"{1 + len(LEAKS)} passed, {len(LEAKS)} errors" in done.stdout, done.stdout + done.stderr
    for number, leak in enumerate(LEAKS):
        section = done.stdout.split(f"ERROR at teardown of test_leak_{number} ")[1].split("____ ERROR")[0]
        assert "the test left behind: " in section
        assert leak in section
        assert ";" not in section, f"more than one leak was blamed on one test: {section}"


def test_a_lock_of_a_killed_compiler_ends_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    message = (
        f"waits for the lock {re.escape(str(lock))}.* no process on .* delete the folder {re.escape(str(lock.parent))}"
    )
    with pytest.raises(pytest.exit.Exception, match=message):
        compile_collectives()
