"""Loss parallelism: the cross entropy of logits whose vocabulary is sharded over the ranks that share a model's layers.

Nobody gathers logits in training: ranks exchange two numbers for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accel_trainer.errors import ConfigError
from accel_trainer.strategies.parallel.plans import Plan, planned_model
from accel_trainer.strategies.parallel.tensor_parallel import ShardedForward


def _head(model: nn.Module) -> nn.Module | None:
    """Return the module that makes the logits of a causal language model whose loss is the usual one, if it is one."""
    # Its own: some wrapper may hand out that of the model inside.
    loss = getattr(model, "loss_function", None) if hasattr(type(model), "loss_function") else None
    is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if is_causal and callable(get_head) else None


def check_loss(model: nn.Module, plan: Plan, origin: str) -> None:
    """Refuse a model that does not make its loss of logits whose vocabulary the plan shards. Changes nothing."""
    head = _head(planned_model(model)[1])
    parts = set() if head is None else set(map(id, head.modules()))
    if not any(style.gives == "join" and id(model.get_submodule(where)) in parts for where, style in plan.items()):
        found = "makes no loss of its own in the way of causal language models" if head is None else "has a full head"
        raise ConfigError(
            f"{origin}: {type(model).__name__} {found}; expected a model of transformers whose loss_function is "
            "ForCausalLMLoss, and a plan that has its head as 'colwise_gather_output'; leave loss_parallel off"
        )


def shard_loss(model: Any, mesh: DeviceMesh) -> None:
    """Have a model, whose layers are sharded, make its loss of sharded logits in training. Not collective."""
    inner: Any = planned_model(model)[1]
    sharded = _ShardedLoss(inner, mesh)
    inner.forward, inner.loss_function = sharded, sharded.loss


class _ShardedLoss:
    """The forward of a causal language model that gathers no logits where it makes a loss to be trained.

    Lives in the model's `forward` attribute. The logits of its output are then a DTensor, sharded along the vocabulary.
    """

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        head: Any = _head(model)
        self.model, self.mesh = model, mesh
        forwards = (module.__dict__.get("forward") for module in head.modules())
        self.heads = [f for f in forwards if isinstance(f, ShardedForward) and f.style.gives == "join"]
        """The head, or what adapters have put in its place."""
        self.joins = True
        """Whether they join their shards."""
        self.inner: Callable[..., Any] = model.__dict__.get("forward") or partial(type(model).forward, model)
        self.full_loss: Callable[..., Tensor] = model.loss_function
        self.shape: tuple[int, ...] = ()
        """Of the last sharded logits of which there was a loss."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_given = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
        if not (is_given and self.model.training and torch.is_grad_enabled()):
            return self.inner(*args, **kwargs)
        self._set_joins(False)
        try:
            output = self.inner(*args, **kwargs)
        finally:
            self._set_joins(True)
        # Where logits are in a tuple depends on the model: they are the first of their shape.
        is_tuple = isinstance(output, tuple)
        place: Any = next(i for i, x in enumerate(output) if _shape(x) == self.shape) if is_tuple else "logits"
        logits = DTensor.from_local(output[place], self.mesh, [Shard(len(self.shape) - 1)], run_check=False)
        if is_tuple:
            return (*output[:place], logits, *output[place + 1 :])
        output[place] = logits
        return output

    def _set_joins(self, joins: bool) -> None:
        self.joins = joins
        for head in self.heads:
            head.joins = joins

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean cross entropy over labels, or its sum over `num_items_in_batch`."""
        if self.joins:
            return self.full_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
            )
        self.shape = logits.shape
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.flatten().to(logits.device)
        losses: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), targets, ignore_index, self.mesh)
        num_items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / (num_items.to(losses.device) if isinstance(num_items, Tensor) else num_items)


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if isinstance(value, Tensor) else None


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of logits, of which each rank has a shard of the vocabulary; 0 where nothing is to be said.

    Two numbers for each row are added up over ranks. A target beyond the vocabulary makes its row NaN: torch stops
    there, but looking would wait for the device.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, mesh: DeviceMesh) -> Tensor:
        group, length = mesh.get_group(), logits.shape[-1]
        shifted = logits.float()
        largest = shifted.amax(-1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = shifted - largest
        own = targets - length * mesh.get_local_rank()
        is_own = (own >= 0) & (own < length)
        own = own.masked_fill(~is_own, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, own).squeeze(-1).masked_fill(~is_own, 0.0)
        probabilities = shifted.exp_()
        sums = torch.stack([probabilities.sum(-1), of_target])
        dist.all_reduce(sums, group=group)
        probabilities.div_(sums[0].unsqueeze(-1))
        is_label = targets != ignore_index
        ctx.save_for_backward(probabilities, own, is_own, is_label)
        ctx.dtype = logits.dtype
        is_beyond = (targets < 0) | (targets >= length * mesh.size())
        return (sums[0].log() - sums[1]).masked_fill(is_beyond, float("nan")).masked_fill(~is_label, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, own, is_own, is_label = ctx.saved_tensors
        of_target = probabilities.gather(-1, own) - is_own.unsqueeze(-1).to(probabilities.dtype)
        logits = probabilities.scatter(-1, own, of_target).mul_((gradient * is_label).unsqueeze(-1))
        return logits.to(ctx.dtype), None, None, None
