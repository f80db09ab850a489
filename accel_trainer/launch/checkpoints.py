"""`accel-trainer ckpt` and `merge-weights`: list, verify, prune, copy, adopt and export. The last two import torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from accel_trainer.checkpoint.manifest import MANIFEST_NAME, Manifest, check_checkpoint
from accel_trainer.checkpoint.object_store import ObjectStore, is_copy, is_uri, shown
from accel_trainer.checkpoint.store import LOCK_NAME, DirectoryLock, is_complete, numbered_checkpoints, retire, sweep
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, ConfigError
from accel_trainer.launch.cli import add_option, command_parser
from accel_trainer.runtime.cores import usable_cores

_PREFIXES = ("checkpoint_", "checkpoint-")
"""Of `save_state` and of the Trainer."""
_SHARD_SIZE = "10GB"


def run_ckpt(words: Sequence[str]) -> int:
    """Run `accel-trainer ckpt` and return its exit code: 1 when a checkpoint is not good."""
    parser = ckpt_parser()
    arguments = parser.parse_args(words)
    if arguments.command == "export":
        return export(arguments)
    if arguments.command == "adopt":
        return _adopt(arguments.directory, takes_values=arguments.values)
    if arguments.command == "prune" and arguments.keep < 1:
        parser.error(f"--keep {arguments.keep} would leave no checkpoint; keep 1 or more")
    if arguments.command == "copy":
        return _copy(arguments.directory, arguments.target)
    if is_uri(arguments.directory):
        return _run_in_store(arguments)
    directory = Path(arguments.directory)
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory.absolute()} is no directory; give one with checkpoints")
    if arguments.command == "prune":
        return _prune(directory, arguments.keep)
    return _list(directory) if arguments.command == "list" else _verify(directory, "size" if arguments.size else "full")


def _verify(directory: Path, mode: str) -> int:
    flaws = {path: _flaw(path, mode) for path in _find(directory)}
    for path, flaw in flaws.items():
        print(f"{path.name}  good" if flaw is None else flaw)
    return int(any(flaws.values()))


def ckpt_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer ckpt`."""
    parser = command_parser("ckpt", "Checkpoints on disk.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="print the checkpoints of a directory", allow_abbrev=False)
    verifying = commands.add_parser("verify", help="compare files with their checksums", allow_abbrev=False)
    verifying.add_argument("--size", action="store_true", help="compare lengths only")
    pruning = commands.add_parser("prune", help="remove all but the newest complete ones", allow_abbrev=False)
    pruning.add_argument("--keep", type=int, required=True, metavar="N", help="how many stay, at least 1")
    for command in (listing, verifying, pruning):
        command.add_argument("directory", help="of checkpoints, or one checkpoint; or the address of a run's store")
    copying = commands.add_parser("copy", help="copy a checkpoint to an object store, or from one", allow_abbrev=False)
    copying.add_argument("directory", metavar="CHECKPOINT", help="a directory, or an address")
    copying.add_argument("target", metavar="TARGET", help="the directory, or the address, of a run's checkpoints")
    adopting = commands.add_parser(
        "adopt", help="take weights that were saved anew in a checkpoint for its own", allow_abbrev=False
    )
    adopting.add_argument("directory", type=Path, metavar="PATH", help="a checkpoint-N of a Trainer")
    text = "also where the values alone are others: damage looks like that, too"
    adopting.add_argument("--values", action="store_true", help=text)
    exporting = commands.add_parser(
        "export", help="write a checkpoint's weights, or all of it, for others", allow_abbrev=False
    )
    _add_export_options(exporting)
    exporting.add_argument(
        "--format",
        default="weights",
        choices=("weights", "fsdp-full", "fsdp-sharded"),
        help="weights for from_pretrained (the default), or all that transformers' own Trainer resumes from under FSDP "
        "with FULL_STATE_DICT or SHARDED_STATE_DICT",
    )
    return parser


def run_merge_weights(words: Sequence[str]) -> int:
    """Run `accel-trainer merge-weights IN OUT`."""
    return export(merge_weights_parser().parse_args(words))


def merge_weights_parser() -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer merge-weights`."""
    parser = command_parser(
        "merge-weights",
        "Write the weights of a checkpoint as safetensors that from_pretrained reads: of save_state, of "
        "torch.distributed.checkpoint, or in shards of Hugging Face accelerate and its Trainer.",
    )
    _add_export_options(parser)
    parser.set_defaults(format="weights")
    return parser


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN", help="a checkpoint, or a directory of sharded weights")
    parser.add_argument("target", type=Path, metavar="OUT", help="the directory to write to")
    parser.add_argument("--unit", type=int, default=0, metavar="N", help="which of several models; default: 0")
    add_option(parser, "max_shard_size", default=_SHARD_SIZE, metavar="SIZE", help="of a file; default: 10GB")
    text = "write pytorch_model.bin, a pickle, instead of safetensors"
    add_option(parser, "unsafe_serialization", action="store_true", help=text)
    text = "compare files with their checksums"
    add_option(parser, "verify", default="full", choices=("full", "size", "off"), help=text)


def export(arguments: argparse.Namespace) -> int:
    """Write the weights or the state that arguments of the command line name, and print the files; return 0."""
    from accel_trainer.checkpoint.interop.huggingface import export_hf_fsdp, export_weights

    given: dict[str, Any] = {"unit": arguments.unit, "verify": arguments.verify}
    if arguments.format == "weights":
        given |= {"max_shard_size": arguments.max_shard_size, "safe_serialization": not arguments.unsafe_serialization}
        names = export_weights(arguments.source, arguments.target, **given)
    else:
        options = {"max_shard_size": _SHARD_SIZE, "unsafe_serialization": False}
        if asked := [f"--{name}" for name, default in options.items() if getattr(arguments, name) != default]:
            raise ConfigError(f"{', '.join(asked)}: of --format weights, and this is {arguments.format}; leave it out")
        is_sharded = arguments.format == "fsdp-sharded"
        names = export_hf_fsdp(arguments.source, arguments.target, is_sharded=is_sharded, **given)
    size = sum((arguments.target / name).stat().st_size for name in names)
    print(f"{arguments.target}: {len(names)} file(s), {size / 2**20:,.1f} MiB")
    return 0


def _find(directory: Path) -> list[Path]:
    """Return the checkpoint that `directory` is, or those in it: numbered ones by number, then others by name."""
    if (directory / MANIFEST_NAME).is_file():
        return [directory]
    numbered = [path for prefix in _PREFIXES for _, path in numbered_checkpoints(directory, prefix)]
    others = [path for path in sorted(directory.iterdir()) if (path / MANIFEST_NAME).is_file() and path not in numbered]
    if not numbered and not others:
        raise CheckpointNotFoundError(f"no checkpoint in {directory.absolute()}; give a directory that has some")
    return numbered + others


def _flaw(path: Path, mode: str) -> str | None:
    """Return why a checkpoint is not good, or None."""
    try:
        check_checkpoint(path, mode, usable_cores())
    except (AccelTrainerError, OSError) as error:
        return str(error)
    return None


def _adopt(path: Path, *, takes_values: bool) -> int:
    from accel_trainer.checkpoint.adoption import adopt_weights

    changed = adopt_weights(path, takes_values=takes_values)
    print(f"{path.name}: {', '.join(changed) or 'nothing'} adopted")
    return 0


def _copy(source: str, target: str) -> int:
    place, _, name = source.rstrip("/").rpartition("/")
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None or is_uri(source) == is_uri(target):
        raise ConfigError(
            f"copy {shown(source)} {shown(target)}: one of them is to be an address (s3://bucket/run) and the other a "
            f"directory, and the first to name one checkpoint, {_PREFIXES[0]}N or {_PREFIXES[1]}N"
        )
    if is_uri(source):
        _fetch(ObjectStore(place, prefix), name, Path(target))
    else:
        ObjectStore(target, prefix, job="accel-trainer ckpt copy").put(Path(source))
    print(f"{name} copied to {shown(target)}")
    return 0


def _fetch(store: ObjectStore, name: str, directory: Path) -> None:
    path, manifest = directory / name, store.manifest(name)
    lock = DirectoryLock.take(directory / LOCK_NAME)
    try:
        is_there = is_copy(path, manifest) and not Manifest.read(path).node_save  # a node's part is not all of it
        if not is_there and os.path.lexists(path):
            raise ConfigError(
                f"{path.absolute()} is there already, and no copy of {store.uri}/{name}; remove it, or give another "
                "directory"
            )
        if not is_there or _flaw(path, "full") is not None:
            store.fetch(name, directory)
    finally:
        lock.release()


def _run_in_store(arguments: argparse.Namespace) -> int:
    """List, verify or prune the checkpoints of an object store."""
    stores = [ObjectStore(arguments.directory, prefix) for prefix in _PREFIXES]
    if arguments.command == "prune":
        return _prune_stores(stores, arguments.keep)
    held = [(store, name) for store in stores for name in store.names()]
    if not held:
        raise CheckpointNotFoundError(
            f"{shown(arguments.directory)} has no checkpoints; give the address of a run's store, not that of one "
            "checkpoint in it"
        )
    verifies, flaws = arguments.command == "verify", 0
    for store, name in held:
        try:
            facts = "good" if verifies else _facts(store.manifest(name))
            if verifies:
                store.verify(name, contents=not arguments.size)
        except AccelTrainerError as error:
            flaws += verifies
            facts = f"not good: {error}"
        print(f"{name}  {facts}")
    return int(flaws > 0)


def _prune_stores(stores: Sequence[ObjectStore], keep: int) -> int:
    removed = [name for store in stores for name in store.retire(keep, _best_in_store(store))]
    print("".join(f"removed {name}\n" for name in removed) + f"{len(removed)} removed")
    return 0


def _facts(manifest: Manifest) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    ranks = f"{manifest.world_size} process{'es' if manifest.world_size > 1 else ''}"
    return f"complete, {manifest.num_bytes / 2**20:,.1f} MiB in {len(manifest.files)} files, {ranks}, {versions}"


def _list(directory: Path) -> int:
    for path in _find(directory):
        flaw = _flaw(path, "size")
        if flaw is not None:
            print(f"{path.name}  not good: {flaw}")
            continue
        print(f"{path.name}  {_facts(Manifest.read(path))}")
    return 0


def _newest_and_best(directory: Path, prefix: str) -> list[Path]:
    """Return the newest complete checkpoint, and the one that its Trainer called the best."""
    for _, newest in reversed(numbered_checkpoints(directory, prefix)):
        if is_complete(newest):
            return [newest, *(directory / name for name in _best(Manifest.read(newest), prefix))]
    return []


def _best_in_store(store: ObjectStore) -> list[str]:
    return [best for _, newest in islice(store.complete(store.names()), 1) for best in _best(newest, store.prefix)]


def _best(newest: Manifest, prefix: str) -> list[str]:
    """Return the name of the checkpoint that a Trainer called the best in its newest one, if it did."""
    best = newest.metadata.get("trainer", {}).get("best_step")
    return [] if best is None else [f"{prefix}{best}"]


def _prune(directory: Path, keep: int) -> int:
    lock = DirectoryLock.take(directory / LOCK_NAME)
    try:
        sweep(directory)
        removed = [
            path
            for prefix in _PREFIXES
            for path in retire(directory, keep, _newest_and_best(directory, prefix), prefix=prefix)
        ]
    finally:
        lock.release()
    for path in removed:
        print(f"removed {path.name}")
    print(f"{len(removed)} removed, the newest {keep} complete kept")
    return 0
