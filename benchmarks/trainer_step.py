"""Trainer.train and Trainer.evaluate on tiny models, against plain loops and, where it is at hand, upstream's Trainer.

Run by run.py in a process of its own, with Hugging Face accelerate on its path for upstream's Trainer when
`.compat/accelerate` holds it; prints the rows as JSON on its last line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from timing import Row, interleave, ratio_row
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, default_data_collator

import accel_trainer

BATCH_SIZE = 8


def _llama(num_layers: int = 2, vocab_size: int = 256) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocab_size, max_position_embeddings=64,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def _options(folder: str, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "per_device_train_batch_size": BATCH_SIZE, "num_train_epochs": 1, "learning_rate": 1e-3, "weight_decay": 0.0,
        "logging_steps": 100, "lr_scheduler_type": "constant",
    }  # fmt: skip
    options.update(changes)
    return options


def _plain_training(data: list[dict[str, Tensor]], accumulation: int) -> None:
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model.train()
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=default_data_collator)
    for index, batch in enumerate(loader, start=1):
        (model(**batch).loss / accumulation).backward()
        if index % accumulation:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def training_rows(rounds: int, folder: str, peer: bool, accumulation: int, bound: float) -> list[Row]:
    """Compare whole train() calls with a plain loop over the same 200 batches, fused AdamW in all of them."""
    tokens = torch.randint(0, 256, (200 * BATCH_SIZE, 32))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    options = _options(folder, gradient_accumulation_steps=accumulation)

    def train(module: Any) -> None:
        arguments = module.TrainingArguments(**options)
        module.Trainer(model=_llama(), args=arguments, train_dataset=data).train()

    functions: dict[str, Callable[[], object]] = {
        "plain": lambda: _plain_training(data, accumulation),
        "ours": lambda: train(accel_trainer),
    }
    if peer:
        functions["upstream"] = lambda: train(transformers)
    seconds = interleave(functions, 3 * rounds)
    what = "Trainer.train (tiny llama)" + ("" if accumulation == 1 else f", {accumulation} a window")
    rows = [ratio_row(what, "plain PyTorch loop", seconds["ours"], seconds["plain"], bound)]
    if peer:
        rows.append(ratio_row(what, "upstream's Trainer", seconds["ours"], seconds["upstream"], None))
        rows.append(
            ratio_row("upstream's Trainer.train", "plain PyTorch loop", seconds["upstream"], seconds["plain"], None)
        )
    return rows


def _accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def _plain_evaluation(model: nn.Module, data: list[dict[str, Tensor]]) -> dict[str, float]:
    """The loop that one would write: losses, logits and labels, and the same metric at the end."""
    logits, labels = [], []
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=BATCH_SIZE, collate_fn=default_data_collator):
            output = model(**batch)
            logits.append(output.logits)
            labels.append(batch["labels"])
    return _accuracy(transformers.EvalPrediction(torch.cat(logits).numpy(), torch.cat(labels).numpy()))


def build_evaluation(module: Any, folder: str, data: list[dict[str, Tensor]]) -> Any:
    """Return a module's Trainer of one layer, with 16 x 128 logits a sample: what is around the model shows."""
    arguments = module.TrainingArguments(**_options(folder))
    return module.Trainer(model=_llama(1, 128), args=arguments, eval_dataset=data, compute_metrics=_accuracy)


def evaluation_rows(rounds: int, folder: str, peer: bool) -> list[Row]:
    """Compare evaluate() at 1,000 and 8,000 samples with a plain loop; upstream's at 8,000 takes too long to repeat."""
    tokens = torch.randint(0, 128, (8000, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    small = data[:1000]

    trainer = build_evaluation(accel_trainer, folder, small)
    model = _llama(1, 128)
    functions: dict[str, Callable[[], object]] = {
        "plain 8000": lambda: _plain_evaluation(model, data),
        "ours 8000": lambda: trainer.evaluate(data),
        "ours 1000": lambda: trainer.evaluate(small),
    }
    if peer:
        theirs = build_evaluation(transformers, folder, small)
        functions["upstream 1000"] = lambda: theirs.evaluate(small)
    seconds = interleave(functions, rounds)
    rows = [
        ratio_row("evaluate(8000)", "plain evaluation loop", seconds["ours 8000"], seconds["plain 8000"], 1.12),
        ratio_row("evaluate(8000)", "evaluate(1000): linear is 8", seconds["ours 8000"], seconds["ours 1000"], 9.0),
    ]
    if peer:
        row = ratio_row(
            "evaluate(1000)", "upstream's evaluate(1000)", seconds["ours 1000"], seconds["upstream 1000"], None
        )
        rows.append(row)
    return rows


def _plain_loss(model: nn.Module, data: list[dict[str, Tensor]]) -> float:
    losses = []
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=4, collate_fn=default_data_collator):
            losses.append(model(**batch).loss)
    return float(torch.stack(losses).mean())


def evaluation_loss_rows(rounds: int, folder: str) -> list[Row]:
    """Compare evaluate() without a metric with a plain loop over the losses: two layers, batches of 4 x 16."""
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (8000, 16))]
    arguments = accel_trainer.TrainingArguments(**_options(folder, per_device_eval_batch_size=4))
    trainer = accel_trainer.Trainer(model=_llama(2, 128), args=arguments, eval_dataset=data)
    model = _llama(2, 128)
    seconds = interleave({"plain": lambda: _plain_loss(model, data), "ours": trainer.evaluate}, rounds)
    return [ratio_row("evaluate(8000), loss alone", "plain loop", seconds["ours"], seconds["plain"], 1.15)]


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    rounds = int(sys.argv[1])
    peer = importlib.util.find_spec("accelerate") is not None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        rows = [
            *training_rows(rounds, folder, peer, accumulation=1, bound=1.08),
            *training_rows(rounds, folder, peer, accumulation=4, bound=1.04),
            *evaluation_rows(rounds, folder, peer),
        ]
        rows += evaluation_loss_rows(rounds, folder)
    print(json.dumps([row.to_dict() for row in rows]))


if __name__ == "__main__":
    main()
