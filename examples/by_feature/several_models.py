"""Several models: a generator of digits and a discriminator that tells them from real ones.

    python examples/by_feature/several_models.py
    accel-trainer launch --cpu --num_processes 2 examples/by_feature/several_models.py

Each model has its optimizer and its own accumulation window: `accumulate(discriminator)` leaves the generator alone.
"""

from __future__ import annotations

import torch
from digits import build_loaders, options_parser
from torch import nn
from torch.nn import functional as F

from accel_trainer import Accelerator, set_seed

NOISE = 16


def main() -> None:
    options = options_parser(__doc__, epochs=4).parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu or None, gradient_accumulation_steps=2)
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    train, _ = build_loaders(options.batch_size)
    generator, discriminator, generator_optimizer, discriminator_optimizer, train = accelerator.prepare(
        generator,
        discriminator,
        torch.optim.Adam(generator.parameters(), lr=1e-3),
        torch.optim.Adam(discriminator.parameters(), lr=1e-3),
        train,
    )

    for epoch in range(options.epochs):
        for pixels, _ in train:
            noise = torch.randn(len(pixels), NOISE, device=accelerator.device)
            with accelerator.accumulate(discriminator):
                with torch.no_grad():
                    made = generator(noise)
                # One forward for both halves: a replicated model exchanges gradients once per forward and backward.
                scores = discriminator(torch.cat([pixels, made]))
                is_real = (torch.arange(len(scores), device=scores.device) < len(pixels)).float().unsqueeze(1)
                discriminator_loss = F.binary_cross_entropy_with_logits(scores, is_real)
                accelerator.backward(discriminator_loss)
                discriminator_optimizer.step()
                discriminator_optimizer.zero_grad()
            # The generator's loss goes through the discriminator, and leaves no gradient there.
            discriminator.requires_grad_(False)
            with accelerator.accumulate(generator):
                scores = accelerator.unwrap_model(discriminator)(generator(noise))
                generator_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
                accelerator.backward(generator_loss)
                generator_optimizer.step()
                generator_optimizer.zero_grad()
            discriminator.requires_grad_(True)
        accelerator.print(
            f"epoch {epoch}: discriminator {discriminator_loss.item():.3f}, generator {generator_loss.item():.3f}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
