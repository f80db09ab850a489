"""Uneven data: samples that do not divide by ranks and batch size, without repeating any of them.

    accel-trainer launch --cpu --num_processes 2 examples/by_feature/uneven_data.py --samples 100

In the last global batch, ranks have unequally many samples, or none. Each loss counts by its samples, a rank without
any takes part with weight zero, and nobody waits for a rank that is done: the weights are those of one process with the
global batch. `even_batches=True` would fill it up with samples from the beginning.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from accel_trainer import Accelerator, DataLoaderConfiguration, set_seed


def main() -> None:
    parser = options_parser(__doc__, batch_size=16)
    parser.add_argument("--samples", type=int, default=100, help="digits to train on (default: %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model = build_model()
    everything, _ = build_loaders(options.batch_size)
    # split_batches: the batch size is that of all ranks together, so the result does not depend on their number.
    train = DataLoader(Subset(everything.dataset, range(options.samples)), batch_size=options.batch_size, shuffle=True)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=options.learning_rate), train
    )

    seen = 0
    for _ in range(options.epochs):
        for pixels, labels in train:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(pixels), labels))
            optimizer.step()
            seen += train.rows.num_samples
    weights = sum(value.abs().sum().item() for value in accelerator.get_state_dict(model).values())
    accelerator.print(f"{seen} samples in {options.epochs} epochs, sum of weights {weights:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
