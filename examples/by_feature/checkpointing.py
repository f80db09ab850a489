"""Checkpoints: save in the background every few steps, stop anywhere, and go on with the next sample.

    python examples/by_feature/checkpointing.py --stop_after 30
    python examples/by_feature/checkpointing.py --resume

The second run ends with the loss of a run that was never stopped. It may have another number of processes; with a
`--batch_size` that makes the global batch the same, it takes the same steps.
"""

from __future__ import annotations

import torch
from digits import build_loaders, build_model, options_parser
from torch.nn import functional as F

from accel_trainer import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--project_dir", default="digits-run", help="default: %(default)s")
    parser.add_argument("--save_every", type=int, default=10, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--stop_after", type=int, metavar="STEPS", help="end there, as if the job had been killed")
    parser.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint")
    options = parser.parse_args()
    accelerator = Accelerator(
        cpu=options.cpu or None,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        project_config=ProjectConfiguration(options.project_dir, automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)
    loader, _ = build_loaders(options.batch_size)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    if options.resume:
        accelerator.load_state()
    step = schedule.last_epoch
    accelerator.print(f"begins at step {step} in epoch {loader.epoch}")
    for _ in range(loader.epoch, options.epochs):
        for pixels, labels in loader:
            loss = F.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % options.save_every == 0:
                # Returns once the state is copied; the copy is written while the next steps compute.
                accelerator.save_state(async_=True)
            if step == options.stop_after:
                accelerator.end_training()
                return
    accelerator.print(f"finished after step {step} with a loss of {loss.item():.9f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
