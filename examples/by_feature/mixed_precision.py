"""Mixed precision: matrix products in 16 bits, weights and optimizer state in 32.

    python examples/by_feature/mixed_precision.py --mixed_precision bf16
    python examples/by_feature/mixed_precision.py --mixed_precision bf16 --output_dtype kept

fp16 needs a GPU; its losses are scaled, and updates whose gradients overflow are skipped.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, AutocastKwargs, GradScalerKwargs, set_seed


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument(
        "--mixed_precision", default="bf16", choices=["no", "bf16", "fp16"], help="default: %(default)s"
    )
    parser.add_argument("--output_dtype", choices=["fp32", "kept"], help="what the model returns (default: fp32)")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        cpu=options.cpu or None,
        mixed_precision=options.mixed_precision,
        kwargs_handlers=[AutocastKwargs(output_dtype=options.output_dtype), GradScalerKwargs(init_scale=1024.0)],
    )
    model = build_model()
    train, _ = build_loaders(options.batch_size)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=options.learning_rate), train
    )

    skipped = 0
    for _ in range(options.epochs):
        for pixels, labels in train:
            logits = model(pixels)
            # Computations outside of the model; inside of it, autocast is on already.
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                loss = F.cross_entropy(logits.float(), labels)
            accelerator.backward(loss)
            optimizer.step()
            skipped += accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
    weights = next(model.parameters()).dtype
    accelerator.print(f"logits {logits.dtype}, weights {weights}, loss {loss.item():.3f}, {skipped} updates skipped")
    accelerator.end_training()


if __name__ == "__main__":
    main()
