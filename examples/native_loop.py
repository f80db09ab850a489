"""The job of finetune_classifier.py as a native PyTorch loop.

Data, model and options are the same; the loop is in sight, and yours to change:

    python examples/native_loop.py
    accel-trainer launch --cpu --num_processes 2 examples/native_loop.py --strategy fsdp2
    accel-trainer launch --cpu --num_processes 2 examples/native_loop.py --strategy_config zero3
    python examples/native_loop.py --model bert-base-cased --dataset nyu-mll/glue --config mrpc
"""

from __future__ import annotations

import argparse
import time

import datasets
import evaluate
import torch
from classification import (
    METRIC,
    add_data_options,
    build_model,
    check_saved,
    describe_data,
    describe_result,
    largest_class,
    load_texts,
    tokenize,
)
from datasets import DatasetDict
from options import add_model_options, add_run_options, learning_rate, split_batch
from report import describe_layout, print_table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging

from accel_trainer import Accelerator


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    add_run_options(parser, output_dir="outputs/native_loop", epochs=3, batch_size=32)
    add_model_options(parser, vocab_size=2048, max_length=96)
    group = parser.add_argument_group("strategy", "without these: what the launcher says, and one process or DDP else")
    group.add_argument("--strategy", help="single, ddp, fsdp2 or another registered name")
    group.add_argument("--strategy_config", metavar="FILE", help="YAML or JSON file, or a packaged name")
    group.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"])
    return parser.parse_args(argv)


def evaluate_model(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[dict[str, float], Tensor]:
    """Return metrics over every sample exactly once, and the predicted classes in the order of the data. Collective."""
    accuracy = evaluate.load(METRIC, keep_in_memory=True)
    losses, predictions = [], []
    model.eval()
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        each_loss = F.cross_entropy(logits.float(), batch["labels"], reduction="none")
        # The loader knows which rows only fill up the last batch; they are left out here.
        each_loss, predicted, labels = accelerator.gather_for_metrics((each_loss, logits.argmax(-1), batch["labels"]))
        accuracy.add_batch(predictions=predicted, references=labels)
        losses.append(each_loss)
        predictions.append(predicted)
    model.train()
    metrics = {"eval_loss": torch.cat(losses).mean().item(), "eval_accuracy": accuracy.compute()["accuracy"]}
    return metrics, torch.cat(predictions)


def build_loaders(
    options: argparse.Namespace, accelerator: Accelerator, tokens: DatasetDict, collator: DataCollatorWithPadding
) -> tuple[DataLoader, DataLoader]:
    """Return this rank's loaders to be, whose batches on all ranks together make the global batch."""
    parts = accelerator.num_processes * accelerator.gradient_accumulation_steps
    micro_batch = split_batch(options.global_batch_size, parts)
    eval_batch = split_batch(2 * options.global_batch_size, accelerator.num_processes)
    return (
        DataLoader(tokens["train"], batch_size=micro_batch, shuffle=True, collate_fn=collator),
        DataLoader(tokens["eval"], batch_size=eval_batch, collate_fn=collator),
    )


def train_pass(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    loader: DataLoader,
    max_updates: int,
    progress: tqdm,
) -> int:
    """Train one pass over the data, at most `max_updates`; return how many there were. Collective."""
    updates = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates += 1
            progress.update(1)
            if updates == max_updates:
                break
    return updates


def save(accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, output_dir: str) -> None:
    """Write what `from_pretrained` loads, whatever the strategy. Collective."""
    accelerator.unwrap_model(model).save_pretrained(
        output_dir,
        state_dict=accelerator.get_state_dict(model),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output_dir)


def main(argv: list[str] | None = None) -> dict[str, float]:
    options = parse_options(argv)
    accelerator = Accelerator(
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        mixed_precision=options.mixed_precision,
        cpu=options.cpu or None,
        strategy=options.strategy,
        config=options.strategy_config,
    )
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()

    texts = load_texts(options)
    tokenizer, model = build_model(options, texts["train"])
    tokens = tokenize(texts, tokenizer)
    # Built in pieces, under ZeRO-3, parameters know their whole size as ds_numel.
    num_parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    train_loader, eval_loader = build_loaders(options, accelerator, tokens, DataCollatorWithPadding(tokenizer))

    updates = len(texts["train"]) // options.global_batch_size * options.epochs
    updates = options.max_steps if options.max_steps > 0 else updates
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate(options), weight_decay=options.weight_decay)
    scheduler = get_linear_schedule_with_warmup(optimizer, updates // 10, updates)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    with tqdm(total=updates, desc="training", disable=not accelerator.is_local_main_process) as progress:
        seconds, done = 0.0, 0
        while done < updates:
            start = time.perf_counter()
            done += train_pass(accelerator, model, optimizer, scheduler, train_loader, updates - done, progress)
            seconds += time.perf_counter() - start
            metrics, predicted = evaluate_model(accelerator, model, eval_loader)
            progress.set_postfix(metrics)

    save(accelerator, model, tokenizer, options.output_dir)
    layout = describe_layout(accelerator, model, num_parameters)
    baseline = largest_class(texts["eval"]["label"])
    metrics |= {"train_steps_per_second": updates / seconds, "majority_accuracy": baseline}
    if accelerator.is_main_process:
        with accelerator.whole_models():  # this rank alone looks at it
            loaded = check_saved(options.output_dir, texts["eval"], predicted.cpu().numpy())
        rows = [
            *layout,
            ("samples", describe_data(texts)),
            ("training", f"{updates} updates, {updates / seconds:.2f} steps/s"),
            *describe_result(metrics),
            ("saved to", options.output_dir),
            ("from_pretrained", loaded),
        ]
        print_table("Native loop", rows)
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    main()
