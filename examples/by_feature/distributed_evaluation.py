"""Evaluation on all ranks: every sample counts exactly once, also where the last batch had to be filled up.

    python examples/by_feature/distributed_evaluation.py
    accel-trainer launch --cpu --num_processes 2 examples/by_feature/distributed_evaluation.py

Two ways with the library evaluate: gather predictions and add them on every rank, or let each rank add its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import evaluate
import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed
from accel_trainer.utils import broadcast_object_list

METRIC = str(Path(__file__).resolve().parents[1] / "metrics" / "accuracy")


def main() -> None:
    options = options_parser(__doc__).parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None)
    model = build_model()
    train, evaluation = build_loaders(options.batch_size)
    model, optimizer, train, evaluation = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate), train, evaluation
    )
    for _ in range(options.epochs):
        for pixels, labels in train:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(pixels), labels))
            optimizer.step()

    # The ranks of the second way meet in a folder that all of them see: rank 0's.
    folder = tempfile.TemporaryDirectory()
    (shared_path,) = broadcast_object_list([folder.name])
    gathered = evaluate.load(METRIC, keep_in_memory=True)
    shared = evaluate.load(
        METRIC,
        num_process=accelerator.num_processes,
        process_id=accelerator.process_index,
        experiment_id="digits",
        cache_dir=shared_path,
    )
    samples = 0
    model.eval()
    for pixels, labels in evaluation:
        with torch.no_grad():
            predicted = model(pixels).argmax(-1)
        # How many rows of this rank's batch are samples; what follows them fills the batch up.
        own = evaluation.rows.rows[accelerator.process_index]
        shared.add_batch(predictions=predicted[:own], references=labels[:own])
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        gathered.add_batch(predictions=predicted, references=labels)
        samples += len(labels)
    accuracy = gathered.compute()["accuracy"]
    by_shares = shared.compute()  # on rank 0; None elsewhere
    if accelerator.is_main_process:
        print(f"accuracy {accuracy:.4f} over {samples} samples, and {by_shares['accuracy']:.4f} by shares")
    accelerator.end_training()
    folder.cleanup()


if __name__ == "__main__":
    main()
