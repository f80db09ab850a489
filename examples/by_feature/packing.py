"""Packing: documents of many lengths in rows of one, which see nothing of each other; hardly a token is padding.

    python examples/by_feature/packing.py
    accel-trainer launch --cpu --num_processes 2 examples/by_feature/packing.py

A Trainer does the same with `TrainingArguments(packing=True, max_length=512)`.
"""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import torch
from digits import options_parser
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accel_trainer import Accelerator, set_seed
from accel_trainer.data_loader import PackingCollator, pack_dataset

MAX_LENGTH = 512


def read_documents() -> list[dict[str, list[int]]]:
    """Return the docstrings of some packages of Python's standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(path for name in ("email", "json", "logging") for path in (folder / name).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                documents.append({"input_ids": list(text.encode()[:MAX_LENGTH])})
    return documents


def padded_share(documents: list[dict[str, list[int]]], batch_size: int) -> float:
    """Return the share of real tokens in batches that are padded to their longest document."""
    lengths = torch.tensor([len(document["input_ids"]) for document in documents])
    batches = lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))].split(batch_size)
    return lengths.sum().item() / sum(len(batch) * batch.max().item() for batch in batches)


def main() -> None:
    options = options_parser(__doc__, epochs=2, batch_size=8).parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None)
    documents = read_documents()
    rows = pack_dataset(documents, MAX_LENGTH)
    loader = DataLoader(rows, batch_size=options.batch_size, shuffle=True, collate_fn=PackingCollator())
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    # Together: the model is asked whether it tells the documents of a row apart.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(options.epochs):
        sums = torch.zeros(2, device=accelerator.device)
        for batch in loader:
            tokens = (batch["labels"] != -100).sum()
            loss = model(**batch)["loss"] * tokens
            accelerator.backward(accelerator.global_token_mean(loss, tokens))
            optimizer.step()
            optimizer.zero_grad()
            sums += torch.stack([loss.detach(), tokens])
        total, tokens = accelerator.reduce(sums, "sum").tolist()
        accelerator.print(f"epoch {epoch}: loss {total / tokens:.3f} over {tokens:.0f} targets")
    share = rows.num_tokens / (len(rows) * MAX_LENGTH)
    padded = padded_share(documents, options.batch_size)
    accelerator.print(f"{len(documents)} documents in {len(rows)} rows: {share:.1%} real tokens, padded {padded:.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
