"""What a rank tells the others beside the collectives: that it has failed, and where it is when nothing moves."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accel_trainer import Accelerator
from accel_trainer.errors import DesyncError, ProcessGroupError
from accel_trainer.runtime import rank_watch
from accel_trainer.runtime.own_watch import current_watch, failing_together
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rank_watch import RankWatch
from tests.fault_injection import fault_env
from tests.fault_matrix import build_tests
from tests.ranks import RankFailure, ask_jobs, preload, run_ranks

preload("accel_trainer.accelerator")

POLL_SECONDS = 0.1
"""Of the threads, in these tests: what takes a roll five polls takes half a second."""


def as_script(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as the interpreter runs a script: an error goes through the hook for those that nobody caught."""
    rank_watch._POLL_SECONDS = POLL_SECONDS
    printed = io.StringIO()
    logging.getLogger("accel_trainer").addHandler(logging.StreamHandler(printed))
    try:
        return function(*args)
    except Exception as error:
        with contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        raise RuntimeError(re.sub(r"(?m)^\[rank\d\]: ", "", printed.getvalue())) from None


class Blocks(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch))


def native_loop(strategy: str, directory: str, options: dict[str, Any]) -> None:
    """Train four updates, evaluate two batches, save."""
    accelerator = Accelerator(config={"strategy": strategy, "use_cpu": True, "timeout_seconds": 30, **options})
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = DataLoader(torch.ones(16, 4), batch_size=2), DataLoader(torch.ones(8, 4), batch_size=2)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)
    for batch in train_loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for batch in eval_loader:
        with torch.no_grad():
            accelerator.gather_for_metrics(model(batch))
    accelerator.save_state(directory)


def failures_of(
    function: Callable[..., Any], *args: Any, text: str = "", world_size: int = 2, **options: Any
) -> dict[int, str]:
    try:
        run_ranks(function, world_size, *args, env=fault_env(text), **{"timeout": 40, **options})
    except RankFailure as failed:
        return failed.failures
    return {}


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[int, str], Path]]:
    """Run jobs that wait for most of their time, six at once; return of each its failures and its folder."""
    folders = {name: tmp_path_factory.mktemp("waited") for name in WAITING}

    def run(name: str) -> tuple[dict[int, str], Path]:
        function, *args, options = WAITING[name]
        return failures_of(function, str(folders[name]), *args, **options), folders[name]

    return ask_jobs(run, WAITING, at_once=6)


# Of the matrix that `make test-faults` runs: each fault, and each place.
observed, test_a_fault_of_one_rank_ends_a_loop_as_promised = build_tests(
    "native",
    "raise-backward-0-fsdp2 raise-callback-1-ddp raise-save-1-fsdp2 kill9-load-1-fsdp2 kill9-optimizer-0-ddp "
    "exit0-eval-1-ddp sleep-save-1-ddp stop-gather-0-ddp gil-load-1-fsdp2 term-data-1-ddp nan-forward-1-fsdp2",
)


def come_late(directory: str) -> None:
    as_script(native_loop, "ddp", directory, {"hang": {"step_seconds": 1.0}, "timeout_seconds": 2.5})


def test_r10_a_rank_that_does_not_come_within_the_timeout_is_named_with_its_place(waited):
    failures, _ = waited("late")

    found = (
        r"rank 0 waits in \w+ \(number \d+ of the group\) for rank 1, which has not arrived there:\n"
        r"  rank 1 is in data loading, happen \(fault_injection\.py:\d+\): update 1, collective \d+.*\n(.*\n)*"
        r".*, in native_loop\n(.*\n)*.*time.sleep\(self.seconds\)\n"
        r"  rank 0 waits in \w+, in \w+, \w+ \(test_rank_watch\.py:\d+\): update 1, collective \d+"
    )
    assert re.search(rf"HangError: {found}(.*\n)*Rank 0 gives up after 2.5 s \(timeout_seconds\)", failures[0])


def print_in(directory: str) -> None:
    """Have this rank print its errors in a file."""
    os.dup2(os.open(f"{directory}/{os.environ['RANK']}.txt", os.O_WRONLY | os.O_CREAT), 2)


def hanging_script(directory: str) -> None:
    rank_watch._POLL_SECONDS = POLL_SECONDS
    print_in(directory)
    native_loop("fsdp2", directory, {"hang": {"step_seconds": 2.0, "user_seconds": 4.0}})


def test_r10_ranks_that_do_not_move_end_the_job_at_the_limit_of_their_section(waited):
    """Stopped, with the lock, and asleep, under FSDP2. A data set is the user's."""
    failures, folder = waited("still")

    assert failures[0] == "rank 0 died without an answer: exit code 75"
    assert failures[3] == "rank 3 died without an answer: exit code 75"
    silent = r"does not answer \(stopped, killed, or in a call that keeps the interpreter's lock\)"
    printed = [(folder / f"{rank}.txt").read_text() for rank in (0, 3)]
    found = (
        r"rank 0 waits in \w+ \(number \d+ of the group\) for ranks 1, 2, 3, which have not arrived there:\n"
        rf"  rank 1 {silent}.*\n(.*\n)*  rank 2 {silent}.*\n(.*\n)*"
        r"  rank 3 is in data loading, happen \(fault_injection\.py:\d+\): update 1, collective \d+.*\n(.*\n)*"
        r".*, in native_loop\n(.*\n)*.*time.sleep\(self.seconds\)\n"
        r"  rank 0 waits in \w+, in \w+, \w+ \(test_rank_watch\.py:\d+\): update 1, collective \d+"
    )
    # A warning at half of a step's limit, on one of the ranks; then the end of all.
    assert re.search(rf"\[rank \d\] no progress for [12] s\. {found}", "".join(printed)), printed
    hung = r"HangError: no progress for [4-6] s, the limit there is 4 s"
    assert re.search(rf"{hung}\. {found}", "".join(printed)), printed
    for rank, each in zip((0, 3), printed, strict=True):
        assert re.search(rf"rank {rank} is here:\n  File (.*\n)*.*{hung}", each)
        assert f"Rank {rank} ends with exit code 75" in each


def stop_one(directory: str) -> None:
    """Stop rank 1, and note when rank 0 has been ended; with the library's own looks at each other, twice a second."""
    exit_process = os._exit
    accelerator = Accelerator(config={"use_cpu": True, "hang": dict.fromkeys(("step_seconds", "user_seconds"), 5.0)})
    PROGRESS.updates += 1  # beyond the first, which may take longer
    accelerator.wait_for_everyone()
    begin = time.monotonic()

    def note_time(code: int) -> None:
        Path(directory, "seconds").write_text(str(time.monotonic() - begin))
        exit_process(code)

    os._exit = note_time  # type: ignore[assignment]
    if not accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGSTOP)
    accelerator.wait_for_everyone()


def test_a_rank_that_is_stopped_ends_the_job_soon_after_the_limit(waited):
    failures, folder = waited("stopped")

    assert "exit code 75" in failures[0]
    # The limit, at most a look before and one behind each of two rolls, and the time that the second one takes.
    assert 5.0 <= float((folder / "seconds").read_text()) < 9.0


def fail_and_linger(directory: str, goes_on: bool, is_slow: bool = False) -> None:
    """Fail on rank 1, which catches it and stands elsewhere, or goes on before it hangs; with a short limit.

    `is_slow`: rank 1 ends first, and rank 0 in the collective that breaks with it, before its thread comes to it.
    """
    rank_watch._POLL_SECONDS = POLL_SECONDS
    print_in(directory)
    # Within it a rank that goes on has to be there again, on a busy machine, too.
    limit = 3.0 if goes_on else 1.0
    limits = dict.fromkeys(("step_seconds", "startup_seconds", "user_seconds"), limit)
    accelerator = Accelerator(config={"use_cpu": True, "hang": limits})
    accelerator.wait_for_everyone()
    if is_slow and accelerator.is_main_process:
        end, main_thread = RankWatch._end, threading.main_thread()
        RankWatch._end = lambda *args: end(*args) if threading.current_thread() is main_thread else time.sleep(5)
    if not accelerator.is_main_process:
        with contextlib.suppress(ValueError), failing_together():
            fail()
        if goes_on:
            accelerator.wait_for_everyone()
        time.sleep(20)
    for _ in range(1 + goes_on):
        accelerator.wait_for_everyone()


def test_a_hang_behind_a_failure_that_was_told_is_that_failure(waited):
    failures, folder = waited("told")

    # Whichever finds it first: the other one then waits no more, or has connections that break.
    assert "rank 1 died without an answer: exit code 1" in failures[1] or "exit code 1" in failures[0]
    assert "75" not in "".join(failures.values())
    printed = "".join([*failures.values(), *((folder / f"{rank}.txt").read_text() for rank in range(2))])
    told = r"RemoteRankError: rank 1 failed \(update 0, fail .*\): ValueError: no such label\. Rank"
    ended = r"(0 has waited in \w+|1 has not ended) for \d s \(update 0, .*\)\. Rank \d ends with exit code 1"
    assert re.search(rf"{told} {ended}", printed), printed


@pytest.mark.parametrize("name", ["gone on", "gone on, the first to end"])
def test_a_hang_of_a_rank_that_has_gone_on_since_its_failure_is_a_hang(waited, name: str):
    failures, _ = waited(name)

    assert failures == {rank: f"rank {rank} died without an answer: exit code 75" for rank in range(2)}


def hanging_unread(directory: str) -> None:
    """Hang where nobody reads what the ranks say, as behind a `| head` that has ended."""
    rank_watch._POLL_SECONDS = POLL_SECONDS
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    native_loop("ddp", directory, {"hang": {"step_seconds": 0.5, "user_seconds": 0.5}})


def test_r10_ranks_that_do_not_move_end_although_nobody_reads_their_output(waited):
    failures, _ = waited("unread")

    assert failures == {rank: f"rank {rank} died without an answer: exit code 75" for rank in range(2)}


def begin_slowly(directory: str) -> None:
    hang = {"step_seconds": 0.5, "user_seconds": 0.5, "startup_seconds": 60.0}
    as_script(native_loop, "ddp", directory, {"hang": hang})


def test_r10_a_first_step_that_takes_longer_than_others_may_is_no_hang(waited):
    assert waited("slow at first")[0] == {}


class WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def reduce_by_hand(error: Exception) -> None:
    """Fail on one rank, where the other is in a collective of torch's own."""
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 1:
        raise error
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyError("label"), "KeyError: 'label'"), (WordlessError(), "WordlessError: <exception str() failed>")],
    ids=["an error", "one whose text is an error"],
)
def test_a_collective_of_torch_that_breaks_is_explained_where_it_is_printed(error: Exception, words: str):
    failures = failures_of(as_script, reduce_by_hand, error)

    explained = rf"RemoteRankError: rank 1 failed \(update 0, reduce_by_hand .*\): {re.escape(words)}\. Rank 0 "
    assert re.search(explained, failures[0])
    assert "Connection closed" not in failures[0]
    assert words in failures[1]


def fail() -> None:
    raise ValueError("no such label")


def look_soon(directory: str) -> None:
    """Have the watch of this rank find soon that it is stuck, and say so in a file."""
    rank_watch._POLL_SECONDS, rank_watch._STUCK_SECONDS = POLL_SECONDS, 0.5
    print_in(directory)


def stay_alive(directory: str) -> None:
    """Fail on one rank, whose process lives on, as one does whose trackers finish."""
    look_soon(directory)
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == 0:
        dist.barrier()
    with contextlib.suppress(RuntimeError):
        as_script(fail)
    signal.pause()


def wait_for_the_device(directory: str, begins: bool) -> None:
    """Read a value behind a collective that the other rank never begins, or compute as long without one."""
    look_soon(directory)
    accelerator = Accelerator(config={"use_cpu": True, "hang": {"step_seconds": 2}})
    watch = current_watch()
    assert watch is not None
    watch.runs_ahead = True  # as with nccl, whose collectives do not keep the host
    accelerator.wait_for_everyone()
    if accelerator.process_index == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True) if begins else None
        time.sleep(3.5)  # as in `.item()`, of which no frame tells
        raise SystemExit(f"nobody has ended this rank: {work}")
    with contextlib.suppress(RuntimeError):
        as_script(fail)
    time.sleep(5)


@pytest.mark.parametrize(
    ("name", "where"), [("alive", "barrier"), ("device", "a collective of its device")], ids=["barrier", "device"]
)
def test_a_rank_whose_connections_do_not_break_ends_with_the_one_that_failed(waited, name: str, where: str):
    failures, folder = waited(name)
    job = WAITING[name]

    assert "rank 0 died without an answer: exit code 1" in failures[0]
    waited = rf"Rank 0 has waited in {where} for \d s \(update 0, {job[0].__name__} \(test_rank_watch.py:\d+\)\)"
    assert re.search(
        rf"RemoteRankError: rank 1 failed \(update 0, fail .*\): ValueError: no such label\. {waited}\. Rank 0 ends "
        "with exit code 1",
        (folder / "0.txt").read_text(),
    )


def test_a_rank_that_computes_while_another_has_failed_is_left_alone(waited):
    assert "nobody has ended this rank: None" in waited("computing")[0][0]


def watch_a_pause(directory: str) -> None:
    """Compute for longer than a step may take, on both ranks: nobody waits for anybody."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel_trainer").addHandler(handler)
    rank_watch._POLL_SECONDS = POLL_SECONDS
    accelerator = Accelerator(config={"use_cpu": True, "hang": {"step_seconds": 0.6, "startup_seconds": 0.6}})
    accelerator.wait_for_everyone()
    time.sleep(1)
    accelerator.wait_for_everyone()
    threads = [thread.name for thread in threading.enumerate()]
    accelerator.end_training()
    assert "rank-watch" in threads
    assert "rank-watch" not in [thread.name for thread in threading.enumerate()]
    assert warnings == []


def test_ranks_that_all_compute_are_no_hang_and_the_thread_goes_with_the_group(waited):
    assert waited("all compute")[0] == {}


def gather_on_one() -> None:
    """Gather on one rank, where the other begins the next backward."""
    accelerator = Accelerator(config={"use_cpu": True, "debug": True})
    rank_watch._STUCK_SECONDS = 1.0 if accelerator.is_main_process else 30.0
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(1))
    accelerator.backward(model(torch.ones(1, 1)).sum())


def run_gather_on_one(directory: str) -> None:
    as_script(gather_on_one)


_STILL = {1: "stop", 2: "gil", 3: "sleep"}
WAITING: dict[str, Any] = {
    "late": (come_late, {"text": "sleep@data.next:rank=1:step=1:seconds=4"}),
    "still": (
        hanging_script,
        {
            "text": "; ".join(f"{kind}@data.next:rank={rank}:step=1:seconds=20" for rank, kind in _STILL.items()),
            "world_size": 4,
        },
    ),
    "stopped": (stop_one, {"timeout": 60, "grace_seconds": 1.0}),
    "unread": (hanging_unread, {"text": "sleep@data.next:rank=1:step=1:seconds=30"}),
    "told": (fail_and_linger, False, {}),
    "gone on": (fail_and_linger, True, {}),
    "gone on, the first to end": (fail_and_linger, True, True, {}),
    "alive": (stay_alive, {}),
    "device": (wait_for_the_device, True, {}),
    "computing": (wait_for_the_device, False, {}),
    "slow at first": (begin_slowly, {"text": "sleep@train.forward:rank=1:step=0:seconds=2"}),
    "all compute": (watch_a_pause, {}),
    "one gathers": (run_gather_on_one, {}),
}
"""The function, what it is called with behind a folder of its own, and how it is run."""


def skip_one(debug: bool, *kinds: str) -> dict[str, list[str]]:
    """Gather twice in each update; rank 1 leaves one out. Go on once the ranks have been told."""
    accelerator = Accelerator(config={"use_cpu": True, "debug": debug})
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told, number = {}, torch.tensor([10.0 * (accelerator.process_index + 1)])
    for kind in kinds:
        try:
            for update in range(40):
                optimizer.step()
                if not (update == 3 and accelerator.process_index == 1):
                    accelerator.gather(number.repeat(3 if kind == "shape" else 1))
                accelerator.reduce(number) if kind == "operation" else accelerator.gather(number)
        except ProcessGroupError as error:
            told[kind] = [type(error).__name__, str(error)]
        PROGRESS.updates = 0
        assert accelerator.reduce(number).item() == 30  # the group has stayed in step
    return told


LEFT_OUT = {
    "same": r"do not agree on the operation: rank 0 calls gather in update 4, skip_one \(.*:\d+\); rank 1 calls gather "
    r"in update 5, skip_one \(.*:\d+\)\. Nothing was sent",
    "operation": r"rank 0 calls gather in update 4, .*; rank 1 calls reduce\(sum\) in update 4, ",
    "shape": r"do not agree on leaf 0 of gather: rank 0 has float32 \(3,\), rank 1 has float32 \(1,\)",
}


def test_r11_debug_names_a_collective_that_a_rank_leaves_out_before_data_moves():
    for told in run_ranks(skip_one, 2, True, *LEFT_OUT):
        for kind, message in LEFT_OUT.items():
            name, text = told[kind]
            assert name == ("DistributedOperationException" if kind == "shape" else "DesyncError")
            assert re.search(message, text), text


def test_r11_a_collective_left_out_that_gives_wrong_numbers_is_found_without_debug():
    for told in run_ranks(skip_one, 2, False, "same"):
        name, text = told["same"]
        assert name == "DesyncError"
        assert re.search(
            r"called different collectives: call 8 was gather float32 \(1,\) in update 4 on rank 0, and gather float32 "
            r"\(1,\) in update 5 on rank 1\. .*debug=True",
            text,
        ), text


def test_r11_debug_names_a_collective_that_meets_one_of_torch(waited):
    failures, _ = waited("one gathers")

    assert re.search(
        r"DesyncError: rank 0 is about to call gather in update 0, gather_on_one \(.*:\d+\), and rank 1 waits for it "
        r"in \w+, gather_on_one \(.*:\d+\) \(update 0\)\. Call the same collectives",
        failures[0],
    ), failures[0]
    assert re.search(r"RemoteRankError: rank 0 failed \(.*\): DesyncError: rank 0 is about to call", failures[1])


def save_out_of_step(directory: str) -> str:
    accelerator = Accelerator(cpu=True)
    accelerator.gather(torch.ones(1))
    if accelerator.process_index == 0:
        accelerator.gather(torch.ones(1))  # meets the other's next one
    accelerator.gather(torch.ones(1)) if accelerator.process_index else None
    accelerator.reduce(torch.ones(1))
    accelerator.prepare(nn.Linear(1, 1))
    if accelerator.process_index == 0:
        current_watch().calls.note("gather")
    with pytest.raises(DesyncError) as caught:
        accelerator.save_state(directory)
    return str(caught.value)


def test_r11_a_save_of_ranks_that_are_out_of_step_is_refused(tmp_path):
    for text in run_ranks(save_out_of_step, 2, str(tmp_path / "saved")):
        assert re.search(
            r"call 4 was gather on rank 0, and nothing more on rank 1\. .*nothing of this was saved", text
        ), text
    assert not (tmp_path / "saved").exists()
