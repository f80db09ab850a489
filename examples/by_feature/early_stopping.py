"""Early stopping: any rank may end the training, and all ranks leave the loop at the same step.

    accel-trainer launch --cpu --num_processes 2 examples/by_feature/early_stopping.py --threshold 0.4

`set_trigger()` raises a flag on one rank; `check_trigger()` tells all ranks whether somebody did. It costs one
all-reduce of a number, so call it once a step, or more seldom.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed


def main() -> None:
    parser = options_parser(__doc__, epochs=20)
    parser.add_argument("--threshold", type=float, default=0.2, help="loss to stop at (default: %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None)
    model = build_model()
    train, _ = build_loaders(options.batch_size)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate), train
    )

    step = 0
    stopped = False
    for _ in range(options.epochs):
        for pixels, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            # The losses of two ranks differ: without a common decision one of them would wait for the other for ever.
            if loss.item() < options.threshold:
                accelerator.set_trigger()
            if stopped := accelerator.check_trigger():
                break
        if stopped:
            break
    accelerator.print(f"stopped after {step} steps" if stopped else f"went through all {step} steps")
    accelerator.end_training()


if __name__ == "__main__":
    main()
