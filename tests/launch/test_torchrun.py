"""Where the processes meet: addresses, ports and the messages when that fails."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.config import LaunchConfig
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.launch.rendezvous import BoundRendezvous, build_rendezvous, parse_settings
from accel_trainer.launch.torchrun import AgentJob, run_workers
from tests import warm
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def test_settings_are_read_as_pairs() -> None:
    assert parse_settings(" timeout=30, bind_address=0.0.0.0 ,") == {"timeout": "30", "bind_address": "0.0.0.0"}
    assert parse_settings("") == {}


def test_each_rendezvous_is_a_new_store_that_holds_no_old_keys() -> None:
    handler = BoundRendezvous("127.0.0.1", 0, 0, 1, {"timeout": "5"})
    first = handler.next_rendezvous()
    first.store.set("key", "old")
    second = handler.next_rendezvous()
    assert not second.store.check(["key"])
    assert second.bootstrap_store_info is not None
    assert second.bootstrap_store_info.master_addr == "127.0.0.1"
    assert handler.shutdown()


def test_machines_share_one_store() -> None:
    port = free_port()
    handlers = [BoundRendezvous("127.0.0.1", port, machine, 2, {"timeout": "10"}) for machine in range(2)]
    with ThreadPoolExecutor(2) as threads:
        main, other = threads.map(BoundRendezvous.next_rendezvous, handlers)
    main.store.set("key", "value")
    assert other.store.get("key") == b"value"
    assert (main.rank, other.rank, other.world_size) == (0, 1, 2)


def test_machine_0_may_listen_elsewhere_when_told_so() -> None:
    info = BoundRendezvous("localhost", 0, 0, 1, {"bind_address": "127.0.0.1"}).next_rendezvous()
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_addr == "localhost"


def test_a_machine_0_that_is_not_there_is_named() -> None:
    handler = BoundRendezvous("127.0.0.1", free_port(), 1, 2, {"timeout": "1"})
    with pytest.raises(ProcessGroupError, match=r"machine 0 was not reached at 127\.0\.0\.1 port \d+ within 1 s"):
        handler.next_rendezvous()


def test_a_machine_that_nobody_joins_is_named_and_so_is_a_store_that_is_not_there() -> None:
    meeting = {"num_machines": 2, "main_process_ip": "127.0.0.1", "rdzv_backend": "c10d", "rdzv_conf": "timeout=1"}
    launch = LaunchConfig(**meeting, main_process_port=free_port())
    with pytest.raises(
        ProcessGroupError, match=r"fewer than 2 machines came to 127\.0\.0\.1 in time; .* timeout=SECONDS"
    ):
        run_workers(AgentJob(("true",), {}, 1, launch, use_cpu=True))
    launch = LaunchConfig(**(meeting | {"rdzv_conf": "timeout=1,is_host=0"}), main_process_port=free_port())
    with pytest.raises(ProcessGroupError, match=r"machine 0 was not reached at 127\.0\.0\.1 port .* within 1 s"):
        run_workers(AgentJob(("true",), {}, 1, launch, use_cpu=True))


def run_under_nohup() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    words = ("sh", "-c", f"kill -HUP {os.getpid()}; sleep 0.5")
    return run_workers(AgentJob(words, {}, 1, LaunchConfig(), use_cpu=True))


def test_under_nohup_a_terminal_may_close() -> None:
    assert run_ranks(run_under_nohup, 1, env=warm.ALONE) == [0]


TWO: dict[str, Any] = {"num_machines": 2, "main_process_ip": "127.0.0.1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rdzv_conf": "timeout"}, "rdzv_conf has the entry 'timeout'; expected key=value,key=value"),
        ({"rdzv_conf": "time=3"}, "rdzv_conf has 'time', which the static rendezvous does not know"),
        ({"rdzv_conf": "timeout=soon"}, "timeout='soon'; expected a whole number of seconds"),
        ({"num_machines": 2}, "num_machines is 2 and main_process_ip is not set"),
        ({"num_machines": 2, "rdzv_backend": "c10d"}, "num_machines is 2 and main_process_ip is not set"),
        ({**TWO, "max_restarts": 3}, "max_restarts is 3 on 2 machines with the static rendezvous"),
        ({"rdzv_backend": "carrier-pigeon"}, "rdzv_backend 'carrier-pigeon' cannot be used"),
        *(
            (
                {"rdzv_backend": "c10d", "rdzv_conf": conf},
                f"rdzv_backend 'c10d' cannot be used with rdzv_conf '{conf}': ",
            )
            for conf in ("backend=static", "read_timeout=soon")
        ),
        # 192.0.2.0/24 is reserved for documentation: no machine has such an address.
        (
            {**TWO, "main_process_ip": "192.0.2.1"},
            "192.0.2.1 is not an address of this machine, which is machine 0",
        ),
        (
            {**TWO, "main_process_ip": "no-such-host.invalid"},
            "no-such-host.invalid' cannot be resolved",
        ),
        ({"main_process_port": "TAKEN"}, r"port \d+ on 127.0.0.1 is in use by another process"),
        ({"log_dir": "file/logs"}, "log_dir 'file/logs' cannot be made: Not a directory"),
    ],
)
def test_a_job_whose_processes_cannot_meet_is_refused_before_one_starts(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if "main_process_port" in options:
            options = {"main_process_port": taken.getsockname()[1]}
        with pytest.raises(ConfigError, match=message):
            run_workers(AgentJob(("true",), {}, 1, LaunchConfig(**options), use_cpu=True))


def test_a_time_to_save_that_is_no_number_is_named() -> None:
    wrong = AgentJob(("true",), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "long"}, 1, LaunchConfig(), use_cpu=True)
    with pytest.raises(ConfigError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT is 'long'; expected a whole number of sec"):
        run_workers(wrong)


def test_two_jobs_of_one_machine_do_not_meet_in_one_store() -> None:
    handlers = [build_rendezvous(LaunchConfig(rdzv_backend="c10d")) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        meetings = [*threads.map(lambda handler: handler.next_rendezvous(), handlers)]
    first, second = (meeting.bootstrap_store_info for meeting in meetings)
    assert first.master_port != second.master_port
    for handler in handlers:
        handler.shutdown()


LATE = """
import os, sys, time
from accel_trainer.config import LaunchConfig
from accel_trainer.launch import torchrun

waitid = os.waitid

def late(kind, pid, options):
    found = waitid(kind, pid, options)
    if options & os.WNOHANG:
        return found if sys.argv[1] == "seen" else None
    time.sleep(0.5 if found.si_status == 7 else 0)
    return waitid(kind, pid, options)

os.waitid = late
command = (sys.executable, "-c", "import os, time; os.environ['RANK'] == '1' and os._exit(7); time.sleep(60)")
sys.exit(torchrun.run_workers(torchrun.AgentJob(command, {}, 2, LaunchConfig(), use_cpu=True)))
"""


@pytest.mark.parametrize("end", ["seen", "reaped by torch at once"])
def test_the_worker_that_failed_first_is_named_though_its_watcher_wakes_up_late(end: str) -> None:
    done = warm.run([sys.executable, "-c", LATE, end], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 7
    assert re.search(r"rank 1 \(pid \d+\) failed with exit code 7; this ended the job", done.stderr)
