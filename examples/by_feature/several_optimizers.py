"""Several optimizers: Muon for the matrices, AdamW for the rest, both over two models that are trained together.

    python examples/by_feature/several_optimizers.py
    accel-trainer launch --cpu --num_processes 2 --use_fsdp examples/by_feature/several_optimizers.py

Models and optimizers find each other by the parameters. Models that share an optimizer share the accumulation window,
too: `accumulate(encoder, classifier)`.
"""

from __future__ import annotations

from itertools import chain

import torch
from digits import build_loaders, options_parser
from torch import nn
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed


def main() -> None:
    parser = options_parser(__doc__, epochs=8)
    parser.add_argument("--steps", type=int, default=2, help="micro-batches per update (default: %(default)s)")
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None, gradient_accumulation_steps=options.steps)
    encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    classifier = nn.Linear(32, 10)
    train, evaluation = build_loaders(options.batch_size)

    parameters = list(chain(encoder.parameters(), classifier.parameters()))
    muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=options.learning_rate)
    adamw = torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=options.learning_rate)
    encoder, classifier, muon, adamw, train, evaluation = accelerator.prepare(
        encoder, classifier, muon, adamw, train, evaluation
    )

    for _ in range(options.epochs):
        for pixels, labels in train:
            with accelerator.accumulate(encoder, classifier):
                accelerator.backward(F.cross_entropy(classifier(encoder(pixels)), labels))
                accelerator.clip_grad_norm_(chain(encoder.parameters(), classifier.parameters()), 1.0)
                for optimizer in (muon, adamw):
                    optimizer.step()
                    optimizer.zero_grad()

    right = []
    with torch.no_grad():
        for pixels, labels in evaluation:
            right.append(accelerator.gather_for_metrics(classifier(encoder(pixels)).argmax(-1) == labels))
    accelerator.print(f"accuracy {torch.cat(right).float().mean().item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
