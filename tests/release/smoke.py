"""What a user's first script does, against the installed package: a native loop, a checkpoint, and the Trainer.

`tests/release/check.py` runs it on one process and on two, outside of the checkout.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_trainer
from accel_trainer import Accelerator, Trainer, TrainingArguments

SITE_PACKAGES = Path(sysconfig.get_path("purelib")).resolve()


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = self.linear(x)
        return {"logits": outputs} if labels is None else {"loss": (outputs - labels).square().mean()}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.arange(20.0).view(10, 2) / 20
    return inputs, inputs.sum(dim=1, keepdim=True)


def run_native_loop(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*samples()), batch_size=2)
    )
    losses = []
    for _ in range(20):
        for inputs, labels in loader:
            loss = model(inputs, labels)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss).mean().item())
    if losses[-1] >= losses[0] / 2:
        sys.exit(f"the loss went from {losses[0]} to {losses[-1]} only")
    seen = torch.cat([accelerator.gather_for_metrics(labels) for _, labels in loader])
    if not torch.equal(seen, samples()[1].to(seen.device)):
        sys.exit(f"gather_for_metrics returned {seen.tolist()}")
    accelerator.save_state(folder / "state")
    before = accelerator.get_state_dict(model)
    with torch.no_grad():
        accelerator.unwrap_model(model).linear.weight.zero_()
    accelerator.load_state(folder / "state")
    after = accelerator.get_state_dict(model)
    if not all(torch.equal(before[name], after[name]) for name in before):
        sys.exit("load_state brought other weights back than save_state wrote")


def run_trainer(folder: Path) -> None:
    inputs, labels = samples()
    dataset = [{"x": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), use_cpu=True, max_steps=4, save_steps=2, report_to="none", disable_tqdm=True
    )
    Trainer(model=Regression(), args=arguments, train_dataset=dataset).train()
    resumed = Trainer(model=Regression(), args=arguments, train_dataset=dataset)
    resumed.train(resume_from_checkpoint=str(folder / "trainer" / "checkpoint-2"))
    if resumed.state.global_step != 4:
        sys.exit(f"the resumed run ended at update {resumed.state.global_step}")


def main() -> None:
    where = Path(accel_trainer.__file__).resolve()
    if not where.is_relative_to(SITE_PACKAGES):
        sys.exit(f"accel_trainer was imported from {where}, not from {SITE_PACKAGES}")
    folder = Path(sys.argv[1])
    run_native_loop(folder)
    run_trainer(folder)
    print(f"ok {accel_trainer.__version__}")


if __name__ == "__main__":
    main()
