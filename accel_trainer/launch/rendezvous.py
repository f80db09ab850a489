"""Rendezvous of the processes of a job: a store on one address and one port, listening nowhere else.

torch's own rendezvous listens on every interface of the machine, also for the address 127.0.0.1, and the protocol has
neither authentication nor encryption (https://github.com/pytorch/pytorch/blob/main/SECURITY.md). Here the listening
socket is bound first and handed to the store.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from accel_trainer.errors import ConfigError, ProcessGroupError

__all__ = ["LOOPBACK", "BoundRendezvous", "parse_settings"]

LOOPBACK = "127.0.0.1"

# A job has 600 s to come together: machines boot, containers are pulled. Later steps have limits of their own.
_START_UP_SECONDS = 600


def parse_settings(text: str) -> dict[str, str]:
    """Return `key=value,key=value` as a dict.

    Raises:
        ConfigError: an entry has no `=`.
    """
    settings = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = entry.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"rdzv_conf has the entry {entry!r}; expected key=value,key=value")
        settings[key.strip()] = value.strip()
    return settings


class BoundRendezvous(RendezvousHandler):
    """A fixed set of machines that meet at a store on machine 0, which the workers use for their process group too.

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
        if not settings.get("timeout", "1").isdecimal():
            raise ConfigError(f"rdzv_conf has timeout={settings['timeout']!r}; expected a whole number of seconds")
        self.address = address
        self.machine_rank = machine_rank
        self.num_machines = num_machines
        self._port = port
        self._bind_address = settings.get("bind_address", address)
        self._timeout = timedelta(seconds=int(settings.get("timeout", _START_UP_SECONDS)))
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """The workers join the store of this process instead of opening one more."""
        return True

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on machine 0, or reach it; a new store for every start of the workers, with no old keys.

        Raises:
            ConfigError: the address or the port cannot be listened on.
            ProcessGroupError: machine 0 cannot be reached.
        """
        self._store = None
        if self.machine_rank == 0:
            listener = _listen(self._bind_address, self._port)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                self.address,
                port,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        else:
            port = self._port
            self._store = _reach(self.address, port, self._timeout)
        store_info = RendezvousStoreInfo(self.address, port)
        return RendezvousInfo(PrefixStore("agents", self._store), self.machine_rank, self.num_machines, store_info)

    def is_closed(self) -> bool:
        """A fixed set of machines is never closed."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: see `is_closed`."""

    def num_nodes_waiting(self) -> int:
        """No machine can join a fixed set."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job; two jobs differ by their port."""
        return "accel_trainer"

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


def _listen(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=2048)
    except socket.gaierror as error:
        raise ConfigError(
            f"main_process_ip {address!r} cannot be resolved: {error}; give the address of machine 0"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {address} is in use by another process; choose another main_process_port, "
                "or leave it out on one machine for a free one"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"main_process_ip {address} is not an address of this machine, which is machine 0; give the address "
                "by which the others reach it, correct machine_rank, or, behind address translation, listen on every "
                "interface with --rdzv_conf bind_address=0.0.0.0"
            ) from error
        raise ConfigError(
            f"cannot listen on {address} port {port}: {error}; choose another main_process_port"
        ) from error


def _reach(address: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise ProcessGroupError(
            f"machine 0 was not reached at {address} port {port} within {timeout.total_seconds():g} s; check "
            f"main_process_ip and main_process_port, the firewall, and that the job was started on machine 0: {error}"
        ) from error
