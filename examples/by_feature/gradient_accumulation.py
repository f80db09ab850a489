"""Gradient accumulation: an update from several micro-batches, the same as from one large batch.

    python examples/by_feature/gradient_accumulation.py --steps 4 --batch_size 16

`accumulate()` exchanges gradients on the last micro-batch of a window only, and `optimizer.step()`, `scheduler.step()`
and `optimizer.zero_grad()` act there only. A window's gradient is the mean over what it holds, also that of the short
last one.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed


def main() -> None:
    parser = options_parser(__doc__, batch_size=16)
    parser.add_argument("--steps", type=int, default=4, help="micro-batches per update (default: %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None, gradient_accumulation_steps=options.steps)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    train, _ = build_loaders(options.batch_size)
    updates_per_epoch = -(-len(train) // options.steps)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.epochs * updates_per_epoch)
    model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)

    updates = 0
    for epoch in range(options.epochs):
        for pixels, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(pixels), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: {updates} updates, last loss {mean:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
