"""The partitions that a rank holds of an engine's parameters: fp32 values, optimizer state, 16-bit copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from accel_trainer.checkpoint.boxes import Box, boxes_of_run
from accel_trainer.runtime.model_wrappers import unsharded_shape


def flat_partitions(zero: Any) -> list[Tensor]:
    """Return the flat fp32 partitions of this rank that stand in the engine's optimizer for the parameters."""
    # Of ZeRO-1 and 2, of ZeRO-3, and of the engine's optimizer for bf16 with fp32 sums.
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
    return list(next(getattr(zero, name) for name in names if getattr(zero, name, None) is not None))


@dataclass(frozen=True)
class RunBox:
    """A box of a tensor whose elements lie in one piece within a run."""

    box: Box
    offset: int
    """Of its first element in the run."""

    def within(self, run: Tensor) -> Tensor:
        """Return the view of a flat run that has the elements of the box, in its shape."""
        return run.narrow(0, self.offset, self.box.num_elements).view(self.box.sizes)


@dataclass(frozen=True)
class Run:
    """Elements of a tensor, from `begin` on in row-major order, that this rank holds one after the other."""

    shape: tuple[int, ...]
    """Unsharded, of the tensor."""
    begin: int
    length: int
    flat: int = -1
    """Index of the flat partition that holds them; -1 for a parameter that is not trained."""
    offset: int = 0
    """Of the first element in that partition."""

    def boxes(self) -> list[RunBox]:
        """Return the boxes that the run is made of, the largest first."""
        boxes, offset = [], 0
        for box in boxes_of_run(self.shape, self.begin, self.begin + self.length):
            boxes.append(RunBox(box, offset))
            offset += box.num_elements
        return sorted(boxes, key=lambda own: -own.box.num_elements)

    def within(self, flat: Tensor) -> Tensor:
        """Return the view of a flat partition, or of its state, that has the run's elements."""
        return flat.detach().narrow(0, self.offset, self.length)

    def of_full(self, tensor: Tensor) -> Tensor:
        """Return the run's elements of the unsharded tensor, flat."""
        return tensor.detach().reshape(-1)[self.begin : self.begin + self.length]


class Partitions:
    """The partitions of an engine's optimizer on this rank, by parameter. Nothing is communicated."""

    def __init__(self, zero: Any) -> None:
        """Take the engine's optimizer; without one, nothing is trained."""
        self._zero = zero
        self._is_stage_3 = hasattr(zero, "fp16_groups")
        has_groups = any(hasattr(zero, name) for name in ("fp16_groups", "bit16_groups", "bf16_groups"))
        self._runs = (_partitioned(zero) if self._is_stage_3 else _linked(zero)) if has_groups else {}
        self.num_flat = len(flat_partitions(zero)) if has_groups else 0

    def trained(self, tensor: Tensor) -> Run | None:
        """Return this rank's run, maybe empty, of a parameter that the engine trains; None for others."""
        return self._runs.get(id(tensor))

    def frozen(self, tensor: Tensor) -> Run | None:
        """Return this rank's run of a parameter that ZeRO-3 has partitioned and does not train; None for others."""
        if id(tensor) in self._runs or not hasattr(tensor, "ds_tensor"):
            return None
        return _run_of(tensor)

    @contextmanager
    def opened(self, index: int, *, changes: bool = False) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Give a flat partition and the optimizer's state for it; where offloaded to disk, `changes` go back there."""
        zero = self._zero
        is_swapped = bool(getattr(zero, "swap_optimizer", False)) and zero._swappable_optimizer_subgroup(index)
        if is_swapped:
            zero._optimizer_states_and_gradient_swap_in(index)
        try:
            flat = flat_partitions(zero)[index]
            yield flat, self._state_of(flat)
        finally:
            if is_swapped and changes:
                zero._optimizer_states_and_gradient_swap_out(index)
            elif is_swapped:
                zero._release_swap_buffers(index)

    def _state_of(self, flat: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of a partition; of those that stay on the device, a second optimizer has it."""
        second = getattr(self._zero, "backup_optimizer", None)
        holder = second if second is not None and flat in second.state else self._zero.optimizer
        state: dict[str, Any] = holder.state[flat]
        return state

    def read(self, run: Run, key: str | None = None) -> Tensor:
        """Return the elements of a trained parameter's run, or of the optimizer's state `key` for them."""
        with self.opened(run.flat) as (flat, state):
            elements = run.within(flat if key is None else state[key])
            # Elements from a disk are in a buffer that the next read will use.
            return elements.clone() if getattr(self._zero, "swap_optimizer", False) else elements

    def write(self, run: Run, full: Tensor, key: str | None = None) -> None:
        """Copy the elements of a run out of the unsharded tensor; the counterpart of `read`."""
        with self.opened(run.flat, changes=True) as (flat, state):
            run.within(flat if key is None else state[key]).copy_(run.of_full(full))

    def update_model(self) -> None:
        """Copy changed fp32 values of all partitions into the model's own."""
        for index in range(self.num_flat):
            with self.opened(index):
                self.update_model_from(index)

    def update_model_from(self, index: int) -> None:
        """Copy changed fp32 values of a partition into the model's own, under ZeRO-3 and within `opened`."""
        if self._is_stage_3:
            self._zero._reassign_or_swap_out_partitioned_parameters(index)

    @contextmanager
    def keeping(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Context of an update that leaves values and state of parameters as they are, which took no part in it.

        torch leaves a parameter without a gradient out; in a flat partition it has one of zero, by which weight decay
        and momentum would go on. What has a gradient after all, from another rank, is updated.
        """
        flats = flat_partitions(self._zero)
        runs: dict[int, list[Run]] = {}
        for parameter in parameters:
            run = self.trained(parameter)
            if run is not None and run.length:
                runs.setdefault(id(flats[run.flat]), []).append(run)
        held: list[tuple[Tensor, Run, Tensor, dict[str, Tensor]]] = []

        def hold(optimizer: Optimizer, *given: Any) -> None:
            for flat in (flat for group in optimizer.param_groups for flat in group["params"]):
                for run in runs.get(id(flat), ()):
                    state = {key: run.within(value).clone() for key, value in _elements(optimizer, flat)}
                    held.append((flat, run, run.within(flat).clone(), state))

        def put_back(optimizer: Optimizer, *given: Any) -> None:
            for flat, run, value, state in held:
                if flat.grad is None:  # and the optimizer has left it out by itself
                    continue
                is_idle = run.within(flat.grad).eq(0).all()  # on its device: nothing waits for it
                run.within(flat).copy_(torch.where(is_idle, value, run.within(flat)))
                for key, present in _elements(optimizer, flat):
                    now = run.within(present)  # before its first step there was none, which is zeros
                    now.copy_(torch.where(is_idle, state.get(key, torch.zeros_like(now)), now))
            held.clear()

        steppers = [self._zero.optimizer, getattr(self._zero, "backup_optimizer", None)] if runs else []
        handles = [each.register_step_pre_hook(hold) for each in steppers if each is not None]
        handles += [each.register_step_post_hook(put_back) for each in steppers if each is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # --- state of the optimizer -------------------------------------------------------------------------------------

    @property
    def master_dtype(self) -> torch.dtype:
        """Type of the values that the optimizer updates."""
        return flat_partitions(self._zero)[0].dtype

    def state_outlines(self) -> list[dict[str, Any]]:
        """Return the optimizer's state of each flat partition, with meta tensors for values per element."""
        outlines = []
        for index in range(self.num_flat):
            with self.opened(index) as (flat, state):
                outlines.append({key: self._outline(key, value, flat) for key, value in state.items()})
        return outlines

    def _outline(self, key: str, value: Any, flat: Tensor) -> Any:
        if isinstance(value, Tensor):
            return value.to("meta") if value.shape == flat.shape else value.detach()
        # As torch's own optimizers have it: its type is the engine's business.
        return torch.tensor(float(value)) if key == "step" and self._counts_in_integers else value

    @property
    def _counts_in_integers(self) -> bool:
        return type(self._zero.optimizer).__module__.startswith("deepspeed.")

    @torch.no_grad()
    def reset_state(self, state: dict[str, Any], flat: Tensor, keys: Iterable[str], shared: Mapping[str, Any]) -> None:
        """Leave zeros of a flat partition's size under `keys` in the optimizer's state, and the values of `shared`."""
        for key in state.keys() - {*keys, *shared}:
            del state[key]
        for key in keys:
            before = state.get(key)
            if isinstance(before, Tensor) and before.shape == flat.shape:
                before.zero_()
            else:  # before its first step there is none
                state[key] = torch.zeros_like(flat)
        for key, value in shared.items():
            state[key] = self._own_value(key, value, state.get(key), flat.device)

    def _own_value(self, key: str, value: Any, before: Any, device: torch.device) -> Any:
        """Return a value for all elements of a partition in the type and on the device that the optimizer wants."""
        optimizer = self._zero.optimizer
        if key == "step" and self._counts_in_integers:
            return int(value)
        if key == "step" and type(optimizer).__module__.startswith("torch.optim") and not isinstance(value, Tensor):
            value = torch.tensor(float(value))
        if not isinstance(value, Tensor):
            return value
        on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
        target = before.device if isinstance(before, Tensor) else device if on_device else "cpu"
        return value.detach().to(target, copy=True)

    def link_state(self) -> None:
        """Connect the parameters of ZeRO-1 and 2 with their runs of the optimizer's state.

        The engine does so after its first step of the first group, when the other groups have no state yet.
        """
        if hasattr(self._zero, "_hp_optimizer_states_linked"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()


def _elements(optimizer: Optimizer, flat: Tensor) -> list[tuple[str, Tensor]]:
    """Return an optimizer's state for each element of a flat partition; nothing where it has other state, too.

    An 8-bit one has scales of blocks, which do not go apart by parameters.
    """
    held = [(key, value) for key, value in optimizer.state.get(flat, {}).items() if isinstance(value, Tensor)]
    are_elements = all(value.numel() == 1 or value.shape == flat.shape for _, value in held)
    return [(key, value) for key, value in held if value.shape == flat.shape] if are_elements else []


def _linked(zero: Any) -> dict[int, Run]:
    """Return the runs of ZeRO-1 and 2: a partition may begin and end within parameters, and leaves most of them out."""
    groups = getattr(zero, "bit16_groups", None)
    runs = {}
    for index, group in enumerate(zero.bf16_groups if groups is None else groups):
        for parameter in group:
            linked, shape = parameter._hp_mapping, tuple(parameter.shape)
            if linked is None:
                runs[id(parameter)] = Run(shape, 0, 0, index)
            else:
                here, there = linked.lp_fragment_address, linked.hp_fragment_address
                runs[id(parameter)] = Run(shape, here.start, here.numel, index, there.start)
    return runs


def _partitioned(zero: Any) -> dict[int, Run]:
    """Return the runs of ZeRO-3: every rank has an equal piece of each parameter, the last ones with padding."""
    runs = {}
    for index, group in enumerate(zero.fp16_groups):
        offset = 0
        for parameter in group:
            runs[id(parameter)] = _run_of(parameter, index, offset)
            offset += parameter.partition_numel()
    return runs


def _run_of(parameter: Any, index: int = -1, offset: int = 0) -> Run:
    size = parameter.partition_numel()
    begin = min(size * dist.get_rank(parameter.ds_process_group), parameter.ds_numel)
    return Run(unsharded_shape(parameter), begin, min(size, parameter.ds_numel - begin), index, offset)


@contextmanager
def opened_partition(parameter: Any, *, changes: bool = False) -> Iterator[Tensor]:
    """Give this rank's flat partition of a parameter of ZeRO-3; where offloaded to disk, `changes` go back there."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    is_swapped = parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE
    if is_swapped:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    try:
        yield parameter.ds_tensor.data
    finally:
        if is_swapped and changes:
            parameter.nvme_swapper.swap_out_and_release([parameter])
        elif is_swapped:
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
