"""Gradient clipping: bound the norm of an update's gradient, whatever the strategy.

    python examples/by_feature/gradient_clipping.py --max_norm 0.5

`clip_grad_norm_` returns the norm before clipping: over all parameters and all ranks, sharded ones included.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--max_norm", type=float, default=0.5, help="default: %(default)s")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None)
    model = build_model()
    train, _ = build_loaders(options.batch_size)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=options.learning_rate), train
    )

    norms = []
    for _ in range(options.epochs):
        for pixels, labels in train:
            accelerator.backward(F.cross_entropy(model(pixels), labels))
            # For single values: accelerator.clip_grad_value_(model.parameters(), 0.1)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), options.max_norm))
            optimizer.step()
            optimizer.zero_grad()
    clipped = sum(norm.item() > options.max_norm for norm in norms)
    accelerator.print(f"{clipped} of {len(norms)} updates were clipped to a norm of {options.max_norm}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
