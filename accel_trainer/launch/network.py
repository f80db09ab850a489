"""The network interface through which this machine meets the others of a job."""

from __future__ import annotations

import array
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["find_interface"]

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces, as `struct ifreq`s
_REQUEST_BYTES = 24 + 2 * struct.calcsize("P")


def find_interface(address: str | None) -> str | None:
    """Return the name of the interface whose address this machine has on the way to another one.

    gloo would take the interface that the machine's own name resolves to: on many systems 127.0.1.1, where no other
    machine can reach it. Nothing is sent.

    Args:
        address: name or number of the machine that all meet at; None for a job on this machine alone.

    Returns:
        None where it cannot be told: an unknown name, no route, or another system than Linux.
    """
    if address is None:
        return _LOOPBACK if _LOOPBACK in dict(socket.if_nameindex()).values() else None
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = probe.getsockname()[0].partition("%")[0]
        return next((name for name, found in _addresses() if found == own), None)
    except OSError:
        return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for every address of this machine."""
    if sys.platform != "linux":
        return
    import fcntl

    room = array.array("B", bytes(_REQUEST_BYTES * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, _ = struct.unpack(
            "iP", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
        )
    for start in range(0, length, _REQUEST_BYTES):
        entry = room[start : start + _REQUEST_BYTES].tobytes()
        yield entry[:16].partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24])
    path = Path("/proc/net/if_inet6")
    for line in path.read_text().splitlines() if path.exists() else []:
        number, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
