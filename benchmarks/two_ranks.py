"""Benchmarks that run.py starts on two processes: rank 0 prints the rows as JSON on its last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from timing import Row


def print_measured(rows: Callable[[int], list[Row]]) -> None:
    """Measure with one thread for each rank, as many rounds as the command line says, and print. Collective."""
    torch.set_num_threads(1)
    measured = rows(int(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps([row.to_dict() for row in measured]), flush=True)
    dist.barrier()
