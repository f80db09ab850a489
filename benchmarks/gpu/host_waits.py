"""How often an update makes the host wait for the device, and on which lines; on CUDA only, where torch can tell.

By `torch.cuda.set_sync_debug_mode`, which knows values that are read and copies that block. On a CPU the loops run, and
nothing is counted: tests/accelerator/test_waits_per_step.py counts there.
"""

from __future__ import annotations

import os
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from workload import build_loader, build_model, emit, parse, parser

_WARM, _COUNTED = 3, 4
_OURS = ("accel_trainer", "integrations")
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _place() -> str:
    """Return the innermost line outside of torch, which made the device's work be waited for."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, warnings.__file__)):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"


@contextmanager
def _counting(options: Namespace, found: Counter[str]) -> Iterator[None]:
    if options.device == "cpu":
        yield
        return

    def note(message: Any, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _train(options: Namespace, precision: str, found: Counter[str]) -> None:
    """Train natively in windows of two micro-batches; count in all updates but the first."""
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision=precision, gradient_accumulation_steps=2)
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, build_loader(options, 2 * (_WARM + _COUNTED)))
    counting = _counting(options, found)
    for index, batch in enumerate(loader):
        if index == 2 * _WARM:
            counting.__enter__()
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    counting.__exit__(None, None, None)


def main() -> None:
    options = parse(parser(__doc__))
    options.length, options.batch, options.tiny = 32, 2, True  # what waits does not depend on the size
    for precision in ("no", "bf16") if options.device == "cpu" else ("no", "bf16", "fp16"):
        found: Counter[str] = Counter()
        _train(options, precision, found)
        ours = sum(count for line, count in found.items() if any(name in line for name in _OURS))
        waits = None if options.device == "cpu" else ours / _COUNTED
        bound = 1 if precision == "fp16" else 0  # whether the update was applied
        holds = None if waits is None else waits <= bound
        emit(
            what="waits",
            precision=precision,
            per_update=waits,
            of_others=None if waits is None else sum(found.values()) / _COUNTED - waits,
            bound=bound,
            holds=holds,
            lines=dict(found.most_common(8)),
        )


if __name__ == "__main__":
    main()
