"""Which process this is: which device it gets, and the group that it joins."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_trainer import Accelerator, InitProcessGroupKwargs, PartialState
from accel_trainer.checkpoint.background import BackgroundSaver
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime import process as process_module
from accel_trainer.runtime.collectives import gather_object
from accel_trainer.runtime.launchers import LaunchInfo
from accel_trainer.runtime.process import (
    _bound_device,
    _use_device,
    find_attempt,
    init_process,
    read_environment,
    select_device,
)
from accel_trainer.strategies.parallel.meshes import init_mesh
from tests.ranks import RankFailure, ask_jobs, preload, run_ranks
from tests.scenarios import Scenarios
from tests.warm import ALONE

preload("accel_trainer.accelerator")

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = Scenarios(env={"TORCHELASTIC_USE_AGENT_STORE": None})
"""In the order of a group's life: the first joins it, and the last leaves it."""

# --- which device --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be on a machine with `count` accelerators of a kind. No test machine has any."""

    def pretend(kind: str, count: int = 1) -> None:
        # torch names the kind it was built for also where there is none of it, unless it is asked for availability.
        def current_accelerator(check_available: bool = False) -> torch.device | None:
            return torch.device(kind) if count or not check_available else None

        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(
    ("device", "backend", "is_bound"),
    [
        ("cuda:1", "nccl", True),
        ("cuda:1", "cpu:gloo,cuda:nccl", True),
        ("cuda:0", "gloo", False),
        ("cuda:0", "cpu:gloo,cuda:gloo", False),
        ("cpu", "gloo", False),
        ("cpu", "nccl", False),
    ],
)
def test_a_group_of_nccl_alone_is_bound_to_its_device_from_the_start(device: str, backend: str, is_bound: bool):
    assert _bound_device(torch.device(device), backend) == (torch.device(device) if is_bound else None)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_each_local_rank_gets_its_device(machine: Any, kind: str):
    machine(kind, 4)
    assert [select_device(rank, 4, use_cpu=False) for rank in range(4)] == [torch.device(kind, i) for i in range(4)]
    assert select_device(0, 1, use_cpu=True) == torch.device("cpu")


def test_a_machine_without_accelerator_runs_on_the_cpu(machine: Any):
    machine("cuda", 0)
    assert select_device(3, 4, use_cpu=False) == torch.device("cpu")


def test_more_ranks_than_devices_are_refused(machine: Any):
    machine("cuda", 2)
    message = r"local rank 2 has no device: 3 processes .* 2 cuda device.*most 2.*--cpu.*Accelerator\(cpu=True\)"
    with pytest.raises(ConfigError, match=message):
        select_device(2, 3, use_cpu=False)


def test_a_task_that_sees_only_its_own_device_takes_it(machine: Any, monkeypatch: pytest.MonkeyPatch):
    machine("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    info = LaunchInfo("SLURM", 3, 3, 4, 4, "node0", 12345, has_own_device=True)
    assert _use_device(info, use_cpu=False) == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="local rank 3 has no device"):
        _use_device(replace(info, has_own_device=False), use_cpu=False)


def test_mps_serves_one_process(machine: Any):
    machine("mps")
    assert select_device(0, 1, use_cpu=False) == torch.device("mps")
    with pytest.raises(ConfigError, match=r"2 processes were started on this node, and its one mps device .*--cpu"):
        select_device(0, 2, use_cpu=False)


def test_a_rank_without_a_device_fails_before_it_joins(machine: Any):
    machine("cuda", 1)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match="local rank 1 has no device"):
        init_process(environ, timeout_seconds=1)


def test_one_process_on_an_accelerator_uses_it(machine: Any):
    machine("cuda", 2)
    process = init_process({})
    assert (process.device, process.world_size, process.backend) == (torch.device("cuda", 0), 1, None)


# --- the group -----------------------------------------------------------------------------------------------------


def group_timeout(group: Any = None) -> float:
    """Return what the group's backend for the CPU has as its timeout, in seconds."""
    group = group or dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def join_and_describe() -> dict[str, Any]:
    """Join without any flag, twice, through every door; return what this rank sees."""
    environ = dict(os.environ)
    torch.set_num_threads(8)
    os.sched_getaffinity = lambda pid: set(range(6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = init_process(read_environment(), timeout_seconds=41)
        second = init_process(read_environment())
        state, accelerator = PartialState(), Accelerator()
        groups = [group for shape in ((4,), (2, 2)) for group in init_mesh(first.device.type, shape).get_all_groups()]
        saver = BackgroundSaver(first)
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "contexts": {first, second, state.process, accelerator.process},
        "total": total.item(),
        "timeout": group_timeout(),
        "timeouts": [group_timeout(group) for group in (*groups, saver.thread_group, saver._main_group)],
        "threads": torch.get_num_threads(),
        "type": accelerator.distributed_type.value,
        "environ_changes": set(environ.items()) ^ set(os.environ.items()),
    }


def test_ranks_on_a_cpu_machine_are_one_job():
    # Without any flag: two ranks must not each believe that they are alone.
    results = run_ranks(join_and_describe, 4, env={"OMP_NUM_THREADS": None})
    for rank, result in enumerate(results):
        (context,) = result["contexts"]
        assert (context.rank, context.local_rank, context.world_size, context.local_world_size) == (rank, rank, 4, 4)
        assert (context.device, context.backend) == (torch.device("cpu"), "gloo")
        assert (context.is_main, context.is_local_main, context.is_distributed) == (rank == 0, rank == 0, True)
        assert result["total"] == 4.0
        assert result["type"] == "MULTI_CPU"
        assert result["environ_changes"] == set()
        # 6 cores for 4 ranks.
        assert result["threads"] == 1
        assert result["timeout"] == 41
        # The mesh over all ranks uses the job's own group; the others are new.
        assert result["timeouts"] == [41] * 5


def join_later_with(door: str) -> dict[str, Any]:
    torch.set_num_threads(3)
    if door == "user":
        dist.init_process_group("gloo", timeout=timedelta(seconds=50))
    else:
        PartialState()
    before = group_timeout()
    plain = Accelerator()
    unchanged = group_timeout()
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    process = Accelerator(kwargs_handlers=[handler]).process
    changed = group_timeout()
    PartialState()
    dist.barrier()  # a rank that is gone early closes connections that the other still makes
    return {
        "timeouts": [before, unchanged, changed, group_timeout()],
        "seen": (plain.num_processes, process.rank, process.local_rank, process.backend, str(process.device)),
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize(
    ("door", "environ", "expected"),
    [
        ("user", {}, [50, 50, 60, 60]),
        ("PartialState", {"ACCELERATE_USE_CPU": "true"}, [1800, 1800, 60, 60]),
        ("PartialState", {"ACCEL_TRAINER_TIMEOUT_SECONDS": "70"}, [70, 70, 60, 70]),
    ],
)
def test_a_timeout_that_was_asked_for_reaches_a_group_that_exists(
    door: str, environ: dict[str, str], expected: list[float]
):
    for rank, result in enumerate(run_ranks(join_later_with, 2, door, env=environ)):
        assert result["timeouts"] == expected
        assert result["seen"] == (2, rank, rank, "gloo", "cpu")
        # OMP_NUM_THREADS is set: the number of threads is the user's.
        assert result["threads"] == 3


def test_without_a_launcher_there_is_no_group_and_contexts_are_plain_values():
    process = init_process({})
    assert (process.rank, process.world_size, process.backend) == (0, 1, None)
    assert not dist.is_initialized()
    assert pickle.loads(pickle.dumps(process)) == process


def arrive_unless(missing: int) -> float | None:
    if int(os.environ["RANK"]) == missing:
        return None
    begin = time.monotonic()
    message = r"rank 0 of 2 could not join the process group at 127.0.0.1:.*Check that all ranks were started"
    with pytest.raises(ProcessGroupError, match=message):
        init_process(read_environment(), timeout_seconds=1)
    assert not dist.is_initialized()
    return time.monotonic() - begin


@pytest.mark.parametrize("agent_store", ["True", None])
def test_a_rank_that_never_arrives_is_an_error_after_the_timeout(waited: Callable[[Any], Any], agent_store: str | None):
    seconds, _ = waited(agent_store)
    assert 0.9 < seconds < 20


@SCENARIOS.add
def when_connected_and_joined() -> tuple[float, float]:
    connect, connected = dist.init_process_group, 0.0

    def connect_late(*args: Any, **kwargs: Any) -> None:
        nonlocal connected
        connect(*args, **kwargs)
        time.sleep(dist.get_rank())
        connected = time.monotonic()

    dist.init_process_group = connect_late
    init_process(read_environment(), use_cpu=True)
    return connected, time.monotonic()


def test_no_rank_has_joined_before_all_are_connected():
    """Or one whose work is done at once would end, and those that still connect would fail."""
    (_, joined), (connected, _) = SCENARIOS.results("when_connected_and_joined")

    assert joined >= connected


def join_and_leave() -> None:
    for _ in range(30):
        init_process(read_environment(), use_cpu=True)
        dist.destroy_process_group()


def test_one_group_after_the_other_meets_in_the_store_of_an_agent():
    run_ranks(join_and_leave, 2)


def join_one_that_leaves() -> None:
    if os.environ["RANK"] == "1":
        dist.init_process_group("gloo")
        dist.destroy_process_group()
        return
    with pytest.raises(ProcessGroupError, match=r"rank 0 of 2 could not join the process group.*by peer"):
        init_process(read_environment(), use_cpu=True)
    assert not dist.is_initialized()


def test_a_group_that_a_rank_has_left_meanwhile_is_an_error_and_no_group():
    run_ranks(join_one_that_leaves, 2)


def wait_for_a_rank_that_stays_away() -> float:
    process = init_process(read_environment(), timeout_seconds=2)
    store = dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    if process.rank == 0:
        with pytest.raises(RuntimeError, match=r"Timed out|timeout"):
            dist.all_reduce(torch.ones(1))
        store.set("given up", "")
    else:
        store.wait(["given up"], timedelta(seconds=50))
    return time.monotonic() - begin


def test_a_collective_on_the_cpu_waits_no_longer_than_the_timeout(waited: Callable[[Any], Any]):
    assert waited("a collective")[0] < 20


@pytest.fixture(scope="module")
def waited() -> Callable[[Any], Any]:
    """Run the jobs that wait for a timeout at once; return what gives the results of one."""

    def run(name: str | None) -> list[Any]:
        if name == "a collective":
            return run_ranks(wait_for_a_rank_that_stays_away, 2)
        return run_ranks(arrive_unless, 2, 1, env={"TORCHELASTIC_USE_AGENT_STORE": name})

    return ask_jobs(run, ["True", None, "a collective"])


@SCENARIOS.add
def name_of_job() -> str:
    return find_attempt(read_environment())[1]


def test_ranks_of_a_launcher_are_one_job_and_processes_of_a_shell_are_several():
    first, second = SCENARIOS.results("name_of_job")
    assert first == second
    assert run_ranks(name_of_job, 1, env=ALONE) != run_ranks(name_of_job, 1, env=ALONE)


def test_an_address_that_is_missing_is_named():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    with pytest.raises(ProcessGroupError, match="MPI started rank 1 of 2 and MASTER_ADDR is not set"):
        init_process(environ, timeout_seconds=1)


@pytest.fixture
def leaving() -> Iterator[None]:
    yield
    process_module.destroy_process_group()


@pytest.mark.parametrize("environ", [{"PMI_RANK": "0", "PMI_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_job_of_one_process_is_a_group_of_one_and_needs_no_address(environ: dict[str, str], leaving: None):
    process = init_process(environ, use_cpu=True, timeout_seconds=9)
    assert (process.rank, process.world_size, process.backend) == (0, 1, "gloo")
    assert (dist.is_initialized(), process.is_distributed, group_timeout()) == (True, False, 9)


def test_an_address_may_be_one_of_ipv6(leaving: None):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": str(port)}
    assert init_process(environ, use_cpu=True).backend == "gloo"


def ask_for_both_kinds() -> tuple[str | None, str]:
    """Join with a pair of backends, as on a machine with GPUs; gloo takes nccl's place."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:gloo,cuda:gloo")])
    return accelerator.backend, dist.get_backend_config()


def test_the_backend_is_the_one_that_carries_the_devices_tensors():
    assert run_ranks(ask_for_both_kinds, 1) == [("gloo", "cpu:gloo,cuda:gloo")]


@SCENARIOS.add
def ask_for_backends() -> list[str]:
    """Make Accelerators that ask for backends in a job that has joined with gloo."""
    answers = []
    for backend in ("gloo", "cpu:gloo,cuda:nccl", None, "nccl", "mpi"):
        try:
            answers.append(Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]).backend)
        except ConfigError as error:
            answers.append(str(error))
    return answers


def test_another_backend_than_that_of_the_group_is_refused():
    for *taken, nccl, mpi in SCENARIOS.results("ask_for_backends"):
        assert taken == ["gloo"] * 3
        assert nccl.startswith("backend='nccl' was asked for, and this process has joined a group with backend 'cpu:gl")
        assert mpi.endswith(
            "ask for it where the group is made, in the first Accelerator() or PartialState() of the process"
        )


def wrong_backend() -> None:
    torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: 2  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda index: None  # type: ignore[assignment]
    dist.init_process_group("cpu:gloo")
    init_process(read_environment())


def test_a_users_group_that_cannot_carry_the_device_is_refused():
    with pytest.raises(RankFailure, match=r"backend 'cpu:gloo', which cannot carry cuda tensors; initialise it with"):
        run_ranks(wrong_backend, 2)


SCRIPT = """
import sys, torch
from accel_trainer import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1))
sys.stdout.write(f"{accelerator.process_index} {int(total)}\\n")  # in one piece: the ranks share the pipe
"""


def torchrun(script: str, output: str, errors: str) -> None:
    """Be torchrun, in a process that has torch imported already, with what all processes write in two files."""
    from torch.distributed.run import main

    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    main(["--standalone", "--nproc-per-node=2", script])


def test_a_script_that_just_ends_leaves_the_group_without_a_warning(tmp_path: Path):
    script, output, errors = tmp_path / "script.py", tmp_path / "output", tmp_path / "errors"
    script.write_text(SCRIPT)
    environ = {"TORCHELASTIC_USE_AGENT_STORE": None, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    run_ranks(torchrun, 1, str(script), str(output), str(errors), env=environ, timeout=100)
    assert sorted(output.read_text().split("\n")) == ["", "0 2", "1 2"]
    assert errors.read_text() == ""


@SCENARIOS.add
def listening_addresses() -> set[str]:
    """Return the addresses, in hexadecimal, at which this process listens."""
    process = init_process(read_environment(), use_cpu=True, timeout_seconds=30)
    gather_object(process.rank, process)
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_r17_ranks_that_meet_by_loopback_listen_to_no_network():
    loopback = {"0100007F", "00000000000000000000000001000000"}
    for seen in SCENARIOS.results("listening_addresses"):
        assert seen <= loopback


@SCENARIOS.add
def threads_of_the_group() -> tuple[int, int]:
    """Import what keeps the group while there is one; return how many threads it has, and how many when it is left."""
    import importlib

    import torch.distributed.nn.functional as functional

    def count() -> int:
        names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
        return sum(name.startswith("pt_gloo") for name in names)

    init_process(read_environment(), use_cpu=True)
    dist.barrier()  # a thread gives itself its name before its first work
    importlib.reload(functional)
    before = count()
    process_module.destroy_process_group()
    return before, count()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_group_that_is_left_is_closed_whoever_has_it_for_a_default():
    for before, after in SCENARIOS.results("threads_of_the_group"):
        assert before > 0
        assert after == 0


@pytest.mark.parametrize("error", [None, ValueError("boom")])
def test_a_script_that_fails_does_not_wait_for_the_others(error: Exception | None, monkeypatch: pytest.MonkeyPatch):
    left = []
    monkeypatch.setattr(process_module, "destroy_process_group", lambda: left.append(True))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    process_module._leave_at_exit()
    assert bool(left) == (error is None)
