"""The script of `accel-trainer test`: every rank checks processes, collectives, loaders and training of a job."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_trainer import Accelerator, DummyOptim, PartialState, set_seed
from accel_trainer.config import LossImplementation, NonFiniteAction, resolve
from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import read_environment

_ROWS = 4
"""Rows of a batch on each rank."""


def main() -> int:
    """Make every check, in the job that a launcher started; return 1 on a rank where one fails, else 0. Collective."""
    name, where = "start", ""
    try:
        state = PartialState()
        where = f"rank {state.process_index} of {state.num_processes}: "
        accelerator, left_out = _build_accelerator()
        accelerator.print(_describe(accelerator))
        checks = dict(CHECKS)
        if _num_copies(accelerator) > 1:
            del checks["training"]
            left_out.append("training: ranks share rows, which takes a model of transformers")
        for line in left_out:
            accelerator.print(f"  left out  {line}")
        for name, check in checks.items():
            accelerator.print(f"  passed  {name}: {check(accelerator)}", flush=True)
            accelerator.wait_for_everyone()
    except Exception as error:
        print(f"accel-trainer test: {where}{name} failed: {error}", file=sys.stderr)
        if not isinstance(error, ProcessGroupError | ValueError):
            traceback.print_exc()
        return 1
    accelerator.print(f"all {len(checks)} checks passed on {accelerator.num_processes} process(es)")
    accelerator.end_training()
    return 0


def _build_accelerator() -> tuple[Accelerator, list[str]]:
    """Return one of the launcher's options, and those it leaves out: of a Trainer, its model, or a run that saves."""
    resolved = resolve(environ=read_environment())
    config = resolved.config
    plain: dict[str, Any] = {"loss": LossImplementation.PLAIN, "local_steps": None}
    if config.on_nonfinite is NonFiniteAction.ROLLBACK:
        plain["on_nonfinite"] = NonFiniteAction.SKIP_STEP
    left_out = [resolved.describe(name) for name, value in plain.items() if getattr(config, name) != value]
    # They may name layers of the model that they are for.
    fsdp = dataclasses.replace(config.fsdp, wrap_classes=(), ignored_modules=())
    config = dataclasses.replace(config, fsdp=fsdp, **plain)
    return Accelerator(config=dataclasses.replace(resolved, config=config)), left_out


def _num_copies(accelerator: Accelerator) -> int:
    """Return how many ranks, one behind the other, read the same rows: those of TP, CP and SP."""
    return accelerator.num_processes // accelerator.readers.world_size


def _describe(accelerator: Accelerator) -> str:
    backend = f", {accelerator.backend}" if accelerator.backend else ""
    return (
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}{backend}, strategy "
        f"{accelerator.strategy.name}, mixed precision {accelerator.mixed_precision}"
    )


def _expect(holds: bool, found: Any, expected: Any) -> None:
    if not holds:
        raise ProcessGroupError(f"found {found}, expected {expected}")


def _check_group(accelerator: Accelerator) -> str:
    rank, size = accelerator.process_index, accelerator.num_processes
    ranks = accelerator.gather(torch.tensor([rank], device=accelerator.device)).tolist()
    _expect(ranks == list(range(size)), f"ranks {ranks}", f"each of 0 to {size - 1} once")
    return f"ranks 0 to {size - 1} reach each other"


def _check_collectives(accelerator: Accelerator) -> str:
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    mine = torch.tensor([float(rank), 1.0], device=device)
    total = accelerator.reduce(mine, "sum").tolist()
    _expect(total == [size * (size - 1) / 2, size], f"the sum {total}", f"that of ranks 0 to {size - 1}")
    sent = accelerator.broadcast(mine + 5, from_process=size - 1).tolist()
    _expect(sent == [size + 4.0, 6.0], f"{sent} by broadcast", f"what rank {size - 1} sent")
    padded = accelerator.pad_across_processes(torch.full((rank + 1,), float(rank), device=device), pad_index=-1)
    lengths = accelerator.gather((padded >= 0).sum().reshape(1)).tolist()
    _expect(lengths == list(range(1, size + 1)), f"rows {lengths}", "one more on each rank")
    words = accelerator.gather_object([f"rank {rank}"])
    _expect(words == [f"rank {number}" for number in range(size)], f"objects {words}", "one of each rank")
    with accelerator.split_between_processes(list(range(2 * size + 1))) as share:
        shares = accelerator.gather_object([share])
    gathered = [element for share in shares[:: _num_copies(accelerator)] for element in share]
    _expect(gathered == list(range(2 * size + 1)), f"elements {gathered}", "every element once")
    return "sum, broadcast, padding, objects and splitting are exact"


def _batch_size(accelerator: Accelerator) -> int:
    plugin = accelerator.state.deepspeed_plugin
    stated = plugin.deepspeed_config.get("train_micro_batch_size_per_gpu") if plugin is not None else None
    rows = stated if isinstance(stated, int) else _ROWS
    return rows * accelerator.readers.world_size if accelerator.split_batches else rows


def _check_loaders(accelerator: Accelerator) -> str:
    batch_size, num_readers = _batch_size(accelerator), accelerator.readers.world_size
    size = 3 * _ROWS * num_readers + 1
    samples: Any = range(size)
    torch.manual_seed(accelerator.process_index)  # another on each rank, which must not change the order of samples
    for shuffle in (False, True) if accelerator.use_seedable_sampler else (False,):
        loader = accelerator.prepare(DataLoader(samples, batch_size=batch_size, shuffle=shuffle))
        seen = accelerator.gather_object([int(sample) for batch in loader for sample in batch])
        missing = sorted(set(range(size)).difference(seen))
        spare = len(seen) // _num_copies(accelerator) - size
        word = "shuffled" if shuffle else "in order"
        _expect(not missing, f"samples {missing} on no rank, {word}", f"all of {size}")
        _expect(spare < batch_size * num_readers, f"{spare} samples twice, {word}", "less than a step")
    words = "in order and shuffled" if accelerator.use_seedable_sampler else "in order"
    return f"{size} samples, {words}, reach the ranks as {len(loader)} batches each"


def _check_metrics(accelerator: Accelerator) -> str:
    size = 2 * _ROWS * accelerator.readers.world_size + 1
    samples: Any = range(size)
    loader = accelerator.prepare(DataLoader(samples, batch_size=_batch_size(accelerator)))
    seen = [int(sample) for batch in loader for sample in accelerator.gather_for_metrics(batch)]
    _expect(seen == list(range(size)), f"samples {seen}", f"each of {size} once, in order")
    return f"gather_for_metrics gives each of {size} samples once"


def _check_random_numbers(accelerator: Accelerator) -> str:
    draws = []
    for _ in range(2):
        set_seed(11)
        draws.append(accelerator.gather(torch.rand(1, 4).to(accelerator.device)))
    _expect(torch.equal(*draws), "other numbers from the same seed", "equal ones")
    equal = bool((draws[0] == draws[0][0]).all())
    _expect(equal, "initial weights that differ between ranks", "equal ones from the same seed")
    return "a seed gives the same numbers again, and the same initial weights on all ranks"


class _Block(nn.Module):
    """A layer that FSDP wraps, and whose activations are treated by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class _Model(nn.Sequential):
    """Layers one behind the other, of which it names those that are units of their own."""

    _no_split_modules = (_Block.__name__,)


def _build_model() -> nn.Module:
    set_seed(5)
    return _Model(nn.Linear(8, 16), _Block(), _Block(), nn.Linear(16, 1))


def _rows(size: int) -> Tensor:
    """Return inputs and, in the last column, their target."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(3))
    return torch.cat([x, x[:, :1] * x[:, 1:2]], dim=1)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(batch[:, :8]).float(), batch[:, 8:])


def _check_training(accelerator: Accelerator) -> str:
    facts = accelerator.strategy.capabilities
    num_updates, steps, size = 3, accelerator.gradient_accumulation_steps, _batch_size(accelerator)
    rows = size if accelerator.split_batches else size * accelerator.num_processes
    data = _rows(steps * rows).repeat(num_updates, 1)  # the same window each time, whose loss falls
    model = _build_model()
    expected = _train_alone(_build_model(), data.chunk(num_updates))
    model, optimizer, loader = accelerator.prepare(
        model, _optimizer(accelerator, model), DataLoader(TensorDataset(data), batch_size=size)
    )
    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = _loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    means = [sum(losses[begin : begin + steps]) / steps for begin in range(0, len(losses), steps)]
    if facts.describes_optimizers:  # and may clip gradients: losses are its own
        _expect(means[-1] < means[0], f"losses {means}", "that they fall")
        return f"{num_updates} updates, and the loss falls from {means[0]:.4f} to {means[-1]:.4f}"
    tolerance = 1e-4 if accelerator.mixed_precision == "no" else 5e-2
    differs = max(abs(found - wanted) / wanted for found, wanted in zip(means, expected, strict=True))
    _expect(differs < tolerance, f"losses {means}", f"{expected}, those of one process in fp32, to {tolerance:g}")
    return f"losses of {num_updates} updates differ from those of one process in fp32 by {differs:.0e} at most"


def _optimizer(accelerator: Accelerator, model: nn.Module) -> Any:
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    is_described = "optimizer" in plugin.deepspeed_config
    return DummyOptim(model.parameters(), lr=0.01) if is_described else torch.optim.AdamW(model.parameters(), lr=0.01)


def _train_alone(model: nn.Module, windows: tuple[Tensor, ...]) -> list[float]:
    """Return the losses of plain PyTorch on unsharded windows."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for window in windows:
        loss = _loss(model, window)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CHECKS: dict[str, Callable[[Accelerator], str]] = {
    "process group": _check_group,
    "collectives": _check_collectives,
    "data loaders": _check_loaders,
    "metrics": _check_metrics,
    "random numbers": _check_random_numbers,
    "training": _check_training,
}
"""Checks by name; each returns a line about its result, and raises if it fails."""


if __name__ == "__main__":
    code = main()
    if code:
        # At once: an orderly exit may wait for ranks that wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
