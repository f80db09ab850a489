"""Interleaved timing, A B A B ...: a machine that slows down slows both. Ratios of medians, never a lone time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

SHORT = 5
"""How many times more rounds a function of a tenth of a second is measured: a median of few of those is noise."""

WAITING = 4 * SHORT
"""The same where two processes wait for each other in it: single rounds differ by a third on a machine of two cores."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio, how much it varied between rounds, and the bound that it should keep."""

    name: str
    against: str
    ratio: float
    lowest: float
    highest: float
    bound: float | None
    rounds: int

    @property
    def verdict(self) -> str:
        """Whether the bound is kept; a row without one only informs."""
        if self.bound is None:
            return ""
        return "ok" if self.ratio <= self.bound else "MISSED"

    def to_dict(self) -> dict[str, object]:
        """Return the row as plain values, to send it from one process to another."""
        return asdict(self)


def interleave(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    between: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Call each function once unmeasured, then all of them in turn `rounds` times; return seconds by name.

    Args:
        between: called before each of them, unmeasured: frees what the last one has left.
        clock: `time.process_time` for a difference that waits for a core would hide; all threads count.
    """
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for index in range(rounds):
        # The order is turned round every time: what comes second finds warmer caches.
        order = list(functions) if index % 2 == 0 else list(functions)[::-1]
        for name in order:
            if between is not None:
                between()
            begin = clock()
            functions[name]()
            seconds[name].append(clock() - begin)
    return seconds


def ratio_row(
    name: str, against: str, ours: list[float], theirs: list[float], bound: float | None, *, scale: float = 1.0
) -> Row:
    """Return the ratio of medians, with the lowest and highest ratio of one round."""
    by_round = [a / b * scale for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ours) / statistics.median(theirs) * scale
    return Row(name, against, ratio, min(by_round), max(by_round), bound, len(ours))


def print_rows(rows: list[Row]) -> None:
    """Print the table."""
    print(f"\n{'what':<34} {'against':<38} {'ratio':>7} {'lowest':>8} {'highest':>8} {'bound':>7} {'rounds':>6}")
    for row in rows:
        bound = f"{row.bound:.2f}" if row.bound is not None else "-"
        print(
            f"{row.name:<34} {row.against:<38} {row.ratio:>7.3f} {row.lowest:>8.3f} {row.highest:>8.3f} {bound:>7} "
            f"{row.rounds:>6}  {row.verdict}"
        )
