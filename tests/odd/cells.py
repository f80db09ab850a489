"""Run cells of the table on ranks, and say of each: equal, refused, or what is wrong."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.odd import THINGS
from tests.odd.loop import COLUMNS, Seen, find_difference, see
from tests.ranks import RankFailure, preload, run_ranks
from tests.stand_in import ALONE

preload("accel_trainer.accelerator", "accel_trainer.trainer", "deepspeed", "torch._dynamo")

CHUNK = 20
"""Things of one job: a rank costs seconds where it imports DeepSpeed or the Trainer."""


class Cell(NamedTuple):
    """What became of a thing on a column."""

    outcome: str
    """equal, refused, left or defect."""
    words: str = ""


def check(names: Sequence[str], column: str) -> Iterator[tuple[str, Cell]]:
    """Yield what becomes of things on a column's ranks beside the plain loop."""
    expected = plain(tuple(names), COLUMNS[column].num_readers)
    gaps = {name: words for name in names if (words := THINGS[name].gap(column))}
    yield from ((name, Cell("left", words)) for name, words in gaps.items())
    for name, seen in _run([name for name in names if name not in gaps], column):
        yield name, _judge(name, column, expected[name], seen)


@functools.cache
def plain(names: tuple[str, ...], num_readers: int) -> dict[str, Seen]:
    """Return what things come to in plain PyTorch, where rows are shared out to as many ranks."""
    return {name: seen for name, [seen] in _run(names, num_readers)}


def _run(names: Sequence[str], column: str | int) -> Iterator[tuple[str, list[Seen]]]:
    """Yield what each thing has come to on each rank."""
    left = list(names)
    world_size = 1 if isinstance(column, int) else COLUMNS[column].world_size
    while left:
        chunk = left[:CHUNK]
        with tempfile.TemporaryDirectory() as folder:
            died = ""
            try:
                env = {
                    **(ALONE if world_size == 1 else {}),
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "ACCEL_TRAINER_LOG_LEVEL": "ERROR",
                }
                run_ranks(see_all, world_size, chunk, column, folder, env=env, timeout=60 + 8 * len(chunk))
            except RankFailure as failed:
                died = str(failed)[-3000:]
            seen = [_read(Path(folder, f"{rank}")) for rank in range(world_size)]
        done = [name for name in chunk if all(name in each for each in seen)]
        for name in done:
            yield name, [each[name] for each in seen]
        if died and (missing := [name for name in chunk if name not in done]):
            yield missing[0], [each.get(missing[0], Seen(error=died)) for each in seen]
            done.append(missing[0])
        left = [name for name in left if name not in done]


def see_all(names: Sequence[str], column: str | int, folder: str) -> None:
    """Run things on this rank until one ends what the others could build on; leave what is seen in a file."""
    with Path(folder, os.environ.get("RANK", "0")).open("wb") as file:
        for name in names:
            seen = see(name, column)
            pickle.dump((name, seen), file)
            file.flush()
            if not isinstance(column, int) and (THINGS[name].ends or seen.error and not _is_known(name, column, seen)):
                break


def _is_known(name: str, column: str, seen: Seen) -> bool:
    """Return whether a thing has failed, in the user's own code mostly, with the words that the table has for it."""
    return THINGS[name].is_refusal(column, f"{seen.refused}{seen.error[-600:]}")


def _read(path: Path) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    name, seen = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                found[name] = seen
    return found


def _judge(name: str, column: str, expected: Seen, seen: Sequence[Seen]) -> Cell:
    """Compare what ranks have come to with the table."""
    if expected.error:
        return Cell("defect", f"the plain loop fails: {expected.error[-600:]}")
    wanted = THINGS[name].refusal(column)
    # On all ranks: none waits for another in a collective. What is refused says the same on each of them, or one has
    # failed and the others say so.
    is_alike = THINGS[name].ends or len({each.refused for each in seen}) == 1
    if is_alike and all(_is_known(name, column, each) for each in seen):
        return Cell("refused", seen[0].refused)
    for each in seen:
        if each.error or each.refused:
            return Cell("defect", f"is refused: {each.refused}" if each.refused else each.error[-1200:])
    # Where ranks hold shards, rank 0 gathers the weights.
    sharded = column.startswith(("fsdp2", "hsdp", "tp", "zero"))
    found = (find_difference(expected, each, not sharded or rank == 0) for rank, each in enumerate(seen))
    difference = next(filter(None, found), "")
    if wanted and not difference:
        return Cell("defect", "is as the plain loop, and the table says that it is refused")
    return Cell("defect" if difference else "equal", difference)
