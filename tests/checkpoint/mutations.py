"""Checkpoints of every kind with changes to their files, and the outcome of loading each.

`test_hostile_files.py` draws some hundreds of them, `make soak` 20,000. A trial is named by its kind and a seed.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from accel_trainer.checkpoint import store
from accel_trainer.checkpoint.interop.dcp import DcpDirectory
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, hash_file
from accel_trainer.checkpoint.store import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.weights.weight_files import WeightFiles, save_weights
from accel_trainer.errors import AccelTrainerError
from tests.checkpoint.crash_job import SavedRun
from tests.checkpoint.small_run import SmallRun

ACCELERATE = Path(__file__).parent / "fixtures" / "accelerate_1_15"
OUTCOMES = ("loaded equal", "loaded", "refused", "fallen back")

TOKENS = [
    *(b"null", b"-1", b"1e999", b"NaN", b"18446744073709551616", b"9" * 400, b"../x"),
    *(b"[", b"]", b"{", b"}", b"[" * 3000, b'"', b"\\u0000"),
    *(b'{"$tensor": "x"}', b'{"$pairs": 3}', b'{"$tuple": null}', b'{"$float": "x"}', b'{"$set": [[]]}'),
    *(b"\x00" * 9, b"\xff" * 9, b"\x80\x02", b"cos\nsystem\n", b"c__builtin__\nbytearray\n", b"R", b"."),
    *(b"PK\x03\x04", b"PK\x05\x06"),
]
VALUES = [
    *(None, True, -1, 0, 2**70, 1e300, "", "x", "../x"),
    *([], {}, [[]], {"$tensor": "x"}, {"$pairs": [[[], 1]]}, [1, 2]),
]


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return other bytes: flipped, cut, spliced, repeated, or with something in them that a parser may stumble over."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place, end = (sorted(draw.randrange(len(data) + 1) for _ in range(2))) if data else (0, 0)
        match draw.randrange(7):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place:end]
            case 3:
                data[place:place] = data[place:end][: 1 << 16]
            case 4:
                token = draw.choice(TOKENS)
                data[place : place + len(token) * draw.randrange(2)] = token
            case 5:
                data[place:end] = draw.randbytes(min(end - place, 64))
            case _:
                data[place : place + 1] = bytes([draw.randrange(256)])
    return bytes(data)


def change_json(content: bytes, draw: random.Random) -> bytes:
    """Return JSON with another value, or one key less, somewhere."""
    root = [json.loads(content)]
    node: Any = root
    while True:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        below = node[key]
        if isinstance(below, dict | list) and below and draw.random() < 0.8:
            node = below
        elif isinstance(node, dict) and draw.random() < 0.3:
            del node[key]
            break
        else:
            node[key] = draw.choice(VALUES)
            break
    return json.dumps(root[0]).encode()


class Mutated:
    """A checkpoint of one kind, of which a file can be changed, and which is whole again before the next trial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = self.build()
        self.files = {
            path.relative_to(self.directory): path.read_bytes() for path in self.directory.rglob("*") if path.is_file()
        }

    def build(self) -> Path:
        """Write the checkpoint; return its directory."""
        raise NotImplementedError

    def load(self) -> str:
        """Load it; return the outcome."""
        raise NotImplementedError

    def restore(self) -> None:
        """Bring it back as it was built."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for name, content in self.files.items():
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_bytes(content)

    def change(self, name: Path, content: bytes, draw: random.Random) -> None:
        """Put other content into a file."""
        (self.directory / name).write_bytes(content)

    def run(self, name: Path, content: bytes, draw: random.Random) -> str:
        """Load it with other content in a file; return the outcome. Any error that is not of ours is raised."""
        self.restore()
        self.change(name, content, draw)
        try:
            return self.load()
        except AccelTrainerError as error:
            return "refused" if len(str(error)) < 5000 else f"a message of {len(str(error))} characters"


class OwnState(Mutated):
    """Of `save_state`, the newest of two: contents are held to their checksums."""

    is_forged = False

    def build(self) -> Path:
        self.runs = SavedRun(self.folder, total_limit=None)
        for step in range(2):
            self.runs.fill(step)
            self.runs.accelerator.save_state()
        return self.folder / "checkpoints" / "checkpoint_1"

    def restore(self) -> None:
        for bad in self.directory.parent.glob("_bad-*"):
            shutil.rmtree(bad)
        super().restore()

    def load(self) -> str:
        if not self.is_forged:
            self.runs.fill(7)
        self.runs.accelerator.load_state()
        if self.is_forged:
            return "loaded" if self.directory.exists() else "fallen back"
        return ("fallen back", "loaded equal")[self.runs.step_held()]


class ForgedState(OwnState):
    """The same with checksums that fit: its author is of ill will."""

    is_forged = True

    def build(self) -> Path:
        directory = super().build()
        # Mistakes of registered objects are their own.
        self.runs.load_state_dict = lambda state: None  # type: ignore[method-assign]
        return directory

    def change(self, name: Path, content: bytes, draw: random.Random) -> None:
        path = self.directory / name
        path.write_bytes(content)
        text = self.files[Path(MANIFEST_NAME)]
        if name.name == MANIFEST_NAME:
            text = content
        elif name.name != MARKER_NAME:
            entry, data = hash_file(path), json.loads(text)
            data["files"][name.as_posix()] = {"bytes": entry.num_bytes, "checksum": entry.checksum}
            text = json.dumps(data).encode()
        (self.directory / MANIFEST_NAME).write_bytes(text)
        if name.name != MARKER_NAME:
            (self.directory / MARKER_NAME).write_bytes(Manifest.digest(text))


class AccelerateState(Mutated):
    """Of accelerate's own `save_state`: torch's files, safetensors, and no checksums."""

    def build(self) -> Path:
        self.runs = SmallRun()
        self.runs.counter.load_state_dict = lambda state: None  # type: ignore[method-assign]  # its mistakes are its own
        return Path(shutil.copytree(ACCELERATE, self.folder / "theirs"))

    def load(self) -> str:
        self.runs.accelerator.load_state(self.directory)
        return "loaded"


class DcpState(Mutated):
    """Of torch.distributed.checkpoint: `.metadata`, and torch's files within files."""

    def build(self) -> Path:
        state = {"model": {"a": torch.ones(3), "b": torch.zeros(2, 2)}, "optimizer": {"groups": [{"lr": 1}]}, "step": 7}
        dcp.save(state, checkpoint_id=self.folder / "dcp", no_dist=True)
        return self.folder / "dcp"

    def load(self) -> str:
        stored = DcpDirectory(self.directory)
        for name in stored:
            stored[name].sum()
        stored.nested("optimizer")
        return "loaded"


class Weights(Mutated):
    """An index with safetensors files."""

    def build(self) -> Path:
        save_weights({name: torch.ones(64) for name in "abc"}, self.folder / "model", 300)
        return self.folder / "model"

    def load(self) -> str:
        weights = WeightFiles(self.directory)
        for name in weights:
            weights[name].sum()
        return "loaded"


class Lock(Mutated):
    """The file of a lock that nobody holds."""

    def build(self) -> Path:
        (self.folder / "run").mkdir()
        held = DirectoryLock.take(self.folder / "run" / LOCK_NAME)
        content = held.path.read_bytes().replace(b'"pid": ', b'"pid": 4194')  # of nobody: above the largest
        held.release()
        held.path.write_bytes(content)
        return self.folder / "run"

    def load(self) -> str:
        before = (self.directory / LOCK_NAME).read_bytes()
        # Of another machine, it is waited for.
        with mock.patch.multiple(store, STALE_SECONDS=0.0, SILENCE_SECONDS=0.0):
            DirectoryLock.take(self.directory / LOCK_NAME).release()
        kept = [path.read_bytes() for path in self.directory.glob("_bad-*")]
        assert kept in ([], [before])
        return "loaded"


KINDS: dict[str, Callable[[Path], Mutated]] = {
    "own": OwnState,
    "forged": ForgedState,
    "accelerate": AccelerateState,
    "dcp": DcpState,
    "weights": Weights,
    "lock": Lock,
}


@functools.cache
def _built(kind: str, folder: Path) -> Mutated:
    place = folder / kind
    place.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KINDS[kind](place)


def trial(kind: str, seed: int, folder: Path) -> str:
    """Change a file of a checkpoint of a kind as `seed` draws it, load it, and return one of OUTCOMES."""
    draw, mutated = random.Random(f"{kind} {seed}"), _built(kind, folder)
    name = draw.choice(sorted(mutated.files))
    content = mutated.files[name]
    is_json = name.suffix == ".json" and draw.random() < 0.6
    changed = change_json(content, draw) if is_json else change_bytes(content, draw)
    return check_outcome(mutated.run(name, changed, draw), kind, f"{name}, seed {seed}")


def check_outcome(outcome: str, kind: str, what: str) -> str:
    assert outcome in OUTCOMES, f"{kind}: {outcome!r} of {what}"
    assert outcome != "loaded" or kind != "own", f"{what} was loaded, and is not what was saved"
    return outcome


def replaced(kind: str, index: int, content: bytes, folder: Path) -> str:
    """Put `content` into one of the files of a checkpoint of a kind, load it, and return one of OUTCOMES."""
    mutated = _built(kind, folder)
    name = sorted(mutated.files)[index % len(mutated.files)]
    return check_outcome(mutated.run(name, content, random.Random(0)), kind, f"{name} of {content!r}")


def limit_memory(num_bytes: int) -> None:
    """Have whatever asks for more than so much beyond what is in use get a MemoryError."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))
