"""How the machines of a job meet at a store on machine 0, and how their launchers hear of each other until the end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from accel_trainer.config import LaunchConfig
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.launch.machine import check_meeting, local_address
from accel_trainer.logging import write_stderr
from accel_trainer.runtime.launchers import DEFAULT_PORT, bracket_ipv6

_LOOPBACK = "127.0.0.1"

# A job has 600 s to come together: machines boot, containers are pulled. Later steps have limits of their own.
_START_UP_SECONDS = 600
_NOTICE_SECONDS = 10
_POLL_SECONDS = 0.1

# A launcher that is gone is named within 15 s: this silence, one more beat, and the others' next look.
_BEAT_SECONDS = 1.0
_LOST_SECONDS = 12.0

# Of machines that come and go: torch takes one for lost after 15 s, and waits 30 s for more than the fewest.
_ELASTIC_SETTINGS = {"keep_alive_interval": "2", "keep_alive_max_attempt": "3", "last_call_timeout": "5"}


def build_rendezvous(launch: LaunchConfig) -> RendezvousHandler:
    """Return the rendezvous, which brings the machines of a job together."""
    check_meeting(launch)
    settings = parse_settings(launch.rdzv_conf)
    is_alone = launch.num_machines == 1
    port = launch.main_process_port or (0 if is_alone else DEFAULT_PORT)
    address = launch.main_process_ip or _LOOPBACK
    if launch.rdzv_backend == "static":
        if is_alone:
            return BoundRendezvous(_LOOPBACK, port, 0, 1, settings)
        return BoundRendezvous(address, port, launch.machine_rank, launch.num_machines, settings)
    return _rendezvous_of_torch(launch, address, port, settings)


def _rendezvous_of_torch(launch: LaunchConfig, address: str, port: int, settings: dict[str, str]) -> RendezvousHandler:
    run_id, most = settings.pop("rdzv_id", "accel_trainer"), launch.num_machines
    if launch.rdzv_backend == "c10d":
        settings.setdefault("is_host", str(hosts_store(launch)))
        limit = settings.pop("timeout", str(_START_UP_SECONDS))
        if settings["is_host"].lower() not in ("true", "1", "t", "yes", "y"):
            # torch tries for a minute, and a machine may take longer to boot.
            BoundRendezvous(address, port, launch.machine_rank, most, {"timeout": limit}).reach("this machine")
        settings.setdefault("join_timeout", limit)
    endpoint = f"{bracket_ipv6(address)}:{port}"
    fewest = launch.min_machines or most
    if fewest < most:
        settings = _ELASTIC_SETTINGS | settings
    # The ranks' store is at the address of one machine, whose own name others may not know.
    own = None if launch.num_machines == 1 else local_address(address)
    try:
        return get_rendezvous_handler(
            RendezvousParameters(launch.rdzv_backend, endpoint, run_id, fewest, most, local_addr=own, **settings)
        )
    except (ValueError, TypeError, ImportError, RendezvousError) as error:
        conf = f" with rdzv_conf {launch.rdzv_conf!r}" if launch.rdzv_conf else ""
        raise ConfigError(f"rdzv_backend {launch.rdzv_backend!r} cannot be used{conf}: {error}") from error


def hosts_store(launch: LaunchConfig) -> bool:
    """Whether a rendezvous' store is here; torch compares only the machine's name, on many machines 127.0.1.1."""
    address = launch.main_process_ip or _LOOPBACK
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True


def parse_settings(text: str) -> dict[str, str]:
    """Return `key=value,key=value` as a dict."""
    settings = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = entry.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"rdzv_conf has the entry {entry!r}; expected key=value,key=value")
        settings[key.strip()] = value.strip()
    return settings


class BoundRendezvous(StaticTCPRendezvous):
    """A fixed set of machines that meet at a store on machine 0, which the workers use for their process group too.

    The store listens on one address and one port, and nowhere else. torch's own rendezvous listens on every interface
    of the machine, also for the address 127.0.0.1, and the protocol has neither authentication nor encryption
    (https://github.com/pytorch/pytorch/blob/main/SECURITY.md). Here the socket is bound first and handed to the store.

    Args:
        address: of machine 0, as the others reach it.
        port: 0 lets the kernel choose one, which only works on one machine.
        settings: `bind_address` for machine 0 to listen elsewhere than on `address`; `timeout` in seconds.
    """

    def __init__(
        self, address: str, port: int, machine_rank: int, num_machines: int, settings: Mapping[str, str] | None = None
    ) -> None:
        settings = settings or {}
        unknown = sorted(settings.keys() - {"bind_address", "timeout"})
        if unknown:
            raise ConfigError(
                f"rdzv_conf has {', '.join(map(repr, unknown))}, which the static rendezvous does not know; it knows "
                "'bind_address' and 'timeout'"
            )
        timeout = settings.get("timeout", str(_START_UP_SECONDS))
        if not timeout.isdecimal():
            raise ConfigError(f"rdzv_conf has timeout={timeout!r}; expected a whole number of seconds")
        super().__init__(address, port, machine_rank, num_machines, "accel_trainer", int(timeout))
        self._bind_address = settings.get("bind_address", address)
        self._bound_port = port

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on machine 0, or reach it; a new store for every start of the workers, with no old keys.

        Raises:
            ConfigError: the address or the port cannot be listened on.
            ProcessGroupError: machine 0 cannot be reached, or another machine has not come in time.
        """
        self._store = None
        if self.rank == 0:
            listener = _listen(self._bind_address, self.master_port)
            self._bound_port = listener.getsockname()[1]
            self._store = TCPStore(
                self.master_addr,
                self._bound_port,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        else:
            self._store = self.reach(f"machine {self.rank}")
        if self.world_size > 1:
            self._wait_for_all(self._store)
        store_info = RendezvousStoreInfo(self.master_addr, self._bound_port)
        return RendezvousInfo(PrefixStore("agents", self._store), self.rank, self.world_size, store_info)

    def connect(self) -> Store:
        """Return one more connection to the store, for a thread that must not wait behind others."""
        return TCPStore(self.master_addr, self._bound_port, is_master=False, timeout=timedelta(seconds=_LOST_SECONDS))

    def reach(self, who: str) -> TCPStore:
        """Return a connection to the store on machine 0, which may not be there yet; `who` is said to wait for it."""
        problem: OSError | RuntimeError | None = None

        def is_there() -> bool:
            nonlocal problem
            try:
                socket.create_connection((self.master_addr, self.master_port), timeout=_NOTICE_SECONDS / 2).close()
            except OSError as error:
                problem = error
                return False
            return True

        def whom() -> str:
            place = f"{bracket_ipv6(self.master_addr)}:{self.master_port}"
            return f"machine 0 at {place}; start it there, or correct --main_process_ip"

        try:
            if self._wait(who, is_there, whom):
                return TCPStore(self.master_addr, self.master_port, is_master=False, timeout=self.timeout)
        except RuntimeError as error:  # something else listens there
            problem = error
        raise ProcessGroupError(
            f"machine 0 was not reached at {self.master_addr} port {self.master_port} within "
            f"{self.timeout.total_seconds():g} s; check main_process_ip and main_process_port, the firewall, and that "
            f"the job was started on machine 0: {problem}"
        ) from problem

    def _wait_for_all(self, store: TCPStore) -> None:
        keys = {machine: f"joined/{machine}" for machine in range(self.world_size)}

        def missing() -> str:
            numbers = [str(machine) for machine, key in keys.items() if not store.check([key])]
            return f"machine{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"

        def whom() -> str:
            return f"{missing()}; start the job there, with --machine_rank and the same --main_process_ip"

        try:
            store.set(keys[self.rank], "1")
            is_complete = self._wait(f"machine {self.rank}", lambda: store.check(list(keys.values())), whom)
            problem = "" if is_complete else missing()
        except RuntimeError as error:
            raise ProcessGroupError(
                f"machine 0 at {self.master_addr} port {self._bound_port} has ended before all {self.world_size} "
                f"machines had come; look there, and start the job again on every machine: {error}"
            ) from error
        if problem:
            raise ProcessGroupError(
                f"{problem} of {self.world_size} did not come to {self.master_addr} port {self._bound_port} within "
                f"{self.timeout.total_seconds():g} s; start the job there, check its --main_process_ip and "
                "--machine_rank and the firewall, or give it more time with --rdzv_conf timeout=SECONDS"
            )

    def _wait(self, who: str, is_there: Callable[[], bool], whom: Callable[[], str]) -> bool:
        """Wait until somebody is there, and say every 10 s for whom; return False when the time is over."""
        start, said = time.monotonic(), 0
        while not is_there():
            waited = time.monotonic() - start
            if waited > self.timeout.total_seconds():
                return False
            if waited - said >= _NOTICE_SECONDS:
                said += _NOTICE_SECONDS
                write_stderr(f"accel-trainer launch: {who} has waited {said} s for {whom()}")
            time.sleep(_POLL_SECONDS)
        return True

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


def _listen(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=2048)
    except socket.gaierror as error:
        message = f"main_process_ip {address!r} cannot be resolved: {error}; give the address of machine 0"
        raise ConfigError(message) from error
    except OSError as error:
        message = {
            errno.EADDRINUSE: f"port {port} on {address} is in use by another process; choose another "
            "main_process_port, or leave it out on one machine for a free one",
            errno.EADDRNOTAVAIL: f"main_process_ip {address} is not an address of this machine, which is machine 0; "
            "give the address by which the others reach it, correct machine_rank, or, behind address translation, "
            "listen on every interface with --rdzv_conf bind_address=0.0.0.0",
        }.get(error.errno or 0, f"cannot listen on {address} port {port}: {error}; choose another main_process_port")
        raise ConfigError(message) from error


@dataclass(frozen=True, slots=True)
class MachineFailure:
    """Why a job on several machines ends."""

    machine: int
    code: int
    text: str
    """What happened there, as the end of "on machine 1 ..."."""
    may_come_back: bool = False
    """Nothing was heard of the machine any more: another may take its place where workers are started again."""


class Launchers:
    """The state of the launchers of a job on several machines, through the store on one of them.

    A thread counts up a heartbeat. The machine with the store watches those of the others, which watch the store.

    Args:
        store: a connection that nobody else waits on.
        hosts_store: the store is on this machine: machine 0, but for rendezvous in which machines number themselves.
    """

    def __init__(self, store: Store, machine_rank: int, num_machines: int, *, hosts_store: bool) -> None:
        self._store = store
        self.machine = machine_rank
        self._hosts_store = hosts_store
        self._host = machine_rank if hosts_store else 0
        self._others = [machine for machine in range(num_machines) if machine != machine_rank]
        self._failure: MachineFailure | None = None
        self._answered = time.monotonic()
        self._beats = dict.fromkeys(self._others, (0, self._answered))
        self._all_are_done = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def failure(self) -> MachineFailure | None:
        """The first failure of the job that is known here, of this machine or of another."""
        if self._failure is None and not self._hosts_store and time.monotonic() - self._answered > _LOST_SECONDS:
            self._failure = lost(self._host)
        return self._failure

    def wait_for_failure(self) -> MachineFailure | None:
        """Return the first failure as soon as one is known; None after the time in which a lost machine is found."""
        deadline = time.monotonic() + _LOST_SECONDS + _BEAT_SECONDS
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.failure

    def tell(self, code: int, text: str, *, may_come_back: bool = False) -> None:
        """Publish a failure of this machine, unless there is an earlier one, which is then known here, too."""
        self._publish(MachineFailure(self.machine, code, text, may_come_back))

    def wait_until_all_are_done(self) -> None:
        """Wait until the workers of every machine have ended without an error, or there is a failure."""
        with contextlib.suppress(RuntimeError):  # the thread sees that machine 0 is gone
            self._store.set(f"done/{self.machine}", "1")
        while not self._all_are_done and self.failure is None:
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """End the heartbeat. The machine with the store waits until the others have seen how the job ends."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.machine}", "1")
            if self._hosts_store:
                self._wait_for_the_others()
        self._leaving.set()
        self._thread.join(_BEAT_SECONDS + 1.0)

    def stop(self) -> None:
        """End the heartbeat without a word: the machines meet again for the next start of the workers."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.machine}", "1")
        self._leaving.set()

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + _LOST_SECONDS + _BEAT_SECONDS
        while time.monotonic() < deadline:
            left = [machine for machine in self._others if not self._store.check([f"left/{machine}"])]
            if not left:
                return
            if all(map(self._is_silent, left)):
                break
            time.sleep(_POLL_SECONDS)
        for machine in left:
            if self._is_silent(machine) and self._failure != lost(machine):
                write_stderr(f"accel-trainer launch: on machine {machine} {lost(machine).text}")

    def _run(self) -> None:
        try:
            if self._hosts_store:
                self._store.set("host", str(self.machine))
            while True:
                self._store.add(f"beat/{self.machine}", 1)
                self._look()
                self._answered = time.monotonic()
                if self._leaving.wait(_BEAT_SECONDS):
                    return
        except RuntimeError:
            if not self._leaving.is_set():
                self._failure = self._failure or lost(self._host)

    def _look(self) -> None:
        """Read the others' keys; nothing here waits."""
        if self._failure is None and self._store.check(["failure"]):
            self._failure = _read(self._store.get("failure"))
        machines = [self.machine, *self._others]
        self._all_are_done = self._store.check([f"done/{machine}" for machine in machines])
        if self._hosts_store:
            self._look_for_lost()
            return
        if self._store.check(["host"]):
            self._host = int(self._store.get("host"))
        if self._failure is not None or self._all_are_done:
            self._store.set(f"left/{self.machine}", "1")

    def _look_for_lost(self) -> None:
        """Read how far the others have counted, where the store is, and publish that one of them does not."""
        for machine, (known, _) in self._beats.items():
            count = self._store.add(f"beat/{machine}", 0)
            if count != known:
                self._beats[machine] = (count, time.monotonic())
            elif self._failure is None and self._is_silent(machine) and not self._store.check([f"left/{machine}"]):
                self._publish(lost(machine))

    def _is_silent(self, machine: int) -> bool:
        return time.monotonic() - self._beats[machine][1] > _LOST_SECONDS

    def _publish(self, failure: MachineFailure) -> None:
        try:
            text = json.dumps(dataclasses.astuple(failure))
            self._failure = _read(self._store.compare_set("failure", "", text))
        except RuntimeError:
            self._failure = self._failure or lost(self._host)


def _read(text: bytes) -> MachineFailure:
    return MachineFailure(*json.loads(text))


def lost(machine: int) -> MachineFailure:
    """Return the failure of a machine of which nothing is heard any more."""
    return MachineFailure(
        machine,
        1,
        "the launcher has ended without a word or cannot be reached; look there, and at the network between",
        may_come_back=True,
    )
