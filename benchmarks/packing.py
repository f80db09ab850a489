"""Packed rows of real text beside padded batches: how full they are, tokens a second, and what packing costs.

In processor time of one thread: nothing here waits.
"""

from __future__ import annotations

import ast
import sysconfig
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from timing import Row, interleave, ratio_row
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel_trainer import Accelerator
from accel_trainer.data_loader import PackingCollator, pack_dataset

MAX_LENGTH, BATCH_SIZE = 512, 4
NUM_STEPS = 4


def read_documents() -> list[list[int]]:
    """Return the functions, classes and statements of the standard library's modules, as bytes, cut to a row."""
    documents = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if (source := "".join(lines[node.lineno - 1 : node.end_lineno])).strip():
                documents.append(list(source.encode()[:MAX_LENGTH]))
    return documents


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest document."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))


def _computed(batches: Iterable[dict[str, torch.Tensor]]) -> int:
    return sum(batch["input_ids"].numel() for batch in batches)


def _train(loader: DataLoader) -> tuple[Callable[[], None], int, int]:
    """Return a function that trains some steps, and the tokens of these that are computed."""
    accelerator, model = Accelerator(cpu=True), _model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    batches = [batch for _, batch in zip(range(NUM_STEPS), loader, strict=False)]

    def run() -> None:
        for batch in batches:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()

    return run, _computed(batches)


def measure(rounds: int) -> list[Row]:
    """Compare computed with real tokens, the time of a real one with what that promises, and packing with reading."""
    torch.set_num_threads(1)
    documents = read_documents()
    table = Dataset.from_dict({"input_ids": documents})
    num_tokens = sum(map(len, documents))

    def padded() -> DataLoader:
        return DataLoader(table, BATCH_SIZE, shuffle=True, collate_fn=pad)

    def packed(strategy: str = "bfd") -> DataLoader:
        rows = pack_dataset(table, MAX_LENGTH, strategy)
        return DataLoader(rows, BATCH_SIZE, shuffle=True, collate_fn=PackingCollator())

    computed = {"padded": _computed(padded())} | {name: _computed(packed(name)) for name in ("bfd", "wrapped")}
    share = {name: num_tokens / number for name, number in computed.items()}
    rows = []
    for name, bound in (("bfd", 1 / 0.97), ("wrapped", 1 / 0.97), ("padded", None)):
        rows.append(ratio_row(f"computed tokens, {name}", "real tokens", [1 / share[name]], [1.0], bound))

    runs = {"packed": _train(packed()), "padded": _train(padded())}
    seconds = interleave({name: run for name, (run, _) in runs.items()}, rounds, clock=time.process_time)
    by_token = {
        name: [each / (runs[name][1] * share["bfd" if name == "packed" else "padded"]) for each in seconds[name]]
        for name in runs
    }
    promised = [each * share["padded"] / share["bfd"] for each in by_token["padded"]]
    rows.append(
        ratio_row("a real token, packed with bfd", "padded, by computed tokens", by_token["packed"], promised, 1 / 0.9)
    )
    rows.append(ratio_row("the same", "padded", by_token["packed"], by_token["padded"], None))

    def read(loader: DataLoader) -> Callable[[], None]:
        def run() -> None:
            for _ in loader:
                pass

        return run

    sides = {"plan": lambda: pack_dataset(table, MAX_LENGTH), "padded": read(padded()), "packed": read(packed())}
    times = interleave(sides, rounds, clock=time.process_time)
    rows.append(ratio_row("packing", "a pass over padded batches", times["plan"], times["padded"], 0.03))
    rows.append(
        ratio_row("a pass over packed rows", "a pass over padded batches", times["packed"], times["padded"], None)
    )
    return rows
