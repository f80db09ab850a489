"""Fingerprints of an update: each module's results, its gradients and its weights, as exact sums of bits.

A sum of the bits of all elements, as integers that wrap around, depends on no order, and changes with any one bit.
`accel-trainer report --diff` compares those of two runs, in the order in which an update comes by the modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from accel_trainer import logging
from accel_trainer.errors import ConfigError
from accel_trainer.runtime import collectives
from accel_trainer.tree import leaves

if TYPE_CHECKING:
    from accel_trainer import Trainer

logger = logging.get_logger(__name__)

FILE_NAME = "fingerprints.jsonl"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(value: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, or of this rank's shard, taken as integers: scalar, int64."""
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    if local.dtype == torch.bool or local.element_size() not in _INTEGERS:
        return local.sum(dtype=torch.int64)
    return local.contiguous().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)


class Fingerprints(TrainerCallback):
    """Writes those of every N-th update to `output_dir/fingerprints.jsonl`; sums over all ranks. Every rank has one."""

    def __init__(self, trainer: Trainer) -> None:
        """Take the Trainer that it is a callback of.

        Raises:
            ConfigError: `fingerprint_every` is no number of updates, or the strategy an engine.
        """
        self._trainer, self._every = trainer, trainer.args.fingerprint_every
        if self._every < 0:
            raise ConfigError(f"fingerprint_every={self._every} is a number of updates: give 1 or more, or 0 for none")
        facts = trainer.accelerator.strategy.capabilities
        if facts.builds_engine:
            raise ConfigError(
                f"fingerprint_every={self._every} sums gradients and weights by module, which strategy "
                f"{trainer.accelerator.strategy.name!r} keeps in buffers of its engine; use fsdp2, or leave it out"
            )
        self._before: dict[int, list[list[Any]]] = {}
        """Names and sums of updates that an earlier run had done after the checkpoint, on the main process."""
        self._sums: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []
        self._has_repeated = False

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                yield name or "the model", module

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the fingerprints that a run before the checkpoint has of the updates that come again."""
        path = Path(args.output_dir) / FILE_NAME
        if state.is_world_process_zero and state.global_step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # the last one of a run that was killed
                    content = json.loads(line)
                    self._before[content["update"]] = content["sums"]
            self._before = {update: sums for update, sums in self._before.items() if update > state.global_step}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the results of modules in an update that is due."""
        self.close()
        if not self._is_due(state.global_step + 1):
            return
        # A compiled model calls no hooks that come later: its gradients and weights alone are compared then.
        if self._trainer.accelerator.config.compile.backend == "no":
            self._hooks = [module.register_forward_hook(self._noting(name)) for name, module in self._modules()]

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = (each for each in leaves(output) if isinstance(each, Tensor))
            self._sums += [(f"forward of {name}", sum_of_bits(tensor)) for tensor in tensors]

        return note

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add gradients, in the order of the backward."""
        if self._is_due(state.global_step + 1):
            for name, module in reversed(list(self._modules())):
                grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
                self._sums += [(f"gradients of {name}", sum_of_bits(gradient)) for gradient in grads]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the weights, sum all up over the ranks, and write the line. Collective."""
        if not self._is_due(update := state.global_step + 1):
            return
        for name, module in self._modules():
            self._sums += [(f"weights of {name}", sum_of_bits(p)) for p in module.parameters(recurse=False)]
        names, values = [name for name, _ in self._sums], torch.stack([value for _, value in self._sums])
        self.close()
        total = collectives.reduce(values, self._trainer.accelerator.process, "sum").tolist()
        if state.is_world_process_zero:
            sums = list(zip(names, total, strict=True))
            self._compare(update, sums)
            path = Path(args.output_dir) / FILE_NAME
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update, "sums": sums}) + "\n")

    def _compare(self, update: int, sums: list[tuple[str, int]]) -> None:
        """Say whether an update that was done before comes to the same bits: once, and whenever it does not."""
        before = self._before.pop(update, None)
        if before is None:
            return
        # From the end: a run that begins asks a forward or two more of its first micro-batch (LossNormalization).
        number = min(len(sums), len(before))
        pairs = zip(sums[-number:], map(tuple, before[-number:]), strict=True)
        part = next((mine for mine, other in pairs if mine != other), None)
        if part is not None:
            self._before = {}
            logger.warning(
                "update %d is not what it was before the resume: the first difference is the %s. With the same ranks, "
                "code and data this hardware does not repeat itself; see docs/reliability.md", update, part[0],
            )  # fmt: skip
        elif not self._has_repeated:
            self._has_repeated = True
            logger.info(
                "update %d comes to the bits that it had before the resume: this machine repeats itself", update
            )

    def _is_due(self, update: int) -> bool:
        return update % self._every == 0

    def close(self) -> None:
        """Take the hooks off the model, and forget the update under way."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sums = [], []
