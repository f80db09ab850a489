"""Automatic batch size: try again with nine tenths of the batch whenever memory runs out, on all ranks together.

    python examples/by_feature/automatic_batch_size.py --starting_batch_size 512 --pretend_limit 300

The function builds everything anew, and lets go of what the last attempt left: `accelerator.free_memory()` comes first.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, find_executable_batch_size, set_seed


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--starting_batch_size", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--pretend_limit", type=int, help="act as if larger batches did not fit into memory")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=options.cpu or None)

    @find_executable_batch_size(starting_batch_size=options.starting_batch_size)
    def train(batch_size: int) -> float:
        accelerator.free_memory()
        accelerator.print(f"trying {batch_size} samples per rank")
        set_seed(0)
        model = build_model()
        loader, _ = build_loaders(batch_size)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate), loader
        )
        for _ in range(options.epochs):
            for pixels, labels in loader:
                if options.pretend_limit is not None and len(pixels) > options.pretend_limit:
                    raise torch.OutOfMemoryError("pretended: out of memory")
                optimizer.zero_grad()
                loss = F.cross_entropy(model(pixels), labels)
                accelerator.backward(loss)
                optimizer.step()
        return loss.item()

    accelerator.print(f"finished with a loss of {train():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
