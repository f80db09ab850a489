"""Moving averages of the weights (EMA), sharded as the weights are: no rank gathers anything for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accel_trainer.checkpoint.shards import local_tensor, wrap_local_like
from accel_trainer.config import Resolved, RunConfig
from accel_trainer.errors import ConfigError


class AveragedWeights:
    """Averages of a model's trained parameters: after each update `decay * average + (1 - decay) * parameter`.

    As in `torch.optim.swa_utils.AveragedModel`, the first update of a parameter begins its average: before it there is
    none, and no memory is taken. Averages have at least fp32, and lie where this rank's shard of the parameter does.
    Frozen parameters and buffers have none: the model's own are evaluated and exported. No method is collective.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """Take the parameters as they are trained: sharded, where they are to be."""
        self._parameters = list(parameters)
        self._averages: dict[Tensor, Tensor] = {}
        """This rank's shards, by parameter."""
        self._average_into = get_ema_multi_avg_fn(decay)
        self.is_in_model = False
        """Whether the model has the averages, and not the weights that training goes on with."""

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return the average of a parameter, a DTensor if that is one; None where there is none yet."""
        average = self._averages.get(parameter)
        # A parameter, as checkpoints tell weights, which ranks write together, from buffers, which rank 0 writes.
        wrapped = None if average is None else wrap_local_like(parameter, average)
        return None if wrapped is None else nn.Parameter(wrapped, requires_grad=False)

    def target(self, parameter: Tensor) -> Tensor:
        """Return a tensor that a stored average of a parameter can be read into: the average, if there is one."""
        held, local = self.of(parameter), local_tensor(parameter)
        new = torch.empty_like(local, dtype=_dtype(local)) if held is None else None
        return wrap_local_like(parameter, new) if new is not None else held  # type: ignore[return-value]

    def resume(self, averages: Mapping[Tensor, Tensor]) -> None:
        """Go on with averages that have been read, by parameter; others begin with the next update."""
        self._averages = {parameter: local_tensor(average) for parameter, average in averages.items()}

    def require_own(self, doing: str) -> None:
        """Refuse to do something for which the model has to have its own weights."""
        if self.is_in_model:
            raise ConfigError(
                f"{doing} was called within averaged_weights(), where the model has the averages in the place of the "
                "weights that training goes on with; call it after the block"
            )

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights after an update into the averages."""
        self.require_own("optimizer.step()")
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for parameter in self._parameters:
            if not parameter.requires_grad:
                continue
            value, average = local_tensor(parameter), self._averages.get(parameter)
            if average is None:
                self._averages[parameter] = value.to(_dtype(value), copy=True)
            elif value.dtype == average.dtype:
                averages.append(average)
                values.append(value)
            elif value.numel():  # one at a time: of 16 bits, all together would be a copy of the weights in fp32
                self._average_into([average], [value.to(average.dtype)], 1)
        if averages:
            self._average_into(averages, values, 1)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context in which the model has the averages; after it, bit for bit, its own weights again.

        Weights of the averages' dtype are kept in the averages' memory meanwhile, others in as much as they take.
        """
        self.require_own("averaged_weights()")
        kept = self._exchange({})
        self.is_in_model = True
        try:
            yield
        finally:
            self.is_in_model = False
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, kept: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Put averages, or values that were `kept`, into the parameters; return those that found no place in them."""
        own: dict[Tensor, Tensor] = {}
        for parameter, average in self._averages.items():
            # By `data`: ZeRO's next step would take it for a change of the user's, and round its fp32 weights by it.
            value = local_tensor(parameter).data
            before = value.clone()
            value.copy_(kept.get(parameter, average))
            if value.dtype == average.dtype:
                average.copy_(before)
            else:
                own[parameter] = before
        return own

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Give the model the averages for good."""
        for parameter, average in self._averages.items():
            local_tensor(parameter).copy_(average)


def _dtype(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)


def build_averages(module: nn.Module, config: RunConfig) -> AveragedWeights | None:
    """Return the averages that a configuration asks for of a module, once it is sharded; None where it does not."""
    return None if config.ema_decay is None else AveragedWeights(module.parameters(), config.ema_decay)


def check_averaging(resolved: Resolved, optimizer: Optimizer) -> None:
    """Refuse averages of the weights that a schedule-free optimizer moves for each evaluation."""
    if resolved.config.ema_decay is not None and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"{resolved.describe('ema_decay')} was asked for with {type(optimizer).__name__}, which puts averages of "
            "its own into the model for an evaluation; leave one of the two out"
        )
