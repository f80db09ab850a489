"""Start several processes on this machine with torch's elastic agent, and end with their exit code.

torchrun itself ends with 1 whatever the code of the workers. A job that got SIGTERM, saved and ended with 85 must end
with 85, so the agent runs in this process and the workers are watched one by one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from accel_trainer.config import LaunchConfig, RankLossAction
from accel_trainer.config.dialects.environment import ATTEMPT_VARIABLE
from accel_trainer.errors import ConfigError, HangError, ProcessGroupError
from accel_trainer.launch.machine import set_tpu_variables
from accel_trainer.launch.rendezvous import (
    BoundRendezvous,
    Launchers,
    MachineFailure,
    build_rendezvous,
    hosts_store,
    lost,
)
from accel_trainer.logging import write_stderr
from accel_trainer.runtime.availability import set_variables
from accel_trainer.runtime.preemption import PREEMPTED_EXIT_CODE
from accel_trainer.runtime.rank_loss import LossNotice
from accel_trainer.runtime.torch_private import (
    end_restarts,
    forget_worker,
    remaining_restarts,
    restart_workers,
    start_worker_anew,
)

# The workers may need this long to save after a signal; torch's agent kills after 30 s, in the middle of a large
# checkpoint.
_GRACE_SECONDS = 120
_ONE_REQUEST_SECONDS = 0.5
"""A signal often comes twice: `timeout` sends it to its program and to the group, others what a terminal has sent."""
_HUNG_GRACE_SECONDS = 3.0
"""Of workers that do not end with those that found the job hung: they are stopped, or keep the interpreter's lock."""
_WATCH_SECONDS = 1.0
"""For the threads that wait for workers, to note an end that has come: mostly at once, on a busy machine soon."""
_FINAL_CODES = (76, PREEMPTED_EXIT_CODE, 93)
"""Workers that end so are not started again here: NaN would come again, the machine is asked for, do not requeue."""
AGENT_LOGGERS = [
    logging.getLogger(f"torch.distributed.elastic.{name}") for name in ("agent.server.api", "multiprocessing.api")
]
"""Loggers on which torch's agent reports a failing worker, which the launchers here report themselves."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

# Reads a line for each start of the workers, their process groups as `kill` takes them; an empty one at a regular end.
_GUARD = """\
groups=
while read -r line; do groups=$line; done
[ -n "$groups" ] || exit 0
echo "accel-trainer launch: the launcher was killed; its workers get SIGTERM, and have $0 s to end" >&2
kill -s TERM -- $groups 2>/dev/null
for second in $(seq "$0"); do
    alive=
    for group in $groups; do kill -s 0 -- "$group" 2>/dev/null && alive=1; done
    [ -n "$alive" ] || exit 0
    sleep 1
done
kill -s KILL -- $groups 2>/dev/null
"""


@dataclass(frozen=True, slots=True)
class AgentJob:
    """The workers of this machine, and how they meet those of others."""

    command: tuple[str, ...]
    """Program and arguments of every worker."""
    environment: Mapping[str, str]
    """Every variable of the workers, but for their ranks."""
    num_local_processes: int
    launch: LaunchConfig
    use_cpu: bool


@dataclass(frozen=True, slots=True)
class _Exit:
    """How a worker ended. `seconds` is a monotonic time."""

    rank: int
    pid: int
    code: int
    """Negative for a signal; 0 also where the agent has reaped it, until its result has come."""
    seconds: float


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # reaped
        return True


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def run_workers(job: AgentJob) -> int:
    """Run the workers to their end and return the exit code of the job: of the worker that failed first, else 0.

    A signal is passed on to the workers, which then have 120 s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT); a second one, half a
    second later or more, ends them.

    Raises:
        ConfigError: the machine has fewer devices than processes, or the rendezvous cannot be opened.
    """
    _check_devices(job)
    with worker_variables(job.environment), log_destination(job.launch) as logs:
        if not job.use_cpu:
            set_tpu_variables(job.launch.num_machines, job.num_local_processes)
        if "LOGLEVEL" not in os.environ:  # `report` sums up the agent's own lines on a failing worker in one
            for logger in AGENT_LOGGERS:
                logger.setLevel(logging.CRITICAL)
        with _guard(_grace_seconds(job.environment)) as guard:
            agent = _Agent(job, logs, guard)
            code = 1
            try:
                code = _run_agent(agent, job)
            except OSError as error:
                if error.errno != errno.ENOEXEC:
                    raise
                raise ConfigError(
                    f"{job.command[0]!r} cannot be started: {error.strerror}; check its first line"
                ) from None
            finally:
                agent.leave(code)
    return code


@contextlib.contextmanager
def _guard(grace_seconds: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that names a shell the groups to end with this process; PR_SET_PDEATHSIG is per thread."""
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(grace_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
    except OSError:  # no shell here
        yield lambda groups: None
        return

    def tell(groups: str) -> None:
        with contextlib.suppress(OSError):  # ended by somebody else
            assert shell.stdin is not None
            shell.stdin.write(f"{groups}\n")
            shell.stdin.flush()

    try:
        yield tell
    finally:
        tell("")
        with contextlib.suppress(OSError):
            shell.communicate()


def _run_agent(agent: _Agent, job: AgentJob) -> int:
    global _raised
    _raised = None
    try:
        result = agent.run()
    except SignalException as caught:
        agent.is_signalled = True
        first = agent.first_failure()
        if agent.exits and first is None:
            return 0
        return shell_code(first.code) if first else 128 + int(caught.sigval)
    except RendezvousTimeoutError as error:
        launch = job.launch
        raise ProcessGroupError(
            f"fewer than {launch.min_machines or launch.num_machines} machines came to {launch.main_process_ip} in "
            "time; start the job there, check main_process_ip and the firewall, or give it more time with --rdzv_conf "
            "timeout=SECONDS"
        ) from error
    except RendezvousConnectionError:  # torch's own looks at its store, whose machine is gone
        failure = agent.wait_for_failure_elsewhere()
        if failure is None:
            raise
        _report_machine(failure)
        return failure.code
    first = agent.first_failure()
    elsewhere = agent.failure_elsewhere()
    if elsewhere is not None:
        _report_machine(elsewhere)
        return elsewhere.code
    if first is None or not result.is_failed():
        return int(result.is_failed())
    agent.report(first, result.failures)
    return shell_code(first.code)


_raised_seconds = float("-inf")
"""When a signal last ended something, by the monotonic clock."""
_raised: SignalException | None = None
"""How the last one did."""


def _raise_signal(number: int, _frame: Any) -> None:
    global _raised_seconds, _raised
    now = time.monotonic()
    if now - _raised_seconds < _ONE_REQUEST_SECONDS:
        return
    _raised_seconds = now
    _raised = SignalException(f"accel-trainer launch got {signal.Signals(number).name}", signal.Signals(number))
    raise _raised


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Handle signals from now on, but raise the first one that comes in the block only behind it."""
    arrived: list[int] = []
    # Under nohup a terminal that closes is none of the job's business.
    handled = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, _raise_signal)
    if arrived:
        _raise_signal(arrived[0], None)


class _Agent(LocalElasticAgent):
    """The elastic agent of torch, which also records the end of each worker: its time and its exit code."""

    def __init__(self, job: AgentJob, logs: DefaultLogsSpecs, guard: Callable[[str], None]) -> None:
        launch = job.launch
        spec = WorkerSpec(
            role=launch.role,
            local_world_size=job.num_local_processes,
            rdzv_handler=build_rendezvous(launch),
            entrypoint=job.command[0],
            args=tuple(word.replace("$", "$$") for word in job.command[1:]),  # torch fills in ${local_rank}
            max_restarts=launch.max_restarts,
            monitor_interval=launch.monitor_interval_seconds,
            **_numa_binding(job),
        )
        super().__init__(spec, logs)
        self._grace = _grace_seconds(job.environment)
        self.exits: list[_Exit] = []
        self._stuck: list[int] = []
        self._job = job
        self._guard = guard
        self._pids: dict[int, int] = {}
        self._watchers: dict[int, threading.Thread] = {}
        self._outlived: set[int] = set()
        """Pids of lost workers without which the others go on."""
        self._num_lost = 0
        self._attempt = ""
        """How often the workers of a job on several machines were started again, and the job's name."""
        self._comes_and_goes = launch.min_machines is not None
        self.is_signalled = False
        self._notice: LossNotice | None = None
        self._launchers: Launchers | None = None
        self._is_static = isinstance(spec.rdzv_handler, BoundRendezvous)

    def _rendezvous(self, worker_group: Any) -> None:
        worker_group.spec.local_world_size = self._num_left(worker_group.spec.local_world_size)
        super()._rendezvous(worker_group)
        if self._launchers is not None:
            self._launchers.stop()
            self._launchers = None
        machine, num_machines = worker_group.group_rank, worker_group.group_world_size
        if self._job.launch.rdzv_backend == "c10d" and self._job.launch.num_machines > 1:
            self._attempt = _share_attempt(worker_group.store, is_first=machine == 0)
        if num_machines == 1:
            if self._job.launch.on_rank_loss is not RankLossAction.RESTART:
                store = worker_group.spec.rdzv_handler.connect()
                self._notice = LossNotice(store, worker_group.spec.local_world_size)
            return
        if isinstance(worker_group.spec.rdzv_handler, BoundRendezvous):
            store = PrefixStore("launchers", worker_group.spec.rdzv_handler.connect())
            self._launchers = Launchers(store, machine, num_machines, hosts_store=machine == 0)
        elif self._job.launch.rdzv_backend == "c10d":
            store = PrefixStore("launchers", worker_group.store.clone())
            self._launchers = Launchers(store, machine, num_machines, hosts_store=hosts_store(self._job.launch))

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        if _raised is not None:  # in a weakref's callback, say, where Python ignores what is raised
            raise _raised
        self._see_ended()
        if self._takes_in(worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        if self._outlive(worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        if any(map(self._is_final, self.exits)):
            end_restarts(self)
            self._let_end(self._grace)  # torch would end the others at once
        by_themselves = list(self.exits)  # torch ends the others as soon as it has seen one fail
        if any(exit_.code == HangError.exit_code for exit_ in self.exits):
            # Workers that do not end with those that found the job hung are killed; torch would wait for 30 s.
            self._let_end(_HUNG_GRACE_SECONDS)
            self._stuck = list(self._running())
            self._send(signal.SIGKILL)
        looked_at = time.monotonic()
        result = self._look_at_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._take_codes(result.failures, looked_at)
            if any(map(self._is_final, self.exits)):
                end_restarts(self)
            # One with an exit code, beside the first, has failed because of that one, as a rule.
            self._num_lost = max(1, sum(exit_.code < 0 for exit_ in by_themselves))
        failure = self.failure_elsewhere()
        if failure is None or result.state != WorkerState.HEALTHY:
            return result
        self._follow(failure)
        return RunResult(state=WorkerState.FAILED)

    def _follow(self, failure: MachineFailure) -> None:
        """Say what happened on another machine, and end the workers that would wait for those there."""
        if not failure.may_come_back:
            end_restarts(self)  # the job has ended there
        elif failure == lost(failure.machine):
            # Workers here wait in collectives for those there, and save nothing without them; torch would wait 30 s.
            self._send(signal.SIGTERM)
            self._let_end(_HUNG_GRACE_SECONDS)
            self._send(signal.SIGKILL)
        place = "on those that are left" if self._comes_and_goes else "once a machine has taken its place"
        _report_machine(failure, place if remaining_restarts(self) > 0 else "")

    def _takes_in(self, worker_group: Any) -> bool:
        """Whether a machine has come that waited to take part: the workers have saved, and were started with its own.

        Those of other machines may have ended of it before this one looks: all save and end at a signal to one.
        """
        is_done = not self._running() and not any(exit_.code for exit_ in self.exits)
        if not self._comes_and_goes or is_done or not worker_group.spec.rdzv_handler.num_nodes_waiting():
            return False
        write_stderr("accel-trainer launch: a machine has come: the workers save, and are started again with its own")
        self._send(signal.SIGTERM)
        self._let_end(self._grace)
        self.exits = []
        restart_workers(self, worker_group)
        return True

    def _is_final(self, exit_: _Exit) -> bool:
        """Whether no worker is started again after this end; where a machine goes, the others' workers save, too."""
        return exit_.code in _FINAL_CODES and not (self._comes_and_goes and exit_.code == PREEMPTED_EXIT_CODE)

    def _look_at_workers(self, worker_group: Any) -> RunResult:
        """Return torch's own result; a failure where the others came to their end and had not gone on after a loss."""
        result = super()._monitor_workers(worker_group)
        has_ended = result.state in (WorkerState.SUCCEEDED, WorkerState.FAILED)
        if has_ended and self._notice is not None and not self._notice.is_taken():
            self._outlived.clear()  # it was the end of the job
            return result if result.is_failed() else RunResult(state=WorkerState.FAILED)
        return result

    def _outlive(self, worker_group: Any) -> bool:
        """Let the workers go on without those that were killed, and tell them; return whether the others do go on."""
        # Torch, once asked, ends all where one has failed: also one that is killed after this look at the exits.
        is_running = bool(self._running())
        if (notice := self._notice) is None:
            return False
        self._start_with_replicas(worker_group, notice)
        for exit_ in [each for each in self.exits if each.code and each.pid not in self._outlived]:
            running, left = self._members(notice)
            # One that has not joined the others, or goes with its replica, is nobody's to wait for, however it ends.
            goes_along = notice.is_lost(exit_.rank)
            if not (goes_along or notice.forget(exit_.rank)):
                if exit_.code > 0:
                    is_running = False
                    continue
                if reason := self._why_not_outlived(notice, running, left):
                    write_stderr(f"accel-trainer launch: {_describe(exit_)}, and the others cannot go on: {reason}")
                    self._notice = None
                    return False
                notice.tell(exit_.rank)
            self._outlived.add(exit_.pid)
            forget_worker(self, exit_.rank)
            then = self._start_in_place(worker_group, exit_.rank, notice, left, goes_along=goes_along)
            write_stderr(
                f"accel-trainer launch: {_describe(exit_)}; the {len(left)} that are left go on without it{then}"
            )
        return is_running

    def _why_not_outlived(self, notice: LossNotice, running: list[int], left: list[int]) -> str:
        gone = "every replica (dp_replicate_size) has lost a rank" if running else "no rank is left"
        reason = notice.why_not(left) if left else gone
        has_failed = any(each.code > 0 and each.pid not in self._outlived for each in self.exits)
        return reason or "another rank has failed" * has_failed

    def _members(self, notice: LossNotice) -> tuple[list[int], list[int]]:
        """Return the running workers that are with the others, and those of them whose replicas are whole."""
        running = [rank for rank in self._running() if notice.is_member(rank)]
        return running, notice.going_on(running)

    def _start_in_place(
        self, worker_group: Any, rank: int, notice: LossNotice, left: list[int], *, goes_along: bool
    ) -> str:
        """Start a worker in the place of one that the others have outlived, if that is asked for; say what follows.

        `goes_along`: another of its replica was lost before, and started anew, if that was.
        """
        launch = self._job.launch
        if launch.on_rank_loss is not RankLossAction.REPLACE or not left:
            return ""
        if not notice.awaits(rank):
            if goes_along:
                return ""
            if notice.num_replaced >= launch.max_restarts:
                return f", and none is started in its place: {launch.max_restarts} (max_restarts) have been"
            if reason := notice.why_not_replaced(left):
                return f", and none is started in its place: {reason}"
        self._start_anew(worker_group, rank, notice)
        return f"; another is started in its place ({notice.num_replaced} of {launch.max_restarts})"

    def _start_with_replicas(self, worker_group: Any, notice: LossNotice) -> None:
        """Start workers in the place of those that have ended with their replica, where one is started in its place."""
        for exit_ in [each for each in self.exits if not each.code and each.pid not in self._outlived]:
            if notice.awaits(exit_.rank) and self._members(notice)[1]:
                self._outlived.add(exit_.pid)
                forget_worker(self, exit_.rank)
                self._start_anew(worker_group, exit_.rank, notice)

    def _start_anew(self, worker_group: Any, rank: int, notice: LossNotice) -> None:
        pid = start_worker_anew(self, rank, {**os.environ, **notice.replace(rank)})
        worker_group.workers[rank].id = pid
        self._pids[rank] = pid
        self._guard(" ".join(f"-{pid}" for pid in self._running().values()))
        self._begin_to_watch(rank)

    def _begin_to_watch(self, rank: int) -> None:
        watcher = threading.Thread(target=self._watch, args=(rank, self._pids[rank]), daemon=True)
        self._watchers[rank] = watcher
        watcher.start()

    def _see_ended(self) -> None:
        """Let the watchers of workers that have ended note their codes, before the agent reaps them."""
        for rank, watcher in self._watchers.items():
            if watcher.is_alive() and _has_ended(self._pids[rank]):
                watcher.join(_WATCH_SECONDS)

    def _take_codes(self, failures: Mapping[int, Any], looked_at: float) -> None:
        """Note the codes of workers that the agent itself reaped; their watchers wake up after those it ended."""
        self._let_end(_WATCH_SECONDS)
        seen = {exit_.rank for exit_ in self.exits if exit_.code}
        for rank, failure in failures.items():
            if rank not in seen:
                self.exits[:] = [exit_ for exit_ in self.exits if exit_.rank != rank]
                self.exits.append(_Exit(rank, failure.pid, failure.exitcode, looked_at))
                self.tell(self.exits[-1])

    def _num_left(self, num_before: int) -> int:
        """Return how many workers are started: of a job that may go on with fewer, one less for each that was lost."""
        fewest = None if self._comes_and_goes else self._job.launch.min_processes
        lost, self._num_lost = self._num_lost, 0
        return num_before if fewest is None else max(fewest, num_before - lost)

    def _exit_barrier(self) -> None:
        # torch's ends after 300 s, and with the launcher of machine 0 the store of the others' workers would.
        # Under c10d a machine whose workers are started again meets the others anew, which torch looks after.
        if self._launchers is None or not self._is_static:
            super()._exit_barrier()
        else:
            self._launchers.wait_until_all_are_done()

    def failure_elsewhere(self) -> MachineFailure | None:
        """Return the job's first failure where another machine had it."""
        failure = self._launchers.failure if self._launchers else None
        return failure if failure and self._launchers and failure.machine != self._launchers.machine else None

    def wait_for_failure_elsewhere(self) -> MachineFailure | None:
        """Return the failure of another machine as soon as the heartbeat has found it; None where there is none."""
        return None if self._launchers is None else self._launchers.wait_for_failure()

    def tell(self, exit_: _Exit) -> None:
        """Tell the launchers of the other machines that a worker has failed here."""
        if self._launchers is not None and (self._is_static or not remaining_restarts(self)):
            self._launchers.tell(shell_code(exit_.code), _describe(exit_))

    def leave(self, code: int) -> None:
        """Tell the launchers of the other machines that this one ends."""
        if self._launchers is not None:
            if code:
                goes = self._comes_and_goes and self.is_signalled
                self._launchers.tell(code, f"the launcher ended with code {code}", may_come_back=goes)
            self._launchers.leave()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        first = self.first_failure()
        if first is not None:
            size, before = len(worker_group.workers), len(self._pids)
            left = f" on {size} rank(s) instead of {before}" if size < before else ""
            most = self._job.launch.max_restarts
            write_stderr(
                f"accel-trainer launch: {_describe(first)}; starting the workers again{left} "
                f"({most - remaining_restarts(self)} of {most} restarts)"
            )
        self.exits, self._stuck = [], []
        # On another thread than the main one, torch leaves signals alone. Its handlers raise as soon as there is the
        # first worker, and a signal that comes before the pids are known here could be passed on to nobody.
        attempt = {ATTEMPT_VARIABLE: self._attempt or None}
        with _signals_held_back(), changed_variables(attempt), ThreadPoolExecutor(1) as thread:
            pids: dict[int, Any] = thread.submit(super()._start_workers, worker_group).result()
            self._pids = {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}
            self._guard(" ".join(f"-{pid}" for pid in self._pids.values()))
            if self._job.launch.enable_cpu_affinity and not _uses_accelerator(self._job):
                _bind_to_cores(pids)
            self._watchers = {}
            for rank in self._pids:
                self._begin_to_watch(rank)
        return pids

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        # On a signal torch waits 30 s and loses the codes; here the workers have ended before it begins to wait.
        number = args[0] if args else kwargs.get("death_sig")
        if number is not None:
            try:
                write_stderr(
                    f"accel-trainer launch: {number.name} passed on to the workers, which have {self._grace} s to end; "
                    "another signal ends them at once"
                )
                self._send(number)
                self._let_end(self._grace)
            finally:
                self._send(signal.SIGKILL)
                # The agent reaps them next, and a worker that is reaped before its watcher wakes up has no code.
                self._let_end(10 * _WATCH_SECONDS)
        super()._shutdown(*args, **kwargs)

    def _let_end(self, seconds: float) -> None:
        """Wait until all workers have ended, and their codes are noted, but no longer than so many seconds in all."""
        deadline = time.monotonic() + seconds
        for watcher in self._watchers.values():
            watcher.join(max(0.0, deadline - time.monotonic()))

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the workers that still run. Each leads a process group of the processes it started."""
        for pid in self._running().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _running(self) -> dict[int, int]:
        """Return the pids of the workers whose end nobody has seen, by rank."""
        ended = {exit_.pid for exit_ in self.exits}
        return {rank: pid for rank, pid in self._pids.items() if pid not in ended}

    def _watch(self, rank: int, pid: int) -> None:
        """Wait for one worker without reaping it; the agent still sees its end by itself."""
        exits = self.exits
        code = 0
        with contextlib.suppress(ChildProcessError):  # reaped by the agent in the very moment of its end
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            if status is not None:
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        end = _Exit(rank, pid, code, time.monotonic())
        exits.append(end)
        if code:
            self.tell(end)

    def first_failure(self) -> _Exit | None:
        """Return the worker that was the first to end with an error, as far as it was seen; none that was outlived."""
        self._let_end(_WATCH_SECONDS)
        failed = [exit_ for exit_ in self.exits if exit_.code and exit_.pid not in self._outlived]
        return min(failed, key=lambda exit_: exit_.seconds) if failed else None

    def report(self, first: _Exit, failures: Mapping[int, Any]) -> None:
        """Print which worker failed first, and which others, not among `failures`, had ended before with code 0."""
        lines = [f"accel-trainer launch: {_describe(first)}; this ended the job"]
        lines += [
            f"  rank {exit_.rank} had ended with code 0 {first.seconds - exit_.seconds:.1f} s before that"
            for exit_ in self.exits
            if not exit_.code and exit_.rank not in failures and exit_.seconds < first.seconds
        ]
        lines += [f"  rank {rank} hung: it did not end with the others, and was killed" for rank in self._stuck]
        write_stderr("\n".join(lines))


def _share_attempt(store: Any, *, is_first: bool) -> str:
    """Return how often the workers were started before, and the job's name: the same for all machines of this start."""
    # The store of this start has keys of its own, and stands on that of the job.
    key, job = "accel_trainer/attempt", PrefixStore("accel_trainer", store.underlying_store)
    if is_first:
        name = job.compare_set("name", "", secrets.token_hex(8)).decode()
        store.set(key, f"{job.add('starts', 1) - 1}:{name}")
    return str(store.get(key).decode())


@functools.cache  # once: the workers here end because of it, and are not the cause
def _report_machine(failure: MachineFailure, place: str = "") -> None:
    """Name a failure on another machine; `place` says where workers are started again, if they are."""
    then = f"the workers are started again {place}" if place else "this ended the job"
    write_stderr(f"accel-trainer launch: on machine {failure.machine} {failure.text}; {then}")


def _describe(exit_: _Exit) -> str:
    if exit_.code >= 0:
        return f"rank {exit_.rank} (pid {exit_.pid}) failed with exit code {exit_.code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-exit_.code).name
        return f"rank {exit_.rank} (pid {exit_.pid}) was ended by {name}, exit code {shell_code(exit_.code)}"
    return f"rank {exit_.rank} (pid {exit_.pid}) was ended by signal {-exit_.code}"


def _grace_seconds(environ: Mapping[str, str]) -> int:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_SECONDS))
    if not text.isdecimal():
        raise ConfigError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT is {text!r}; expected a whole number of seconds")
    return int(text)


def _uses_accelerator(job: AgentJob) -> bool:
    return not job.use_cpu and torch.accelerator.is_available()


def _check_devices(job: AgentJob) -> None:
    """Refuse more processes than devices before anything starts: each worker would, after seconds of imports."""
    count = torch.accelerator.device_count() if _uses_accelerator(job) else 0
    ids = job.launch.gpu_ids
    if count and ids != "all":
        count = len(ids.split(","))
    if count and job.num_local_processes > count:
        raise ConfigError(
            f"{job.num_local_processes} processes on this machine, which has {count} accelerator device(s) for them; "
            f"start at most {count} per machine, or pass --cpu to run them on the CPU"
        )


def _numa_binding(job: AgentJob) -> dict[str, Any]:
    if not job.launch.enable_cpu_affinity or job.use_cpu or not torch.cuda.is_available():
        return {}
    from torch.numa.binding import AffinityMode, NumaOptions

    return {"numa_options": NumaOptions(affinity_mode=AffinityMode.NODE)}


def _bind_to_cores(pids: Mapping[int, int]) -> None:
    """Bind each CPU rank to an equal share of the cores, before it has started a second thread."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(pids)
    for local_rank, pid in pids.items():
        if share:
            os.sched_setaffinity(pid, cores[local_rank * share : (local_rank + 1) * share])


@contextlib.contextmanager
def worker_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Change the variables of this process that differ from those of its workers, which inherit them, for a while."""
    with changed_variables({name: environment.get(name) for name in {**os.environ, **environment}}):
        yield


@contextlib.contextmanager
def changed_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process, or remove those that are None, for a while."""
    # Only those that differ: what else the code of the block sets, a function of a notebook for one, stays.
    before = {name: os.environ.get(name) for name, value in values.items() if os.environ.get(name) != value}
    set_variables({name: values[name] for name in before})
    try:
        yield
    finally:
        set_variables(before)


@contextlib.contextmanager
def log_destination(launch: LaunchConfig) -> Iterator[DefaultLogsSpecs]:
    """Yield the destination of the workers' output: the console, and with a log folder files; none stay behind else."""
    tee = Std.from_str("3" if launch.log_dir and launch.tee == "0" else launch.tee)
    with contextlib.ExitStack() as stack:
        folder = os.path.expanduser(launch.log_dir or os.devnull)
        if tee and not launch.log_dir:
            temporary = tempfile.TemporaryDirectory(prefix="accel_trainer_", ignore_cleanup_errors=True)
            folder = stack.enter_context(temporary)
        try:
            logs = DefaultLogsSpecs(log_dir=folder, tee=tee)
        except OSError as error:
            raise ConfigError(
                f"log_dir {launch.log_dir!r} cannot be made: {error.strerror}; name a folder that can be written"
            ) from error
        yield logs
