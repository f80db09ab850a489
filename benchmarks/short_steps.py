"""Trainer.train with steps of 3 ms, where every call around the model shows, against a plain loop.

    python benchmarks/short_steps.py ROUNDS             # the rows, as JSON on the last line; run.py calls it
    python benchmarks/short_steps.py --side NAME ACCUMULATION UPDATES    # one side: trains for every line that it reads

Each side runs in a process of its own, with one thread, and the sides take turns: nothing that one of them leaves in
memory, in caches or in the garbage collector's generations is measured with the other.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from timing import Row, interleave, ratio_row
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator

LOG_EVERY = 100
UPDATES = {1: 600, 4: 150}
"""By the number of micro-batches of an update."""
BOUNDS = {1: 1.12, 4: 1.06}


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def _data(num_batches: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (num_batches * 4, 16))]


def train_plainly(accumulation: int, updates: int) -> float:
    """Train with a loop as one would write it; return its seconds."""
    data, model = _data(accumulation * updates), _llama()
    begin = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (updates - step) / updates))
    batches = iter(DataLoader(data, batch_size=4, shuffle=True, collate_fn=default_data_collator))
    total = torch.tensor(0.0)
    model.train()
    for step in range(1, updates + 1):
        for _ in range(accumulation):
            loss = model(**next(batches)).loss / accumulation
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            print({"loss": total.item() / LOG_EVERY, "grad_norm": norm.item(), "rate": schedule.get_last_lr()[0]})
            total.zero_()
    return time.perf_counter() - begin


def train_with(module: Any, accumulation: int, updates: int) -> float:
    """Train with a module's Trainer; return the seconds of train()."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = module.TrainingArguments(
            output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=4, gradient_accumulation_steps=accumulation, num_train_epochs=1,
            learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1.0, logging_steps=LOG_EVERY,
        )  # fmt: skip
        trainer = module.Trainer(model=_llama(), args=arguments, train_dataset=_data(accumulation * updates))
        begin = time.perf_counter()
        trainer.train()
        return time.perf_counter() - begin


def serve(side: str, accumulation: int, updates: int) -> None:
    """Train once unmeasured, then once for every line of the standard input; print the seconds of each."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    module: Any = importlib.import_module({"ours": "accel_trainer"}.get(side, "transformers"))

    def train(updates: int) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return (
                train_plainly(accumulation, updates) if side == "plain" else train_with(module, accumulation, updates)
            )

    train(10)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(train(updates), flush=True)


class Side:
    """A process that trains when it is called."""

    def __init__(self, name: str, accumulation: int) -> None:
        command = [sys.executable, __file__, "--side", name, str(accumulation), str(UPDATES[accumulation])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.seconds: list[float] = []
        assert self._read() == "ready"

    def __call__(self) -> None:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        self.seconds.append(float(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def rows(rounds: int, accumulation: int, peer: bool) -> list[Row]:
    """Compare train() with a plain loop, and with upstream's where that can run."""
    names = ["plain", "ours", *(["upstream"] if peer else [])]
    sides = {name: Side(name, accumulation) for name in names}
    try:
        interleave(sides, rounds)
    finally:
        for side in sides.values():
            side.close()
    seconds = {name: side.seconds[1:] for name, side in sides.items()}  # the first call is not measured
    what = "Trainer.train (short steps)" + ("" if accumulation == 1 else f", {accumulation} a window")
    found = [ratio_row(what, "plain PyTorch loop", seconds["ours"], seconds["plain"], BOUNDS[accumulation])]
    if peer:
        found.append(ratio_row(what, "upstream's Trainer", seconds["ours"], seconds["upstream"], None))
    return found


def main() -> None:
    if sys.argv[1] == "--side":
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    peer = importlib.util.find_spec("accelerate") is not None
    measured = [row for accumulation in UPDATES for row in rows(int(sys.argv[1]), accumulation, peer)]
    print(json.dumps([row.to_dict() for row in measured]))


if __name__ == "__main__":
    main()
