"""A mixture of data sets whose weights change over a run: first mostly large digits, in the end all of them alike.

    python examples/by_feature/mixture.py
    accel-trainer launch --cpu --num_processes 2 examples/by_feature/mixture.py

Which sample is drawn depends on the seed and its index alone: the mixture is the same on any number of processes. A
Trainer reads one from a file: `TrainingArguments(dataset_mixture="mixture.yaml")`.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from accel_trainer import Accelerator, set_seed
from accel_trainer.data_loader import mix_datasets


def main() -> None:
    parser = options_parser(__doc__, epochs=1, batch_size=32)
    parser.add_argument("--updates", type=int, default=60, help="of an epoch (default: %(default)s)")
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None)
    dataset = build_loaders(options.batch_size)[0].dataset
    labels = torch.tensor([int(label) for _, label in dataset])
    small, large = (Subset(dataset, torch.nonzero(mask).flatten().tolist()) for mask in (labels < 5, labels >= 5))
    half = options.updates // 2
    update = options.batch_size * accelerator.num_processes
    mixture = mix_datasets(
        [small, large],
        weights=[1, 9],
        schedule={half: [1, 1]},
        samples_per_update=update,
        num_samples=options.updates * update,
    )
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    # Not shuffled: the schedule is the order of the samples.
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(mixture, options.batch_size))
    for epoch in range(options.epochs):
        shares = []
        for pixels, digits in loader:
            loss = F.cross_entropy(model(pixels), digits)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            shares.append(accelerator.gather((digits < 5).float()).mean().item())
        before, after = sum(shares[:half]) / half, sum(shares[half:]) / (len(shares) - half)
        accelerator.print(f"epoch {epoch}: {before:.0%} small digits at first, {after:.0%} then, last loss {loss:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
