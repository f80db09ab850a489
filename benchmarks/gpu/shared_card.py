"""Two ranks on one card, over gloo: whether the arithmetic of DDP and FSDP2 on the device is that of one process.

nccl refuses two ranks of one card. Each rank is told that it is alone on its node, so that both take device 0.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from workload import build_loader, build_model, emit, parse, parser

_LIMIT_SECONDS = 240


def _train(options: Namespace, strategy: str) -> dict[str, Any]:
    """Train six updates of two micro-batches; return the norms of the gradients, and a sum over the loaded weights."""
    from accel_trainer import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs

    accelerator = Accelerator(
        cpu=options.device == "cpu",
        strategy=strategy,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[] if strategy == "single" else [InitProcessGroupKwargs(backend="gloo")],
    )
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, build_loader(options, 12))
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    folder = Path(os.environ["KIT_FOLDER"], "state")
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    weights = accelerator.get_state_dict(model)
    return {"norms": norms, "weights": float(sum(value.double().abs().sum() for value in weights.values()))}


def _start(options: Namespace, strategy: str, world_size: int) -> dict[str, Any]:
    """Run the ranks as processes of their own; return what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--device", options.device, "--tiny", "--rank-of", strategy]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            environ = {**os.environ, "KIT_FOLDER": folder, "OMP_NUM_THREADS": "1"}
            if world_size > 1:
                alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
                environ |= alone | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [rank.communicate(timeout=_LIMIT_SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{strategy} on {world_size} rank(s) ended with {[rank.returncode for rank in ranks]}")
    return json.loads(outputs[0].strip().splitlines()[-1])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rank-of", help="a strategy: be one of its ranks")
    options = parse(made)
    options.length, options.batch, options.tiny = 32, 4, True  # it is about arithmetic
    if options.rank_of:
        print(json.dumps(_train(options, options.rank_of)))
        return
    alone = _start(options, "single", 1)
    for strategy in ("ddp", "fsdp2"):
        both = _start(options, strategy, 2)
        apart = max(abs(a - b) / b for a, b in zip(both["norms"], alone["norms"], strict=True))
        weights_apart = abs(both["weights"] - alone["weights"]) / alone["weights"]
        emit(what="two ranks", strategy=strategy, norms_apart=apart, weights_apart=weights_apart, agrees=apart < 1e-3)


if __name__ == "__main__":
    main()
