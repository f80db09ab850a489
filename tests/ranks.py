"""Run a function on several ranks: `run_ranks(function, world_size, ...)`, real processes with real process groups.

The ranks are forked from a server that has torch and the test modules imported: a rank costs about 0.05 s, not the
seconds of an import. What a test module does when it is imported, it does once there, and in no rank's environment.
The rendezvous store lives in the test process, on a loopback port that the kernel chose, much as torchrun's agent has
it: nothing races for a port, and a rank that ends early does not take the store away from the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_trainer.runtime.rank_loss import LossNotice

# Seconds that the other ranks get after one has failed: enough for them to report an error of their own.
GRACE_SECONDS = 3.0

_PRELOADED = [
    "tests.fork_server",
    "pytest",
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tests.ranks",
]
# What others import when they are first used: with DeepSpeed, two seconds in every rank.
_IMPORTED_LATE = {
    "accel_trainer.accelerator": ("accel_trainer.strategies.ddp", "accel_trainer.strategies.fsdp2.strategy"),
    "accel_trainer.trainer": ("accel_trainer.strategies.ddp", "accel_trainer.strategies.fsdp2.strategy"),
    "deepspeed": (
        "accel_trainer.integrations.deepspeed.strategy",
        "torch._inductor.compile_fx",
        "torch.utils.cpp_extension",
    ),
    # What a first model imports, of which losses for object detection, with scipy, are a second.
    "transformers.models.auto.modeling_auto": ("transformers.models.llama.modeling_llama",),
}
PYTHONPATH = os.environ.get("PYTHONPATH", "")
"""Of this interpreter: in a rank, of the server."""
COLLECTED = "TESTS_COLLECTED"
"""The test modules that the server imports besides, separated by spaces."""
RETURNS = "ACCEL_TRAINER_RETURNS_AS"
"""Of a process in the place of another: where it ends by itself, the launcher is to tell the others."""
_SCRUBBED_PREFIXES = ("ACCELERATE_", "ACCEL_TRAINER_", "FSDP_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")

Environment = Mapping[str, "str | None"]


class RankFailure(Exception):
    """At least one rank raised, died or hung.

    Attributes:
        failures: what each failing rank has to say, by rank: a formatted traceback, or how it died, or where it hung.
    """

    def __init__(self, failures: Mapping[int, str], world_size: int) -> None:
        self.failures = dict(sorted(failures.items()))
        blocks = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in self.failures.items()]
        super().__init__(f"{len(blocks)} of {world_size} ranks failed\n" + "\n".join(blocks))


def preload(*modules: str) -> None:
    """Have the fork server import these modules too; call it at the top of a test module, before any rank runs.

    For imports that every rank would otherwise pay for: `preload("transformers.trainer")`.
    """
    for module in modules:
        _PRELOADED.extend(name for name in (module, *_IMPORTED_LATE.get(module, ())) if name not in _PRELOADED)


def free_port() -> int:
    """Return a port that was free a moment ago, below the range from which the kernel serves outgoing connections."""
    for offset in range(1000):
        port = 20_000 + (os.getpid() * 131 + time.time_ns() + offset * 7) % 10_000
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 30000 on 127.0.0.1")


def wait_until(happens: Callable[[], object], seconds: float = 40) -> None:
    """Wait for what another rank, thread or process does; for its file, with `path.exists`."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"it has not happened within {seconds} s"
        time.sleep(0.01)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: Environment | Callable[[int], Environment] | None = None,
    timeout: float = 60,
    grace_seconds: float = GRACE_SECONDS,
    outlives: bool = False,
    replaces: int = 0,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on every rank of a job of `world_size` processes and return the results by rank.

    Each rank has the environment and the working directory of the caller, without what another launcher left there,
    plus RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS=1; torch computes
    with one thread. The function joins the process group itself; the group is destroyed when it returns.

    Args:
        function: a module-level function, also one of a test module; found again in the rank by its file and name.
        env: variables to set (`None` removes one) on every rank, or a function from the rank to them. Without
            TORCHELASTIC_USE_AGENT_STORE, rank 0 hosts the store, as under a launcher that is not torchrun.
        timeout: seconds until the ranks that still run are killed and reported.
        grace_seconds: the same, after one has failed.
        outlives: be a launcher with `--on_rank_loss continue`: where the ranks can go on without one that was killed,
            they do, and its result is None.
        replaces: be one with `--on_rank_loss replace` for so many processes, each in the place of a killed one, whose
            result is that rank's.

    Raises:
        RankFailure: names every rank that raised, died or hung.
    """
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise TypeError(
            f"run_ranks needs a module-level function, and {function.__qualname__} cannot be imported by a rank"
        )
    context = start_fork_server()
    payload = pickle.dumps((args, kwargs))
    with _agent_store() as (agent_store, agent_port), tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        fallback_port = free_port()
        try:
            for index in range(world_size):
                changes = dict(env(index) if callable(env) else env or {})
                port = fallback_port if changes.get("TORCHELASTIC_USE_AGENT_STORE", "True") is None else agent_port
                environ = _rank_environment(index, world_size, port, changes)
                stack_path = str(Path(folder, f"{index}.txt"))
                call = _Call(locate(function), payload, environ, os.getcwd(), stack_path, timeout + 30)
                ranks.append(_start(context, index, call))
            outlived = None
            if outlives or replaces:
                start = functools.partial(_start_anew, context, [rank.call for rank in ranks])
                outlived = _Outlived(_build_notice(agent_store, world_size), replaces, start)
            _collect(ranks, time.monotonic() + timeout, timeout, grace_seconds, outlived)
        finally:
            for rank in ranks:
                rank.kill()
    # An error keeps the frames it was raised in. With them it would keep the store, and whoever frees that in a process
    # forked meanwhile (the collector of a DataLoader's worker) waits for a thread that is not there: SIGSEGV.
    del agent_store, outlived
    failures = {rank.index: rank.failure for rank in ranks if rank.failure}
    if failures:
        raise RankFailure(failures, len(ranks))
    return list({rank.index: rank.result for rank in ranks}.values())  # of those started anew, the last


def ask_jobs(run: Callable[[Any], Any], cases: Iterable[Any], at_once: int = 3) -> Callable[[Any], Any]:
    """Run each case, some at a time; return what gives the result of one, or raises its error.

    For jobs that mostly wait, as those with a killed rank do: the others ask for a while who is gone.
    """
    with ThreadPoolExecutor(at_once) as pool:
        futures = {case: pool.submit(run, case) for case in cases}
    return lambda case: futures[case].result()


def map_jobs(run: Callable[[Any], Any], cases: Iterable[Any]) -> dict[Any, Any]:
    """Return what `run` gives for each case, as `ask_jobs` runs them."""
    cases = list(cases)
    ask = ask_jobs(run, cases)
    return {case: ask(case) for case in cases}


@dataclass(frozen=True)
class _Call:
    """What a rank is sent: which function, with what, where."""

    target: tuple[str, str | None, str]
    payload: bytes
    environ: dict[str, str]
    directory: str
    stack_path: str
    lifetime_seconds: float


@dataclass
class _Rank:
    """One started rank, as the test process sees it."""

    index: int
    process: Any
    pipe: connection.Connection
    stack_path: str
    call: _Call
    result: Any = None
    failure: str | None = None
    is_done: bool = field(default=False)

    def read(self) -> None:
        """Take the rank's answer, or note that it died without one."""
        self.is_done = True
        try:
            if not self.pipe.poll():  # the rank is gone, and its loader's workers hold the pipe open for 5 s
                raise EOFError
            is_ok, data = pickle.loads(self.pipe.recv_bytes())
            if is_ok:
                self.result = pickle.loads(data)
            else:
                self.failure = data
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            death = _describe_exit(self.process.exitcode)
            self.failure = f"rank {self.index} died without an answer: {death}\n{self._stack()}".rstrip()
        except Exception:
            self.failure = f"the result of rank {self.index} cannot be unpickled here\n{traceback.format_exc()}"

    def interrupt(self, reason: str) -> None:
        """End a rank that still runs, and keep where it was: SIGABRT makes its faulthandler write the stacks."""
        self.is_done = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)
            os.kill(self.process.pid, signal.SIGCONT)  # one that was stopped hears nothing before
        self.process.join(2)
        self.kill()
        self.failure = f"rank {self.index} {reason}\n{self._stack() or '(no stack: the rank had not started)'}"

    def _stack(self) -> str:
        """Return what the rank's faulthandler has written, also at a fatal signal of its own; no list of modules."""
        path = Path(self.stack_path)
        return path.read_text(errors="replace").partition("\nExtension modules:")[0] if path.exists() else ""

    def kill(self) -> None:
        """Make sure that the rank and the processes it started are gone."""
        # The rank leads a process group of its own: its loader workers go with it, also when the rank itself is gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.pipe.close()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def start_fork_server() -> Any:
    """Start the server unless it runs, and return at once: it goes on importing. Return the context of its processes.

    It starts in the project's root: what it preloads must be found wherever the caller is.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, "tests.collected"])
    with contextlib.chdir(Path(__file__).resolve().parents[1]):
        forkserver.ensure_running()
    return context


def _build_notice(store: Any, world_size: int) -> LossNotice:
    from accel_trainer.runtime.rank_loss import LossNotice  # which imports torch

    return LossNotice(store, world_size)


@dataclass
class _Outlived:
    """What a launcher does where ranks are killed and the others go on."""

    notice: LossNotice
    num_replacements: int
    start: Callable[[int, dict[str, str]], _Rank]

    def replace(self, ranks: list[_Rank], dead: _Rank) -> bool:
        """Let the others go on without a rank, and start another in its place if there are any left; else False."""
        if not (self.notice.forget(dead.index) or self.notice.is_lost(dead.index)):
            others = self._going_on(ranks)
            if (dead.process.exitcode or 0) >= 0:
                return False
            if reason := self.notice.why_not(others) if others else "no replica is left":
                dead.failure = f"{dead.failure}\nthe others cannot go on: {reason}"
                return False
            self.notice.tell(dead.index)
        dead.failure = None
        others = self._going_on(ranks)
        is_wanted = others and self.notice.num_replaced < self.num_replacements
        if self.notice.awaits(dead.index) or (is_wanted and not self.notice.why_not_replaced(others)):
            ranks.append(self.start(dead.index, self.notice.replace(dead.index)))
        return True

    def follow(self, ranks: list[_Rank], ended: _Rank) -> None:
        """Start another in the place of a rank that has ended with its replica, where one is started in that's."""
        if self.notice.awaits(ended.index):
            ranks.append(self.start(ended.index, self.notice.replace(ended.index)))

    def _going_on(self, ranks: list[_Rank]) -> list[int]:
        running = [each.index for each in ranks if not each.is_done and self.notice.is_member(each.index)]
        return self.notice.going_on(running)


def _start_anew(context: Any, calls: list[_Call], index: int, variables: dict[str, str]) -> _Rank:
    call = replace(calls[index], environ=calls[index].environ | variables, stack_path=calls[index].stack_path + "+")
    return _start(context, index, call)


@contextlib.contextmanager
def _agent_store() -> Iterator[tuple[Any, int]]:
    """Host the rendezvous store in this process, on loopback only; yields it and its port."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield store, port
    finally:
        del store


def _rank_environment(rank: int, world_size: int, port: int, changes: Environment) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED_PREFIXES)}
    environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # torch looks up the name of each address that it connects to: a packet that a resolver loses costs 1 s, not 5.
        "RES_OPTIONS": "timeout:1 attempts:5",
    }
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def locate(function: Callable[..., Any]) -> tuple[str, str | None, str]:
    """Module name, file and qualified name: enough to find the function again in another process."""
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    return function.__module__, path and os.path.abspath(path), function.__qualname__


def _start(context: Any, index: int, call: _Call) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(sender, call), name=f"rank-{index}")
    process.start()
    sender.close()
    return _Rank(index, process, receiver, call.stack_path, call)


def _collect(
    ranks: list[_Rank], deadline: float, timeout: float, grace_seconds: float, outlived: _Outlived | None
) -> None:
    """Wait for every answer; after the first failure or at the deadline, end what still runs."""
    reason = f"had not finished after {timeout:g} s and was killed; it was here:"
    while running := [rank for rank in ranks if not rank.is_done]:
        ends: list[Any] = [end for rank in running for end in (rank.pipe, rank.process.sentinel)]
        ready = connection.wait(ends, max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in running:
                rank.interrupt(reason)
        for rank in running:
            if rank.pipe in ready or rank.process.sentinel in ready:
                rank.read()
                if outlived is not None:
                    (outlived.replace if rank.failure else outlived.follow)(ranks, rank)
        if any(rank.failure for rank in ranks) and time.monotonic() + grace_seconds < deadline:
            deadline = time.monotonic() + grace_seconds
            reason = f"was still running {grace_seconds:g} s after another rank had failed; it was here:"


def _rank_main(pipe: connection.Connection, call: _Call) -> None:
    """The whole life of a rank: environment, function, process group down, answer."""
    stacks = open(call.stack_path, "w")  # noqa: SIM115  stays open for faulthandler until the process ends
    _isolate(stacks.fileno(), call.lifetime_seconds)
    # A full collection would walk, and so copy, all that the server has imported: half a second.
    gc.freeze()
    gc.enable()
    os.chdir(call.directory)
    os.environ.clear()
    os.environ.update(call.environ)
    # As in a script. A server forks its children with itself as the method, and each rank would start one for workers.
    multiprocessing.set_start_method(None, force=True)
    try:
        import torch

        torch.set_num_threads(1)
        if "TESTS_FAULT" in os.environ:
            from tests.fault_injection import VARIABLE, install_faults

            install_faults(os.environ[VARIABLE], int(os.environ.get("RANK", 0)))
        function = find(*call.target)
        args, kwargs = pickle.loads(call.payload)
        # Plain pickle: the one of multiprocessing would pass tensors as shared memory that dies with this rank.
        answer = pickle.dumps((True, pickle.dumps(function(*args, **kwargs))))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException as error:
        is_end = isinstance(error, SystemExit) and not error.code and RETURNS not in call.environ
        answer = pickle.dumps((True, pickle.dumps(None)) if is_end else (False, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()


def _isolate(stack_fd: int, lifetime_seconds: float) -> None:
    """Give the rank a process group of its own, a stack dump on SIGABRT, and an end even when nobody waits for it."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stack_fd, all_threads=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, lifetime_seconds)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def find(module_name: str, path: str | None, qualname: str) -> Callable[..., Any]:
    """Import the module under the name it has in the test process, from its file where it is not on the path."""
    if module_name not in sys.modules and path is not None:
        try:
            spec = importlib.util.find_spec(module_name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None or not os.path.samefile(spec.origin, path):
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module_name])
    found: Any = importlib.import_module(module_name)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found
