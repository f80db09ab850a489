"""How often the host waits for the device, and where, counted without one: the meta device stands in for it.

    with stand_in_device():
        accelerator = Accelerator()              # accelerator.device is "meta": models and batches go there
        ...
        with counting_waits() as waits:
            step()
        assert not waits, report(waits)

Whatever the host would have to wait for is an operation that reads values of the device: `.item()`, `bool()`,
`nonzero`, a boolean mask as index, a copy to the host, or a copy to the device that is not `non_blocking`. There are no
values on the meta device, so the mode answers with those that it is told to. It says what the program asks for, not how
long a wait would be: a kernel that waits by itself, inside of torch, it cannot see.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accel_trainer.runtime.side_stream import SideStream

DEVICE = torch.device("meta")
_READS = ("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "unique", "_unique2")
_COPIES = ("_to_copy", "copy_", "copy")
_OWN = (str(Path(__file__).parents[1] / "accel_trainer"), str(Path(__file__).parents[1] / "integrations"))


def _call_site() -> str:
    """Return the innermost line of ours on the stack, and the innermost one outside of torch."""
    own = outer = ""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        place = f"{'/'.join(Path(name).parts[-3:])}:{frame.f_lineno}"
        if name != __file__ and not outer and "/torch/" not in name:
            outer = place
        if not own and name.startswith(_OWN):
            own = place
        frame = frame.f_back
    return outer if own in ("", outer) else f"{outer} <- {own}"


class WaitCounter(TorchDispatchMode):
    """Counts the operations that wait, by call site, and answers them with made-up values."""

    def __init__(self, number: float, on: torch.device) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._number, self._on = number, on
        self._factories = _Factories(self)

    def __enter__(self) -> Any:
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._factories.__exit__(*exception)

    def _is_there(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self._on.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        there = any(self._is_there(leaf) for leaf in tree_leaves((args, kwargs)))
        if name in _READS and there:
            return self._read(func, name, args, kwargs)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and there:
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            if masks and not (name != "index" and args[2].numel() == 1):  # a masked fill by one number does not wait
                self.note(name)
                if self._on.type == "meta":
                    return args[0] if name != "index" else args[0].flatten()[: masks[0].numel()]
        if name in _COPIES:
            return self._copy(func, name, args, kwargs)
        return func(*args, **kwargs)

    def counts_copies_to(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self._on.type != "cpu"

    def note(self, what: str) -> None:
        self.found[f"{what} at {_call_site()}"] += 1

    def _read(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        self.note(name)
        if self._on.type != "meta":
            return func(*args, **kwargs)
        if name in ("_local_scalar_dense", "item", "is_nonzero"):
            dtype = args[0].dtype
            return bool(self._number) if dtype == torch.bool else (self._number if dtype.is_floating_point else 0)
        if name == "equal":
            return True
        return func(*(torch.ones_like(a, device="cpu") if self._is_there(a) else a for a in args), **kwargs).to(DEVICE)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        source = args[1] if name != "_to_copy" else args[0]
        target = kwargs.get("device") if name == "_to_copy" else args[0].device
        target = torch.device(target) if target is not None else source.device
        from_there, to_there = self._is_there(source), target.type == self._on.type
        if from_there == to_there or self._on.type == "cpu":
            return func(*args, **kwargs)
        is_free = kwargs.get("non_blocking") or (name != "_to_copy" and len(args) > 2 and args[2])
        if not is_free:
            self.note(f"copy {'to the host' if from_there else 'to the device'}")
        if not from_there:
            return func(*args, **kwargs)
        if name == "_to_copy":
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return args[0].zero_() if name == "copy_" else torch.zeros_like(args[0])


class _Factories(TorchFunctionMode):
    """Sees tensors that are made of numbers of the host, which torch copies without dispatching it."""

    def __init__(self, counter: WaitCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if makes and self._counter.counts_copies_to(kwargs.get("device")):
            self._counter.note("copy to the device")
        return func(*args, **kwargs)


@contextmanager
def counting_waits(number: float = 0.0, on: torch.device = DEVICE) -> Iterator[Counter[str]]:
    """Context that yields the waits of its block, by call site.

    Args:
        number: the value that the device answers with.
        on: the device whose values count. On the CPU every read of a value does, and copies cannot be told apart.
    """
    with WaitCounter(number, on) as mode:
        yield mode.found


class RecordedEvent:
    """A point in a stream."""

    def __init__(self, stream: RecordedStream | None = None, log: list[str] | None = None, **_: Any) -> None:
        self.stream = stream
        self._log = log if log is not None else []

    def synchronize(self) -> None:
        """Wait on the host; for the stream of the device itself, a point of the update before bounds its lead."""
        if isinstance(self.stream, RecordedStream):
            self._log.append(f"host waits for {self.stream.name}")

    def record(self, stream: RecordedStream | None = None) -> None:
        """Nothing is timed here."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: RecordedEvent) -> float:
        return 0.0


class RecordedStream:
    """A stream that writes down what is asked of it, in the list of its device."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def record_event(self) -> RecordedEvent:
        self._log.append(f"{self.name} records")
        return RecordedEvent(self, self._log)

    def wait_event(self, event: RecordedEvent) -> None:
        assert event.stream is not None
        self._log.append(f"{self.name} waits for {event.stream.name}")

    def wait_stream(self, other: RecordedStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class RecordedStreams:
    """The part of `torch.cuda` that streams need, for the meta device. There is no card to run the real one on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = RecordedStream("compute", self.log)

    def Stream(self, device: Any = None) -> RecordedStream:
        return RecordedStream("copy", self.log)

    def current_stream(self, device: Any = None) -> RecordedStream:
        return self.current

    @staticmethod
    def is_available() -> bool:
        """A build of torch for CUDA asks the device's module before it pins memory, which takes a card."""
        return False

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        """Context in which work goes to a stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def stand_in_device() -> Iterator[RecordedStreams]:
    """Context in which an Accelerator or a Trainer finds the meta device as the accelerator of this machine.

    Autocast has no such device and stays off; fused optimizers have its kernels, and refuse it by name.
    """
    streams = RecordedStreams()

    def empty_pinned(num_bytes: int) -> Tensor:
        streams.log.append(f"pins {num_bytes}")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_stream(tensor: Tensor, stream: RecordedStream) -> None:
        streams.log.append(f"{stream.name} keeps {tuple(tensor.shape)}")

    with (
        mock.patch("accel_trainer.runtime.process.select_device", return_value=DEVICE),
        mock.patch("accel_trainer.precision.PrecisionPolicy.autocast", return_value=nullcontext()),
        mock.patch("torch.optim.adam._device_dtype_check_for_fused"),
        mock.patch("torch.accelerator.empty_cache"),
        mock.patch("torch.accelerator.current_stream", streams.current_stream),
        mock.patch.object(torch, "meta", streams, create=True),
        mock.patch("torch.get_device_module", return_value=streams),
        mock.patch.object(torch, "Event", RecordedEvent),
        mock.patch.object(Tensor, "record_stream", record_stream),
        mock.patch("accel_trainer.runtime.side_stream._copy_stream", SideStream),
        mock.patch("accel_trainer.checkpoint.safetensors_file._copy_stream", SideStream),
        mock.patch("accel_trainer.checkpoint.safetensors_file.empty_pinned", empty_pinned),
        mock.patch("accel_trainer.strategies.single.require_values"),
        mock.patch("accel_trainer.strategies.ddp.require_values"),
    ):
        yield streams


def report(waits: Counter[str]) -> str:
    """Return the waits and their places, for the message of an assertion."""
    return "the host waits for the device:\n" + "\n".join(f"  {n} x {place}" for place, n in waits.most_common())
