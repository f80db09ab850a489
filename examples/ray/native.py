"""Ray Train starts the workers, and a loop of your own trains in them.

    python examples/ray/native.py --num_workers 2
    python examples/ray/native.py --num_workers 2:4 --strategy fsdp2 --max_failures 3

Each update takes 32 samples on any number of workers. A worker that dies has Ray start them again, up to
`--max_failures` times, and they go on from the newest checkpoint that was reported; of `2:4` as many as find room.
`--storage_path` is where all machines read and write. A run that has ended goes on with the same command and more
`--epochs`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

GLOBAL_BATCH = 32


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))


def build_data() -> TensorDataset:
    points = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points.prod(dim=1, keepdim=True))


def train(config: dict[str, Any]) -> None:
    """Train on one of the workers."""
    num_workers = ray.train.get_context().get_world_size()
    accelerator = Accelerator(
        strategy=config["strategy"],
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        project_config=ProjectConfiguration(config["project_dir"], automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(0)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)
    loader = DataLoader(build_data(), batch_size=GLOBAL_BATCH // num_workers, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            accelerator.load_state(folder)
    accelerator.print(f"begins at step {schedule.last_epoch} on {num_workers} workers")
    for epoch in range(loader.epoch, config["epochs"]):
        for points, targets in loader:
            loss = F.mse_loss(model(points), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if schedule.last_epoch % config["save_every"] == 0:
                folder = accelerator.save_state()
                # All workers report; the checkpoint is one folder, which rank 0 sends to Ray's storage.
                sent = Checkpoint.from_directory(folder) if accelerator.is_main_process else None
                metrics = {"loss": accelerator.reduce(loss.detach(), "mean").item(), "step": schedule.last_epoch}
                ray.train.report({**metrics, "epoch": epoch, "workers": num_workers}, checkpoint=sent)
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_workers", default="2", metavar="N|MIN:MAX", help="default: %(default)s")
    parser.add_argument("--use_gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], help="default: DDP on several workers")
    parser.add_argument(
        "--storage_path", default="ray-runs", help="a folder that all machines see; default: %(default)s"
    )
    parser.add_argument("--name", default="native", help="of the run; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--save_every", type=int, default=8, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--max_failures", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    low, _, high = options.num_workers.partition(":")
    storage = Path(options.storage_path).resolve()
    config = {"strategy": options.strategy, "epochs": options.epochs, "save_every": options.save_every}
    result = TorchTrainer(
        train,
        train_loop_config={**config, "project_dir": str(storage / f"{options.name}-states")},
        scaling_config=ScalingConfig(num_workers=(int(low), int(high)) if high else int(low), use_gpu=options.use_gpu),
        run_config=RunConfig(
            name=options.name, storage_path=str(storage), failure_config=FailureConfig(options.max_failures)
        ),
    ).fit()
    print(f"{result.metrics}\n{result.checkpoint}")


if __name__ == "__main__":
    main()
