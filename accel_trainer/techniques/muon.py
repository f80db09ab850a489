"""Muon: the matrices of hidden layers by orthogonalized momentum, all else by AdamW, in one optimizer, sharded or not.

Method of Jordan (https://kellerjordan.github.io/posts/muon), with the rates of Liu et al. (arXiv 2502.16982), by which
one learning rate and one weight decay serve both kinds of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer

from accel_trainer.checkpoint.boxes import Box, chunk_of
from accel_trainer.checkpoint.shards import local_box, local_tensor, wrap_local_like
from accel_trainer.errors import ConfigError

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_Matrix = tuple[Any, Tensor, dict[str, Any]]
"""A parameter, this rank's shard of the matrix to orthogonalize, and the parameter's group."""


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters in groups for `Muon`: hidden matrices, and the others, as far as there are any.

    Hidden matrices have two dimensions, or three where they are those of several experts. Embeddings, and heads, which
    of models of transformers are all that is outside of `base_model`, are among the others.
    """
    outer = _outer_parameters(model)
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[parameter.ndim in (2, 3) and id(parameter) not in outer].append(parameter)
    return [{"params": own, "use_muon": use_muon} for use_muon, own in groups.items() if own]


def _outer_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and heads."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # of PEFT, the model within
    body = getattr(inner, "base_model", inner)
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    outer = {*map(id, body.parameters())} ^ {*map(id, inner.parameters())}
    for module in model.modules():
        if module is head or isinstance(module, nn.Embedding):
            outer.update(map(id, module.parameters()))
    return outer


class Muon(Optimizer):
    """One optimizer with groups of both kinds: `use_muon` says which, and is true where a group does not say.

        optimizer = Muon(muon_groups(model), lr=1e-3, weight_decay=0.1)

    A matrix A x B becomes `(1 - lr * weight_decay) * matrix - 0.2 * sqrt(max(A, B)) * lr * direction`, where direction
    is the momentum with singular values near 1: torch.optim.Muon(adjust_lr_fn="match_rms_adamw"). A parameter of three
    dimensions is a matrix for each index of the first. The iteration is in bf16, on a CPU in fp32. Groups without
    `use_muon` are AdamW's of torch, with the same rate and decay.

    Of matrices that FSDP2 shards, each rank orthogonalizes some: ranks exchange their shards, twice for as many
    matrices as there are ranks. Where tensor parallelism shards them, too, every rank does all. `step` is collective
    then.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Take parameters, or groups of them.

        Args:
            ns_steps: iterations of Newton and Schulz.
            betas, eps: of AdamW.

        Raises:
            ConfigError: a parameter of a group with `use_muon` has neither two nor three dimensions.
        """
        self._adamw = AdamW([nn.Parameter(torch.empty(0))], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        own = {"use_muon": True, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(params, self._adamw.defaults | own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `Optimizer`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = [tuple(p.shape) for p in group["params"] if group["use_muon"] and p.ndim not in (2, 3)]
        if wrong:
            self.param_groups.pop()
            raise ConfigError(
                f"a group with use_muon has a parameter of shape {wrong[0]}; Muon takes matrices, or several of a kind "
                "in one parameter: give it muon_groups(model), or set use_muon=False in the group of the others"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the result of `closure`, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared: dict[Any, list[_Matrix]] = {}
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is None:
                    continue
                direction, axes = self._direction(parameter, group), _axes_within(parameter)
                if len(axes) == 1 and type(parameter.placements[axes[0]]) is Shard:
                    # By what travels together; in the order of all ranks.
                    ranks = parameter.device_mesh.get_group(axes[0])
                    shared.setdefault((ranks, direction.dtype), []).append((parameter, direction, group))
                elif axes:
                    full = wrap_local_like(parameter, direction).full_tensor()  # type: ignore[attr-defined]
                    own = local_box(parameter).within(Box.full(parameter.shape))
                    _apply(parameter, _orthogonalize(full, group["ns_steps"])[own], group)
                else:
                    _apply(parameter, _orthogonalize(direction, group["ns_steps"]), group)
        for (ranks, _), matrices in shared.items():
            _update_shards(matrices, ranks)
        self._step_others()
        return loss

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Move the momentum of a parameter on; return this rank's shard of the matrix to orthogonalize."""
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local_tensor(parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum = local_tensor(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return direction.to(torch.float32 if direction.is_cpu else torch.bfloat16)

    def _step_others(self) -> None:
        # torch's own, on the groups and the state of this optimizer.
        if "_adamw" not in vars(self):  # torch copies and pickles no attribute
            self._adamw = AdamW([nn.Parameter(torch.empty(0))])
        adamw = self._adamw
        adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        adamw.state = self.state
        adamw.step()


def _axes_within(parameter: Tensor) -> list[int]:
    """Return the axes of a parameter's mesh that shard its matrices, and not only share them out."""
    if not isinstance(parameter, DTensor):
        return []
    dims = [getattr(placement, "dim", None) for placement in parameter.placements]
    return [axis for axis, dim in enumerate(dims) if dim is not None and dim % parameter.ndim >= parameter.ndim - 2]


def _orthogonalize(matrices: Tensor, num_steps: int) -> Tensor:
    """Return matrices (..., A, B) with the same singular vectors, and singular values near 1, by Newton and Schulz."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)  # the spectral norm is at most 1 then
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _update_shards(matrices: list[_Matrix], ranks: dist.ProcessGroup) -> None:
    """Update this rank's shards of matrices that ranks share. Collective."""
    # Those of about the same size together: each rank has one of them.
    matrices.sort(key=lambda entry: entry[0].numel())
    size = dist.get_world_size(ranks)
    for begin in range(0, len(matrices), size):
        wave = matrices[begin : begin + size]
        for (parameter, _, group), update in zip(wave, _orthogonalize_shards(wave, ranks), strict=True):
            _apply(parameter, update, group)


def _orthogonalize_shards(wave: Sequence[_Matrix], ranks: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's shards of matrices, at most one for each of the ranks that share them. Collective."""
    rank, size = dist.get_rank(ranks), dist.get_world_size(ranks)
    directions = [direction for _, direction, _ in wave]
    num_sent = [direction.numel() for direction in directions] + [0] * (size - len(wave))
    own = wave[rank] if rank < len(wave) else None
    num_received = [0] * size if own is None else [math.prod(shape) for shape in _shard_shapes(own, size)]
    parts = _exchange(torch.cat([each.reshape(-1) for each in directions]), num_received, num_sent, ranks)
    if own is not None:
        parts = _orthogonalize_parts(parts.split(num_received), own)
    updates = _exchange(parts, num_sent, num_received, ranks).split(num_sent)
    return [update.view_as(each) for update, each in zip(updates, directions, strict=False)]


def _shard_shapes(matrix: _Matrix, size: int) -> list[list[int]]:
    """Return the shapes of the shards of a matrix on the ranks that share it."""
    parameter, own, _ = matrix
    dim = _sharded_dim(parameter)
    lengths = [chunk_of(parameter.shape[dim], size, each)[1] for each in range(size)]
    return [[*own.shape[:dim], length, *own.shape[dim + 1 :]] for length in lengths]


def _orthogonalize_parts(parts: Sequence[Tensor], matrix: _Matrix) -> Tensor:
    """Return the shards of a matrix, one after the other, orthogonalized as a whole."""
    dim, shapes = _sharded_dim(matrix[0]), _shard_shapes(matrix, len(parts))
    whole = torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)
    whole = _orthogonalize(whole, matrix[2]["ns_steps"])
    return torch.cat([part.reshape(-1) for part in whole.split([shape[dim] for shape in shapes], dim)])


def _sharded_dim(parameter: Any) -> int:
    axis = _axes_within(parameter)[0]
    return int(parameter.placements[axis].dim) % parameter.ndim


def _exchange(flat: Tensor, num_received: list[int], num_sent: list[int], ranks: dist.ProcessGroup) -> Tensor:
    received = flat.new_empty(sum(num_received))
    dist.all_to_all_single(received, flat, num_received, num_sent, group=ranks)
    return received


def _apply(parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    rate, own = float(group["lr"]), local_tensor(parameter)
    own.mul_(1 - rate * group["weight_decay"])
    own.add_(update, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape[-2:])))
