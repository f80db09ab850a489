"""Run the table: `python -m tests.odd --only 'tied.*' --on zero3`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.odd import THINGS
from tests.odd.cells import check
from tests.odd.loop import COLUMNS, WHOLE


def main() -> None:
    """Run all cells, or those whose names match; print each one that is not as promised, and the counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="a regular expression for names of things, as 'tied.*'")
    parser.add_argument("--after", default="", help="the name of a thing: those that come after it in the table")
    parser.add_argument("--on", default=" ".join(WHOLE), help=f"columns of {' '.join(COLUMNS)}")
    parser.add_argument("--verbose", action="store_true", help="print what is refused, too, with its words")
    options = parser.parse_args()
    left = list(THINGS)[list(THINGS).index(options.after) + 1 if options.after else 0 :]
    names = [name for name in left if re.search(options.only, name)]
    begin, counts, broken = time.monotonic(), Counter[str](), []

    def run(column: str) -> None:
        for name, cell in check(names, column):
            counts[cell.outcome] += 1
            if cell.outcome == "defect":
                broken.append(f"{name}-{column}")
            if cell.outcome == "defect" or options.verbose:
                print(f"{name} on {column}: {cell.outcome}: {cell.words}", flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, options.on.split()))
    print(f"{sum(counts.values())} cells in {time.monotonic() - begin:.0f} s: {dict(counts)}")
    print(f"not as promised: {' '.join(broken) or 'none'}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    # As tests/conftest.py does: DeepSpeed compiles there.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))
    main()
