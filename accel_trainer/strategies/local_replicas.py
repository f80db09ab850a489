"""Replicas of a model that their ranks update apart for a while, and that become alike again: local SGD.

Zhang et al. 2016 (arXiv:1606.07365), Stich 2018 (arXiv:1805.09767). What decides when they become alike is elsewhere.
With an outer optimizer they become its update towards the mean: DiLoCo, Douillard et al. 2023 (arXiv:2311.08105).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from accel_trainer.config import OuterOptimizerConfig
from accel_trainer.errors import ConfigError
from accel_trainer.strategies.broadcast_values import broadcast_tensors, buckets_of, split_like
from accel_trainer.strategies.optimizers import parameters_of


class OuterOptimizer:
    """The weights that replicas left from, and an optimizer whose gradient is minus their mean change."""

    def __init__(self, module: nn.Module, build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        """Copy the parameters of `module` that are trained, and build the optimizer over the copies."""
        self._of = weakref.ref(module)
        trained = ((name, each) for name, each in module.named_parameters() if each.requires_grad)
        self._weights = {name: nn.Parameter(each.detach().clone()) for name, each in trained}
        self.optimizer = build(list(self._weights.values()))

    def is_of(self, module: nn.Module) -> bool:
        """Whether it was built for a module."""
        return self._of() is module

    @torch.no_grad()
    def leave_from(self, module: nn.Module) -> None:
        """Take the weights as they are for those that the replicas leave from."""
        for name, parameter in module.named_parameters():
            if name in self._weights:
                self._weights[name].copy_(parameter)

    @torch.no_grad()
    def step(self, module: nn.Module) -> None:
        """Update towards the weights of `module`, which are the mean, and put the result into it."""
        own = [(each, self._weights[name]) for name, each in module.named_parameters() if name in self._weights]
        for parameter, weight in own:
            weight.grad = weight - parameter
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter, weight in own:
            parameter.copy_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by name and the optimizer's state, alike on all ranks."""
        weights = {name: weight.detach() for name, weight in self._weights.items()}
        return {"weights": weights, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, on any number of ranks."""
        for name, weight in self._weights.items():
            weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def configured_outer(config: OuterOptimizerConfig) -> Callable[[list[nn.Parameter]], Optimizer] | None:
    """Return a call that builds the outer optimizer of a configuration; None where it has none."""
    if config.lr is None:
        return None
    # Without momentum Nesterov's form is the plain one, and torch refuses to be asked for it.
    nesterov = config.nesterov and config.momentum > 0
    return partial(SGD, lr=config.lr, momentum=config.momentum, nesterov=nesterov)


class LocalReplicas:
    """Replicas of one model, each with its rank's optimizers.

    Calls, on every rank: `begin`, then `end_update` after each update, and `finish`. In between `is_apart` is true:
    weights differ, and states of optimizers differ even where the weights have just been averaged, so that a checkpoint
    holds every rank's own.
    """

    def __init__(
        self, wrapper: DistributedDataParallel, optimizers: Sequence[Optimizer], *, is_asked_for: bool = False
    ) -> None:
        """Take the replicas in `wrapper` and their optimizers; if `is_asked_for`, updates before `begin` are errors."""
        self._wrapper = wrapper
        self._optimizers = optimizers
        self._is_asked_for = is_asked_for
        self._trained: set[str] = set()
        """Parameters that were trained when the weights were alike last; of others the replicas cannot differ."""
        self.num_steps = 0
        """Updates of each replica since the weights were alike; below 0, updates that exchange gradients until then."""
        self.is_apart = False
        """Whether the replicas may differ."""
        self.is_open = False
        """Whether somebody has begun with local updates, and is going to finish."""
        self.outer: OuterOptimizer | None = None
        """Of whoever has begun; None makes the mean the weights of all."""

    def begin(self, outer: OuterOptimizer | None = None, after: int = 0) -> None:
        """Exchange no gradients from now on. Replicas that are apart already go on as they are. Not collective.

        Args:
            outer: updates the weights at each exchange, instead of the mean.
            after: updates that exchange gradients before, unless a checkpoint has said how many are left.

        Raises:
            ConfigError: somebody has begun already, or DDP has to exchange gradients in its first backward.
        """
        name = type(self._wrapper.module).__name__
        if self.is_open:
            raise ConfigError(f"the replicas of {name} are updated apart already; leave that block first")
        if self._wrapper.static_graph:
            raise ConfigError(
                f"the replicas of {name} cannot be updated apart with static_graph=True: DDP learns the graph in its "
                "first exchange of gradients; leave static_graph out"
            )
        self.is_open, self.outer = True, outer
        if not self.is_apart and self.num_steps == 0:
            self.num_steps = -after
            if after == 0:
                self._part(0)

    def _part(self, num_steps: int) -> None:
        self.is_apart, self.num_steps = True, num_steps
        self._trained = self._trained_names()
        self._wrapper.require_backward_grad_sync = False
        # Else the next forward takes rank 0's buffers. DDP sets it anew at the end of each forward, by the other flag.
        self._wrapper.require_forward_param_sync = False
        if self.outer is not None and num_steps == 0:
            self.outer.leave_from(self._wrapper.module)

    def resume(self, num_steps: int | None) -> None:
        """Take over where a checkpoint has left off: at this `num_steps`, or with all alike if None."""
        if num_steps is not None and num_steps >= 0:
            self._part(num_steps)
        elif num_steps is None and self.is_open:
            if self.num_steps >= 0:
                self._part(0)
        else:
            self._join()
            self.num_steps = num_steps or 0

    def abandon(self) -> None:
        """End the local updates of this rank where it has failed: the replicas stay apart. Not collective."""
        self.is_open = False
        if not self.is_apart:
            self.num_steps = 0  # the updates that were to exchange gradients were those of this block

    def require_open(self) -> None:
        """Refuse an update of replicas that are apart, and that nobody is going to bring together again."""
        if self.is_open:
            return
        if self._is_asked_for:
            raise ConfigError(
                f"local_steps is set, and {type(self._wrapper.module).__name__} is updated outside of a LocalSGD "
                "block, where every update exchanges its gradients; train within `with LocalSGD(accelerator, model) as "
                "local_sgd`, and call local_sgd.step() after optimizer.step(), or leave local_steps out"
            )
        if self.is_apart:
            raise ConfigError(
                f"the replicas of {type(self._wrapper.module).__name__} are apart: the state was saved, or an error "
                "was raised, within a LocalSGD block, and this update is in none. Enter LocalSGD(accelerator, model, "
                "local_sgd_steps) after load_state() and before the loop; entering and leaving it averages the replicas"
            )

    def end_update(self, local_steps: int) -> None:
        """Count an update; exchange weights after every `local_steps` of them. Collective then."""
        self.num_steps += 1
        if not self.is_apart:
            if self.num_steps == 0:
                self._part(0)
        elif self.num_steps >= local_steps:
            self.average_weights()

    @contextmanager
    def as_mean(self) -> Iterator[None]:
        """Context in which all ranks have the mean of the replicas, and rank 0's buffers. Collective where they differ.

        After it each replica goes on as it was: an evaluation or a save changes nothing of the training. One more copy
        of the trained weights is held in it.
        """
        if not self.is_apart:
            yield
            return
        held, kept = self._put_mean() if self.num_steps else ([], [])
        self.is_apart = False
        try:
            yield
        finally:
            self.is_apart = True
            for tensor, own in zip(held, kept, strict=True):
                tensor.copy_(own)

    @torch.no_grad()
    def _put_mean(self) -> tuple[list[Tensor], list[Tensor]]:
        """Put the mean into the model; return its tensors, and their own values of before. Collective."""
        module, names = self._wrapper.module, self._trained | self._trained_names()
        parameters = [each.detach() for name, each in module.named_parameters() if name in names]
        held = [*parameters, *(buffer.detach() for buffer in module.buffers())]
        kept = [tensor.clone() for tensor in held]
        self._average(parameters)
        broadcast_tensors(module.buffers(), self._device)
        return held, kept

    @torch.no_grad()
    def average_weights(self) -> None:
        """Give every rank the parameters' mean, or the outer update towards it, and rank 0's buffers. Collective."""
        # Those that were trained when the replicas parted, too: one may have been frozen since, and differ.
        names = self._trained | self._trained_names()
        named = self._wrapper.module.named_parameters()
        self._average(parameter.detach() for name, parameter in named if name in names)
        if self.outer is not None and self.num_steps:  # without a local update its momentum would move the weights
            self.outer.step(self._wrapper.module)
        broadcast_tensors(self._wrapper.module.buffers(), self._device)
        self.num_steps = 0
        self._trained = self._trained_names()

    @torch.no_grad()
    def finish(self) -> None:
        """Make weights and optimizers' states alike, and exchange gradients from now on. Collective.

        Tensors of numbers become their mean over the ranks. Whatever else differs becomes rank 0's: the state of an
        optimizer that keeps integers, or that some ranks have and others not.
        """
        self.abandon()
        if not self.is_apart:
            return  # no update of their own yet
        self.average_weights()
        # States too: DDP exchanges gradients and never looks at weights, so replicas with other moments drift apart.
        for optimizer in self._optimizers:
            self._unite(optimizer)
        self._join()

    def _join(self) -> None:
        if self.is_apart:
            self.is_apart, self.num_steps = False, 0
            self._wrapper.require_backward_grad_sync = True

    def _trained_names(self) -> set[str]:
        return {name for name, parameter in self._wrapper.module.named_parameters() if parameter.requires_grad}

    @property
    def _device(self) -> torch.device:
        return next(self._wrapper.module.parameters()).device

    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their mean over the ranks; that of half precision is computed in fp32."""
        for bucket in buckets_of(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            # A bucket may mix devices: Adam counts its steps on the host, and has its moments beside the parameters.
            flat = torch.cat([tensor.reshape(-1).to(self._device, wide) for tensor in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for tensor, mean in zip(bucket, split_like(flat, bucket), strict=True):
                tensor.copy_(mean)

    def _unite(self, optimizer: Optimizer) -> None:
        """Make the state of an optimizer alike: that of its parameters, others beside, and what groups learn."""
        parameters = parameters_of(optimizer)
        held = [*(optimizer.state[parameter] for parameter in parameters), optimizer.state, *optimizer.param_groups]
        # All ranks go through the same list in the same order: what follows are collectives.
        entries = [_entry(each) for each in held]
        tensors, differing = _sort_out(entries)
        self._average(tensors)
        if not differing:
            return
        sent = [_on_cpu(entries[index]) for index in differing]
        dist.broadcast_object_list(sent, src=0, device=self._device)
        if dist.get_rank() == 0:
            return
        for index, entry in zip(differing, sent, strict=True):
            for key in entries[index].keys() - entry.keys():
                del held[index][key]
            like = parameters[index] if index < len(parameters) else None
            held[index].update({key: _placed(value, entries[index].get(key), like) for key, value in entry.items()})


def _entry(held: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a part of an optimizer's state in an order of its own, without parameters and their state."""
    keys = [key for key in held if key != "params" and not isinstance(key, Tensor)]
    return {key: held[key] for key in sorted(keys, key=repr)}


def _sort_out(entries: Sequence[Mapping[Any, Any]]) -> tuple[list[Tensor], list[int]]:
    """Return the tensors that ranks can average, and the indices of the entries that they cannot. Collective."""
    described: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(described, [_describe(entry) for entry in entries])
    tensors, differing = [], []
    for index, entry in enumerate(entries):
        own = [value for value in entry.values() if isinstance(value, Tensor)]
        is_alike = all(other[index] == described[0][index] for other in described)
        if is_alike and all(value.is_floating_point() for value in own):
            tensors += own
        else:
            differing.append(index)
    return tensors, differing


def _describe(entry: Mapping[Any, Any]) -> list[Any]:
    return [
        (repr(key), (str(value.dtype), tuple(value.shape)) if isinstance(value, Tensor) else repr(value))
        for key, value in entry.items()
    ]


def _on(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _on_cpu(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: _on(value, "cpu") for key, value in entry.items()}


def _placed(value: Any, before: Any, parameter: Tensor | None) -> Any:
    """Move a received tensor to where this rank has kept it; else to its parameter, where it has the same shape."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(before, Tensor):
        return value.to(before.device)
    return value.to(parameter.device) if parameter is not None and value.shape == parameter.shape else value


def require_replicas(
    replicas: LocalReplicas | None, module: nn.Module, strategy: str, is_scaled: bool
) -> LocalReplicas:
    """Return the replicas of a prepared model; a ConfigError where its strategy keeps none, or losses are scaled."""
    if is_scaled:
        raise ConfigError(
            "LocalSGD was asked for with mixed_precision='fp16', whose loss scale all ranks share: an overflow on "
            "one of them would skip an update there only; use bf16"
        )
    if replicas is None:
        raise ConfigError(
            f"LocalSGD needs a replica of {type(module).__name__} on every rank that trains it, and "
            f"strategy {strategy!r} keeps none here; use strategy 'ddp', and prepare the model for training"
        )
    return replicas
