"""Two ranks on one card, over gloo: whether the arithmetic of layouts on the device is that of one process.

nccl refuses two ranks of one card. Each rank is told that it is alone on its node, so that both take device 0.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from workload import build_loader, build_model, emit, parse, parser

_LIMIT_SECONDS = 240


def _train(options: Namespace, strategy: str) -> dict[str, Any]:
    """Train two epochs of six updates of two micro-batches, the second on what was loaded; return gradient norms."""
    from accel_trainer import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs, ParallelismConfig
    from accel_trainer.utils import TorchContextParallelConfig

    layout: dict[str, Any] = {"strategy": strategy}
    if strategy == "cp":
        # torch's ring gathers keys into one tensor otherwise, which of a card's memory is a segmentation fault, too.
        way = "allgather" if options.device == "cpu" else "alltoall"
        layout = {"parallelism_config": ParallelismConfig(cp_size=2, cp_handler=TorchContextParallelConfig(way))}
    accelerator = Accelerator(
        cpu=options.device == "cpu",
        **layout,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[] if strategy == "single" else [InitProcessGroupKwargs(backend="gloo")],
    )
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, build_loader(options, 12))
    norms = []
    folder = Path(os.environ["KIT_FOLDER"], "state")
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
        # Not gathered: of tensors on a card, gloo's coalesced all-gather is a segmentation fault (torch#152645).
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    return {"norms": norms}


def _rank(options: Namespace, strategy: str, environ: Mapping[str, str], answer: Connection | None) -> None:
    os.environ |= environ
    faulthandler.enable()
    torch.set_num_threads(1)
    found = _train(options, strategy)
    if answer is not None:
        answer.send(found)


def _start(options: Namespace, strategy: str, world_size: int) -> dict[str, Any]:
    """Run the ranks as processes of their own; return what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A fork takes 0.1 s where an import takes 5, but one of a process that has asked for its devices cannot use CUDA.
    context = multiprocessing.get_context("fork" if options.device == "cpu" else "spawn")
    if options.device == "cpu":
        for name in ("accel_trainer.accelerator", "transformers.models.llama.modeling_llama"):
            importlib.import_module(name)
    receiver, sender = context.Pipe(duplex=False)
    found, ranks = None, []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            environ = {"KIT_FOLDER": folder}
            if world_size > 1:
                alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
                environ |= alone | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
            ranks.append(context.Process(target=_rank, args=(options, strategy, environ, None if rank else sender)))
            ranks[-1].start()
        sender.close()  # so that the end of rank 0 is the end of what can be received
        with suppress(EOFError):
            found = receiver.recv() if receiver.poll(_LIMIT_SECONDS) else None
        for process in ranks:
            process.join(timeout=20 if found else 1)
            process.kill()
            process.join()
    if found is None or any(process.exitcode for process in ranks):
        raise SystemExit(f"{strategy} on {world_size} rank(s) ended with {[each.exitcode for each in ranks]}")
    return found


def main() -> None:
    options = parse(parser(__doc__))
    # It is about arithmetic. Slices are of 64 tokens.
    options.length, options.batch, options.tiny = 120, 4, True
    alone = _start(options, "single", 1)
    for strategy in ("ddp", "fsdp2", "cp"):
        both = _start(options, strategy, 2)
        apart = max(abs(a - b) / b for a, b in zip(both["norms"], alone["norms"], strict=True))
        emit(what="two ranks", strategy=strategy, norms_apart=apart, holds=apart < 1e-3)


if __name__ == "__main__":
    main()
