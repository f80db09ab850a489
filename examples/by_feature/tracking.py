"""Trackers: the same `log` for TensorBoard, Weights & Biases, MLflow, trackio and one's own.

    pip install 'accel-trainer[tensorboard]'
    python examples/by_feature/tracking.py --log_with tensorboard --project_dir outputs/tracking

Only the main process logs. A tracker that fails warns once, and the training goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed
from accel_trainer.tracking import GeneralTracker


class PrintTracker(GeneralTracker):
    """A tracker of one's own: it prints."""

    name = "print"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Print the hyperparameters."""
        print(f"{self.name}: {values}")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Print the values of a step."""
        print(f"{self.name}: step {step}: {values}")


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--log_with", nargs="*", default=[], help="tensorboard, wandb, mlflow, trackio, or all")
    parser.add_argument("--project_dir", default="outputs/tracking", help="for files (default: %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(
        cpu=options.cpu or None, log_with=[PrintTracker(), *options.log_with], project_dir=options.project_dir
    )
    # What looks like a secret (api_key, hub_token, ...) is stored as ***.
    accelerator.init_trackers("digits", config=vars(options))
    model = build_model()
    train, _ = build_loaders(options.batch_size)
    model, optimizer, train = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate), train
    )
    for epoch in range(options.epochs):
        total = torch.zeros((), device=accelerator.device)
        for pixels, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.reduce(total / len(train), "mean")
        accelerator.log({"train/loss": mean, "epoch": epoch}, step=epoch)
    accelerator.end_training()


if __name__ == "__main__":
    main()
