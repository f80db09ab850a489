"""Random streams: seeding, one stream for each rank, and their state as plain data."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.collectives import broadcast, gather_object
from accel_trainer.runtime.process import ProcessContext, current_process, fix_cublas_workspace

_seed_in_common: int | None = None
"""The seed whose streams all ranks still draw from; None when each has its own, or nobody seeded."""
_stay_equal = False
_readers: ProcessContext | None = None
"""Where ranks share batches: this one's place among those that do not."""


def set_seed(
    seed: int,
    device_specific: bool = False,
    deterministic: bool = False,
    *,
    rank: int | None = None,
    same_on_all_ranks: bool = False,
) -> None:
    """Seed Python's, NumPy's and torch's generators (CPU and accelerators).

    All ranks draw the same numbers until a model is prepared, so that models are initialised alike. From then on each
    rank draws from streams of its own, a function of seed and rank: dropout and augmentation differ. Rank 0 goes on
    with the seed's streams, as one process would.

    Args:
        seed: the same on every rank.
        device_specific: add the rank to the seed at once, so that initial weights differ, too, until they are prepared.
            Ranks that share batches (tensor, context or sequence parallelism) have one number.
        deterministic: use deterministic kernels only, chosen the same way in every run; an operation without one
            raises. For CUDA's matrix products `CUBLAS_WORKSPACE_CONFIG` is set, unless it is.
        rank: this process's rank; None asks the job that it has joined.
        same_on_all_ranks: keep the streams of all ranks the same, those of a prepared loader's workers included.

    Raises:
        ConfigError: both `device_specific` and `same_on_all_ranks` were asked for.
        ProcessGroupError: with `device_specific`, a launcher started this process and it has not joined its job.
    """
    global _seed_in_common, _stay_equal
    if device_specific and same_on_all_ranks:
        raise ConfigError(
            "set_seed() got device_specific=True and same_on_all_ranks=True, which say the opposite of each other; "
            "pass one of them"
        )
    value = seed
    if device_specific:
        value += (_readers or current_process()).rank if rank is None else rank
    _seed(value)
    _seed_in_common = None if device_specific or same_on_all_ranks else seed
    _stay_equal = same_on_all_ranks
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # cuDNN would time its kernels, and take another one in the next run.
        torch.backends.cudnn.benchmark = False
        fix_cublas_workspace()


def _seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value % 2**32)  # it refuses larger ones
    torch.manual_seed(value)


def _seed_mixed(*entropy: int) -> None:
    """Seed from several numbers, hashed so that neighbouring ranks and seeds have unrelated streams."""
    _seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))


def seed_own_streams(process: ProcessContext) -> None:
    """Give this rank streams of its own if all ranks draw from those of one `set_seed`. Ranks do not communicate."""
    global _seed_in_common
    if _seed_in_common is None:
        return
    # Rank 0 goes on with the seed's streams, as one process would.
    if process.rank > 0:
        _seed_mixed(_seed_in_common % 2**64, process.rank)
    _seed_in_common = None


def share_streams(process: ProcessContext, readers: ProcessContext) -> None:
    """Give ranks that share batches one set of streams: where theirs differ, seeded anew. Collective where some do."""
    global _readers
    _readers = None if readers.world_size == process.world_size else readers
    if _readers is None:
        return
    states = repr((random.getstate(), np.random.get_state())).encode(), torch.get_rng_state().numpy().tobytes()
    host, device = (int.from_bytes(hashlib.sha256(state).digest()[:7], "big") for state in states)
    shared = [said[1:] for said in gather_object([(readers.rank, host, device)], process) if said[0] == readers.rank]
    if len({host for host, _ in shared}) > 1:
        random.seed(shared[0][0])
        np.random.seed(shared[0][0] % 2**32)
    if len({device for _, device in shared}) > 1:
        torch.manual_seed(shared[0][1])


def stream_index(shard: int) -> int:
    """Return the index of a shard's random streams; 0 for all shards after `set_seed(same_on_all_ranks=True)`."""
    return 0 if _stay_equal else shard


def get_rng_state() -> dict[str, Any]:
    """Return the state of this process's random streams: Python's, NumPy's, torch's and those of all accelerators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {"name": name, "keys": torch.from_numpy(np.array(keys, dtype=np.int64)), "rest": rest},
        "torch": torch.get_rng_state(),
    }
    kind, stream = _accelerator_stream()
    # A device that nobody has used is not started for it; MPS cannot be asked.
    if stream is not None and (not hasattr(stream, "is_initialized") or stream.is_initialized()):
        state[kind] = stream.get_rng_state()
        # By number; the current device has no number here, as it may have another one when the state is loaded.
        others = {str(index): stream.get_rng_state(index) for index in _other_devices(stream)}
        if others:
            state[f"other {kind}"] = others
    return state


def _other_devices(stream: Any) -> list[int]:
    """Return the devices of a kind beside the current one. Their generators lie on the host: none is started for it."""
    if not (hasattr(stream, "device_count") and hasattr(stream, "current_device")):
        return []
    return [index for index in range(stream.device_count()) if index != stream.current_device()]


def _accelerator_stream() -> tuple[str, Any]:
    """Return the kind of this machine's accelerator, and the module of torch that has its stream; None without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu", None
    module = torch.get_device_module(accelerator)
    return accelerator.type, module if hasattr(module, "get_rng_state") else None


def set_rng_state(state: dict[str, Any]) -> None:
    """Load the state of `get_rng_state`; the random streams are this rank's own from here on."""
    global _seed_in_common
    _seed_in_common = None
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    np.random.set_state((numpy_state["name"], numpy_state["keys"].numpy().astype(np.uint32), *numpy_state["rest"]))
    torch.set_rng_state(state["torch"])
    kind, stream = _accelerator_stream()
    if stream is not None and kind in state:
        stream.set_rng_state(state[kind])
        others = state.get(f"other {kind}", {})
        for index in _other_devices(stream) if others else ():
            if str(index) in others:
                stream.set_rng_state(others[str(index)], index)


class KeptStreams:
    """This process's random streams as they are now; `put_back`, or the end of a `with` block, makes them so again.

    Streams that all ranks still have in common are so again: each rank gets its own when a model is prepared.
    """

    def __init__(self) -> None:
        self._state, self._seed_in_common = get_rng_state(), _seed_in_common

    def put_back(self) -> None:
        """Set the streams back. Ranks do not communicate."""
        global _seed_in_common
        set_rng_state(self._state)
        _seed_in_common = self._seed_in_common

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.put_back()


class OwnDraws:
    """Random numbers of this rank's own within a stream that several ranks share, which goes on alike behind them.

    A function of the shared stream's state and this rank's index among those that share it: what is computed again in a
    backward, or after a resume, draws the same numbers again, and there is nothing to save. Ranks do not communicate.
    """

    def __init__(self, device_type: str, index: int) -> None:
        self.device_type, self.index = device_type, index
        self._shared: Tensor | None = None  # the state of the shared stream meanwhile

    def enter(self) -> None:
        """Draw own numbers from here on, until `leave`."""
        if self._shared is None:
            stream = self._stream()
            self._shared = stream.get_rng_state()
            entropy = self._shared.numpy().tobytes() + stream_index(self.index).to_bytes(4, "big")
            seed = int.from_bytes(hashlib.sha256(entropy).digest()[:8], "big")
            # torch.manual_seed would seed all devices.
            (torch.default_generator if stream is torch else stream).manual_seed(seed)

    def leave(self) -> None:
        """Draw from the shared stream again, which is one number further; nothing where none was entered."""
        if self._shared is not None:
            self._stream().set_rng_state(self._shared)
            self._shared = None
            # One number further on every rank: the next draws of its own would be these again.
            torch.rand((), device=self.device_type)

    def _stream(self) -> Any:
        return torch if self.device_type == "cpu" else torch.get_device_module(self.device_type)


def reseed_from_saved(saved: Mapping[str, Any], rank: int) -> None:
    """Seed this process's random streams from rank 0's saved state and its own rank. Ranks do not communicate.

    For a state that another number of ranks saved: the streams are others than before, differ between the ranks, and
    are the same whenever the state is loaded on that rank.
    """
    global _seed_in_common
    _seed_in_common = None
    digest = hashlib.sha256(saved["torch"].numpy().tobytes()).digest()
    _seed_mixed(int.from_bytes(digest, "big"), rank)


def take_streams(state: Mapping[str, Any], rank: int) -> None:
    """Go on with streams of rank `rank` that another's state gives: with that itself where all have the same."""
    if _stay_equal:
        set_rng_state(dict(state))
    else:
        reseed_from_saved(state, rank)


def check_rng_types(rng_types: Iterable[str], device: torch.device) -> tuple[str, ...]:
    """Return the streams that have to be synchronised on a job's ranks: "torch", or the kind of their device.

    "generator", the samplers' own, is taken and left out: their order depends on the seed and the epoch alone.

    Raises:
        ConfigError: a stream is none of these.
    """
    names = [str(getattr(name, "value", name)) for name in ([rng_types] if isinstance(rng_types, str) else rng_types)]
    known = ["torch", "generator", *([] if device.type == "cpu" else [device.type])]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"rng_types has {', '.join(map(repr, unknown))}; expected some of {', '.join(map(repr, known))}, on ranks "
            f"whose device is {device.type}"
        )
    return tuple(name for name in names if name != "generator")


def synchronize_rng(rng_types: Sequence[str], process: ProcessContext) -> None:
    """Set the streams that `check_rng_types` returned to those of rank 0. Collective: every rank calls it."""
    for name in rng_types:
        if name == "torch":
            torch.set_rng_state(broadcast(torch.get_rng_state(), process))
        else:
            module: Any = torch.get_device_module(name)
            module.set_rng_state(broadcast(module.get_rng_state(process.device), process), process.device)
