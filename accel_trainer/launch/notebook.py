"""Train from a running Python: start workers that call a function, which may be defined in a cell of a notebook.

Workers are forked, so that they have the function of this process and everything that it refers to.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from accel_trainer.accelerator.shared_state import forget_states, has_accelerator
from accel_trainer.config import LaunchConfig, resolve
from accel_trainer.config.dialects.environment import without_launch
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.launch.job import worker_environment
from accel_trainer.launch.machine import count_tpus, find_interface, set_tpu_variables
from accel_trainer.launch.outer_job import refuse_nesting
from accel_trainer.launch.rendezvous import build_rendezvous
from accel_trainer.launch.torchrun import AGENT_LOGGERS, log_destination, worker_variables
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.process import destroy_process_group

__all__ = ["debug_launcher", "notebook_launcher"]

_NUMBERS = {
    "launch.main_process_port": "use_port",
    "launch.max_restarts": "max_restarts",
    "launch.monitor_interval_seconds": "monitor_interval",
}
"""Arguments that are checked like options of the launcher, by the path of the option."""
_VALUE, _NO_VALUE = "value.pt", "value.error"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


@dataclass(frozen=True)
class _Workers:
    """The processes of this machine."""

    function: Callable[..., Any]
    args: Sequence[Any]
    num_processes: int
    launch: LaunchConfig
    folder: Path
    """For the value that the function returns, and for tracebacks."""
    prefix: str | None
    """Template for what is put before each line that they write; None for nothing."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    use_cpu: bool = False,
) -> Any:
    """Call `function(*args)` in several processes that are the ranks of a job, and return the value of rank 0's call.

    The Accelerator is made within the function. One process is this one. Several are forked: nothing here may have
    used a GPU, and each computes with one CPU thread, since the threads of this process do not survive a fork.

    Args:
        num_processes: on this machine; None is one for each GPU or chip of a TPU, and one on the CPU.
        mixed_precision: "no", "bf16" or "fp16", where the function does not choose; None leaves it as configured.
        use_port: on the machine of rank 0; None is a free one on one machine, 29500 on several.
        master_addr: address of the machine of rank 0, as the others reach it.
        node_rank: number of this machine, of `num_nodes`; the same call is made on each.
        rdzv_endpoint: `address:port`, instead of `master_addr` and `use_port`.
        rdzv_conf: further settings of the rendezvous.
        max_restarts: how often all workers are started again after one has failed.
        log_line_prefix_template: put before each line that workers write: "[${rank}] ", for instance.
        use_cpu: run on the CPU although there is a GPU.

    Returns:
        The value of rank 0, on the machine of rank 0; None on the others. From a forked worker it comes as a pickle,
        with its tensors on the CPU: None, with a warning that says why, where it cannot be pickled.

    Raises:
        ConfigError: an argument is wrong; this process has used a GPU, has an Accelerator or a process group already;
            or there are fewer GPUs than processes.
        ProcessGroupError: a worker failed; the message has its rank and its traceback.
    """
    refuse_nesting(os.environ)
    outer = without_launch(os.environ)
    if num_processes is None:
        num_processes = _default_processes(use_cpu, outer)
    address, port = _endpoint(rdzv_endpoint, master_addr, use_port)
    _check_numbers(num_processes, num_nodes, node_rank)
    is_static = rdzv_backend == "static"
    launch = LaunchConfig(
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=None if is_static and num_nodes == 1 else address,
        main_process_port=port,
        rdzv_backend=rdzv_backend,
        rdzv_conf=_settings_text(rdzv_conf, "none" if is_static else rdzv_id),
        max_restarts=max_restarts,
        monitor_interval_seconds=monitor_interval,
        tee="3" if log_line_prefix_template else "0",
    )
    # None stands for an option that is not given.
    flags = {"launch.num_processes": num_processes * num_nodes, "mixed_precision": mixed_precision}
    flags["use_cpu"] = use_cpu or None
    numbers = {path: getattr(launch, path.removeprefix("launch.")) for path in _NUMBERS}
    resolved = resolve(
        explicit={**flags, **numbers}, environ=outer, explicit_name="notebook_launcher", explicit_keywords=_NUMBERS
    )
    launch_text = json.dumps({"config_file": None, "flags": flags})
    interface = find_interface(None if num_nodes == 1 else address)
    environment = worker_environment(os.environ, resolved, launch_text, num_processes, interface)
    if num_processes == num_nodes == 1:
        with worker_variables(environment):
            return function(*args)
    _check_can_fork(num_processes, resolved.config.use_cpu)
    environment["OMP_NUM_THREADS"] = "1"
    with worker_variables(environment), tempfile.TemporaryDirectory(prefix="accel_trainer_") as folder:
        if not resolved.config.use_cpu:
            set_tpu_variables(num_nodes, num_processes)
        _run(_Workers(function, args, num_processes, launch, Path(folder), log_line_prefix_template))
        return _returned_value(Path(folder))


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Any:
    """Call `function(*args)` in several processes on this CPU, as `notebook_launcher` does: to try out code."""
    return notebook_launcher(function, args, num_processes, use_cpu=True)


def _check_numbers(num_processes: int, num_nodes: int, node_rank: int) -> None:
    are_numbers = all(isinstance(number, int) for number in (num_processes, num_nodes, node_rank))
    if not are_numbers or num_processes < 1 or num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"num_processes={num_processes!r}, num_nodes={num_nodes!r}, node_rank={node_rank!r}: expected one process "
            "and one machine at least, and a node_rank from 0 to num_nodes - 1"
        )


def _settings_text(conf: Mapping[str, Any] | None, run_id: str) -> str:
    """Return settings of the rendezvous as `rdzv_conf` has them; "none" is accelerate's default for no run id."""
    settings = {**(conf or {}), **({} if run_id == "none" else {"rdzv_id": run_id})}
    return ",".join(f"{key}={value}" for key, value in settings.items())


def _default_processes(use_cpu: bool, environ: Mapping[str, str]) -> int:
    is_on_cpu = use_cpu or resolve(environ=environ).config.use_cpu
    return 1 if is_on_cpu else max(1, torch.cuda.device_count(), count_tpus())


def _endpoint(endpoint: str, address: str, port: int | str | None) -> tuple[str, int | None]:
    if endpoint:
        address, _, port = endpoint.rpartition(":")
    if port is not None and not str(port).isdecimal() or not address:
        where = f"rdzv_endpoint={endpoint!r}" if endpoint else f"use_port={port!r}"
        raise ConfigError(f"{where}: expected {'address:port' if endpoint else 'the number of a port'}")
    return address, None if port is None else int(port)


def _check_can_fork(num_processes: int, use_cpu: bool) -> None:
    """Refuse a process whose forks could not work: one with a group, an Accelerator or an initialized GPU."""
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "this process has joined a process group, which its workers would share; start from a fresh Python, and "
            "join within the function"
        )
    gc.collect()  # an Accelerator without references may still be there, in a reference cycle
    if has_accelerator():
        raise ConfigError(
            "there is an Accelerator in this process, made outside of the function that is launched; make it within "
            "the function, restart the notebook, and launch before another is made"
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            f"{sys.platform} cannot fork processes; write a script and start it with `accel-trainer launch`"
        )
    if not use_cpu:
        _check_devices(num_processes)


def _check_devices(num_processes: int) -> None:
    """Refuse more processes than devices, and a process that has claimed them: its forks would find none."""
    if torch.cuda.is_initialized():
        raise ConfigError(
            "this process has used a GPU, and workers forked from it could not; restart the notebook, and use GPUs "
            "within the launched function only (models, tensors on a device, torch.cuda calls)"
        )
    num_tpus = count_tpus()
    count = num_tpus or torch.cuda.device_count()  # touches none, so that workers can still be forked
    if count and num_processes > count:
        raise ConfigError(
            f"num_processes={num_processes} on this machine, which has {count} {'TPU device' if num_tpus else 'GPU'}(s)"
            f"; start at most {count}, or pass use_cpu=True to run them on the CPU"
        )
    if num_tpus and torch.get_device_module("tpu").is_initialized():
        raise ConfigError(
            "this process has used a TPU, which it keeps, and workers forked from it could not; restart the notebook, "
            "and use TPUs within the launched function only"
        )
    if not count and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        raise ConfigError(
            f"num_processes={num_processes}: workers on {kind} cannot be forked; start one process, pass use_cpu=True, "
            "or write a script and start it with `accel-trainer launch`"
        )


@contextlib.contextmanager
def _contained_agent() -> Iterator[list[logging.LogRecord]]:
    """Keep the records that the agent logs, and put back the signal handlers that it replaces in this process."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    propagated = [logger.propagate for logger in AGENT_LOGGERS]
    kept = BufferingHandler(capacity=1000)
    try:
        for logger in AGENT_LOGGERS:
            logger.addHandler(kept)
            logger.propagate = False
        yield kept.buffer
    finally:
        for logger, value in zip(AGENT_LOGGERS, propagated, strict=True):
            logger.removeHandler(kept)
            logger.propagate = value
        with contextlib.suppress(ValueError):  # only the main thread has handlers
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _run(workers: _Workers) -> None:
    """Start the workers and wait; raise the traceback that the first failed one has written to their folder."""
    result, causes = _run_agent(workers)
    if not result.is_failed():
        return
    # torch leaves the agent of failed workers in a reference cycle, and with it the job's store, whose thread a fork of
    # this process lacks: a loader's worker that collected it would be aborted.
    gc.collect()
    world_size = workers.num_processes * workers.launch.num_machines
    reports = sorted(workers.folder.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        first = reports[0]
        raise ProcessGroupError(
            f"rank {first.stem} of {world_size} failed, which ended the job. In that process:\n\n{first.read_text()}"
        )
    if not result.failures:
        raise ProcessGroupError(f"a rank of another machine failed, which ended this job of {world_size}; look there")
    rank, failure = next(iter(result.failures.items()))
    code = failure.exitcode
    killed = "; out of memory, maybe" if -code == signal.SIGKILL else ""
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}{killed}"
    raise ProcessGroupError(
        f"rank {rank} of {world_size} ended outside of the function, {how}, which ended the job. {' '.join(causes)}"
    )


def _run_agent(workers: _Workers) -> tuple[RunResult, list[str]]:
    """Start the workers and wait; return how they ended, and the errors of those that never called the function."""
    launch = workers.launch
    with _contained_agent() as logged, log_destination(launch) as logs:
        spec = WorkerSpec(
            role=launch.role,
            local_world_size=workers.num_processes,
            rdzv_handler=build_rendezvous(launch),
            entrypoint=_work,
            args=(workers,),
            max_restarts=launch.max_restarts,
            monitor_interval=launch.monitor_interval_seconds,
        )
        agent = LocalElasticAgent(spec, logs, start_method="fork", log_line_prefix_template=workers.prefix)
        try:
            result = agent.run()
        except SignalException as caught:
            if caught.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(caught.sigval)) from None
        return result, [str(record.exc_info[1]) for record in logged if record.exc_info and record.exc_info[1]]


def _work(workers: _Workers) -> None:
    """Call the function in a worker, leave the job, and write the traceback of an error to their folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a kernel that is killed leaves no workers
    whole: Any = [_WholeLines(stream) for stream in (sys.stdout, sys.stderr)]
    with contextlib.redirect_stdout(whole[0]), contextlib.redirect_stderr(whole[1]):
        try:
            _call(workers)
        finally:
            for stream in whole:
                stream.flush()


def _call(workers: _Workers) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The OpenMP pool is a copy without its threads, and libgomp would wait for them forever
    # (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=60035).
    torch.set_num_threads(1)
    # An earlier cell may have asked for the state of the notebook's own process, of which this one is a copy.
    forget_states()
    report = workers.folder / f"{os.environ['RANK']}.txt"
    report.unlink(missing_ok=True)  # of the attempt before a restart
    try:
        value = workers.function(*workers.args)
        if os.environ["RANK"] == "0":
            _keep_value(value, workers.folder)
        destroy_process_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            destroy_process_group()
            return
        if (watch := current_watch()) is not None:
            watch.tell(error, is_final=True)
        report.write_text(traceback.format_exc())
        raise SystemExit(1) from None


class _WholeLines:
    """A stream that hands on whole lines, which do not mix with those of other ranks, and the rest at a `flush`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._text = ""

    def __getattr__(self, name: str) -> Any:
        """Return the stream's own attribute: its encoding, its file, whether it is a terminal."""
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Keep text up to its last line, and hand on those before."""
        lines, newline, rest = f"{self._text}{text}".rpartition("\n")
        self._text = rest
        if newline:
            self._hand_on(lines + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one behind the other."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Hand on everything."""
        text, self._text = self._text, ""
        self._hand_on(text)

    def _hand_on(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _keep_value(value: Any, folder: Path) -> None:
    """Write the value of rank 0's call, or why that cannot be written, to `folder`."""
    (folder / _NO_VALUE).unlink(missing_ok=True)  # of the attempt before a restart
    try:
        torch.save(value, folder / _VALUE)
    except Exception as error:  # whatever the value's own class does when it is pickled
        (folder / _NO_VALUE).write_text(f"{type(error).__name__}: {error}")


def _returned_value(folder: Path) -> Any:
    """Return the value that `_keep_value` wrote, on the CPU: a GPU used here would end further launches."""
    reason = folder / _NO_VALUE
    if reason.exists():
        why = reason.read_text()
    elif not (folder / _VALUE).exists():  # rank 0 is on another machine, or has ended by sys.exit()
        return None
    else:
        try:
            return torch.load(folder / _VALUE, map_location="cpu", weights_only=False)
        except Exception as error:  # of a class that only the worker has
            why = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"what the function returned on rank 0 cannot be pickled, so None is returned here: {why}; return numbers, "
        "tensors and containers of them, or write the rest to a file",
        stacklevel=3,
    )
    return None
