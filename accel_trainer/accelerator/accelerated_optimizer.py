"""The optimizer of a training loop, which steps when its accumulation window ends, and a look at all ranks' updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accel_trainer.accelerator.accumulation import PreparedUnit, finish_windows
from accel_trainer.accelerator.shared_state import Forwarded
from accel_trainer.config import MixedPrecision, NonFiniteAction, RunConfig
from accel_trainer.errors import ConfigError, DesyncError
from accel_trainer.runtime.nonfinite import NonFiniteGuard
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS, find_difference
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.tensor_trees import send_to_device
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import Capabilities, TrainUnit
from accel_trainer.strategies.gradients import choose_samples, sample_sum
from accel_trainer.strategies.optimizers import parameters_of
from accel_trainer.techniques.model_flops import device_name

if TYPE_CHECKING:
    from accel_trainer.accelerator.lost_ranks import LostRanks

UPDATES_PER_CHECK = 64
"""Updates between two comparisons of the ranks."""

__all__ = ["AcceleratedOptimizer", "move_to_device"]


def describe_models(prepared: Sequence[PreparedUnit]) -> str:
    """Return the class names of the units' models."""
    return " and ".join(type(each.unit.module).__name__ for each in prepared)


def move_to_device(state: Any, device: str | torch.device) -> Any:
    """Return the tensors of a state, in lists, tuples and dicts, on `device`; other values as they are."""
    return send_to_device(state, device)


def is_layerwise(optimizer: Any) -> bool:
    """Whether an optimizer has none of the parameters, and stands for one of each that a hook steps in the backward."""
    return hasattr(optimizer, "optimizer_dict")  # LayerWiseDummyOptimizer of transformers 5.17 to 5.23


def updates_in_backward(optimizer: Any) -> bool:
    """Whether an optimizer updates each parameter as soon as its gradient is there, as LOMO and layer-wise ones do."""
    return callable(getattr(optimizer, "fused_backward", None)) or is_layerwise(optimizer)


def check_in_backward(
    name: str, config: RunConfig, process: ProcessContext, capabilities: Capabilities, more: Mapping[str, bool] = {}
) -> None:
    """Raise ConfigError where something comes before the update and after the backward, in which `name` updates.

    Args:
        name: of the optimizer.
        more: what else the update would have to wait for, in words, and whether that is so.
    """
    waits = {
        "all processes have given their gradients": process.is_distributed,
        "the shards of a gradient are together": capabilities.shards_parameters or capabilities.builds_engine,
        "fp16 is unscaled": config.mixed_precision is MixedPrecision.FP16,
        "on_nonfinite='skip_step' can leave an update out": config.on_nonfinite is NonFiniteAction.SKIP_STEP,
        **more,
    }
    found = " and ".join(each for each, is_so in waits.items() if is_so)
    if found:
        raise ConfigError(
            f"{name} updates each parameter in the backward, before {found}; train with it on one process, in fp32 or "
            "bf16, with one micro-batch in an update, or use another optimizer"
        )


class _OfWrapped(Forwarded[Any]):
    """An attribute of the wrapped optimizer, which may be set."""

    def __init__(self, name: str) -> None:
        super().__init__(f"optimizer.{name}")
        self._name = name

    def __set__(self, instance: AcceleratedOptimizer, value: Any) -> None:
        setattr(instance.optimizer, self._name, value)


class AcceleratedOptimizer(Optimizer):
    """Wraps the user's optimizer; `step` and `zero_grad` may be called on every micro-batch.

    Inside `accumulate()` they act on the last micro-batch of the window only. State, groups and hooks are those of the
    wrapped optimizer, found under `.optimizer`. It may hold parameters of several models, whose windows are one then.
    On one process it may also hold those of no prepared model, and then steps whenever it is asked to.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        optimizer: Optimizer,
        prepared: Sequence[PreparedUnit],
        guard: NonFiniteGuard | None = None,
        replica_check: ReplicaCheck | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: the wrapped optimizer holds the groups and the state.
        self.optimizer = optimizer
        self.prepared = tuple(prepared)
        self._step_was_skipped = False
        self.updates_in_backward = updates_in_backward(optimizer)
        """Whether the parameters have been updated, and the gradients are gone, when `step` is called."""
        self._guard = guard
        self._replica_check = replica_check
        self.lost_ranks: LostRanks | None = None

    state = _OfWrapped("state")
    param_groups = _OfWrapped("param_groups")
    defaults = _OfWrapped("defaults")
    register_step_pre_hook = _OfWrapped("register_step_pre_hook")
    register_step_post_hook = _OfWrapped("register_step_post_hook")

    @cached_property  # whose value an update reads without a call
    def samples(self) -> dict[Tensor, str]:
        """A few of the parameters, the same on all ranks, with their names in the models; one of no model has none."""
        models = [prepared.unit.module for prepared in self.prepared]
        names = {id(value): name for model in models for name, value in model.named_parameters()}
        return {value: names.get(id(value), "") for value in choose_samples(parameters_of(self))}

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left the parameters as they were, because its gradients were no numbers."""
        return self._step_was_skipped

    @property
    def ends_window(self) -> bool:
        """Whether `step` acts now: the current micro-batch is the last of its accumulation window."""
        return all(prepared.window.is_last for prepared in self.prepared)

    @property
    def has_stepped(self) -> bool:
        """Whether the step of this micro-batch has changed the parameters."""
        return not self._step_was_skipped and self.ends_window

    @section("optimizer step")
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters at the end of an accumulation window; return the first result of `closure`.

        Raises:
            ConfigError: it holds parameters of several models, and only some of their windows end.
        """
        if not self.ends_window:
            self._require_one_window()
            return None
        PROGRESS.updates += 1
        if self.updates_in_backward:
            # By the loss: it raises, warns or rolls back.
            self._step_was_skipped = self._guard is not None and self._guard.skips()
            self._end_update()
            return None
        if not self.prepared:
            return self.optimizer.step(closure)
        if not self._finish_windows():
            return None
        if self._replica_check is not None and PROGRESS.updates % UPDATES_PER_CHECK == 0:
            self._replica_check.note_update(self)
        # One step, whichever of the units it is asked of.
        unit = self.prepared[0].unit
        if closure is None:
            return self._end_update() if self._step_unit(unit) else None
        returned: list[Any] = []

        def recorded() -> Any:
            returned.append(closure())
            return returned[-1]

        if self._guard is not None:
            self._guard.drop()
        self._step_was_skipped = not unit.step(recorded, optimizer=self.optimizer).applied
        self._end_update()
        return returned[0] if returned else None

    def _finish_windows(self) -> bool:
        """Complete the gradients; return False where a rank is lost meanwhile.

        The update begins again then, or has come from a rank that had completed it.
        """
        lost, finish = self.lost_ranks, partial(finish_windows, self.prepared)
        if lost is None:
            finish()
            return True
        if lost.must_step:
            return True
        if not lost.takes_given() and lost.attempt(finish) and not lost.takes_given():
            return True
        self._step_was_skipped = False
        if self._guard is not None:
            self._guard.drop()
        return False

    def _end_update(self) -> None:
        """Take the new weights into the averages of the models that this optimizer is the last one of."""
        if self.lost_ranks is not None:
            self.lost_ranks.note_update()
        for prepared in self.prepared:
            prepared.took_backward = True  # also where none was seen to reach the model: it may be dropped now
            unit = prepared.unit
            if unit.backward_updates is not None:
                unit.backward_updates.end_update()
            if unit.averages is not None and not self._step_was_skipped and unit.optimizers[-1] is self.optimizer:
                unit.averages.update()

    def _step_unit(self, unit: TrainUnit) -> bool:
        """Update the parameters of all its units; return False where a rank is lost, and the update begins again."""
        guard, lost = self._guard, self.lost_ranks
        if lost is None or not lost.must_step:  # else that was looked at before a vote in which a rank was lost
            self._step_was_skipped = guard is not None and not guard.is_late and self._is_left_out(guard, unit)
        if lost is not None and not lost.vote():
            self._step_was_skipped = False
            return False
        if self._step_was_skipped:
            return True
        outcome = unit.step(optimizer=self.optimizer)
        self._step_was_skipped = not outcome.applied
        if guard is not None and guard.is_late:
            guard.norm = outcome.grad_norm if outcome.applied else float("inf")
            guard.skips()
        return True

    def _is_left_out(self, guard: NonFiniteGuard, unit: TrainUnit) -> bool:
        """Return whether an update is left out because its gradients are no numbers."""
        if unit.local_replicas is not None and unit.local_replicas.is_apart:
            guard.drop()  # ranks have norms of their own: one alone would call the others, who do not come
            return False
        if guard.norm is None:  # the loop has computed none
            if unit.backward_updates is not None:
                guard.take_sample(unit.backward_updates.take_sample())
            elif guard.wants_sample and self.samples:
                guard.take_sample(sample_sum(self.samples))
            elif guard.wants_norm:
                guard.norm = unit.clip_grad_norm(parameters_of(self), float("inf"))
        return guard.skips()

    def _require_one_window(self) -> None:
        if any(prepared.window.is_last for prepared in self.prepared):
            raise ConfigError(
                f"{type(self.optimizer).__name__} steps {describe_models(self.prepared)} together, and the "
                "accumulation window of some ends here while that of others goes on; pass all of them to accumulate(), "
                "or each to set_gradient_sync()"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients before a window's first backward or after its last; keep them in between."""
        if not all(prepared.may_drop_gradients for prepared in self.prepared):
            return
        if not self.prepared:
            return self.optimizer.zero_grad(set_to_none)
        if self._guard is not None:
            self._guard.drop()
        for prepared in self.prepared:
            prepared.drop_tokens()
        self.prepared[0].unit.zero_grad(set_to_none, optimizer=self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the prepared models, also as they were before `prepare()` replaced them.

        Raises:
            ConfigError: an engine has laid out its parameters, or some are of no model of this optimizer, on several
                ranks.
        """
        if any(prepared.unit.fixes_parameters for prepared in self.prepared):
            raise ConfigError(
                f"{type(self.optimizer).__name__} is in an engine, which trains the parameters that it was built with; "
                "call free_memory(), and prepare the model with an optimizer of all groups"
            )
        given = param_group["params"]
        entries = [given] if isinstance(given, Tensor) else list(given)
        self.optimizer.add_param_group({**param_group, "params": self._own_entries(entries)})

    def _own_entries(self, entries: list[Any]) -> list[Any]:
        """Return parameters of a new group, with names or without, as they are in the prepared models."""
        known = {key: own for each in self.prepared for key, own in each.unit.known_parameters().items()}
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in entries]
        unknown = sum(id(parameter) not in known for _, parameter in named)
        if unknown and self.prepared and self._replica_check is not None:
            raise ConfigError(
                f"{unknown} of {len(entries)} parameters of the new group belong to no model that "
                f"{type(self.optimizer).__name__} was prepared with: each rank would train its own; prepare the model "
                "that they are of, and the optimizer with it"
            )
        own = [(name, known.get(id(parameter), parameter)) for name, parameter in named]
        return [parameter if name is None else (name, parameter) for name, parameter in own]

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Put a schedule-free optimizer into training mode; nothing for others."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # type: ignore[attr-defined]

    def eval(self) -> None:
        """Put a schedule-free optimizer into evaluation mode; nothing for others."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    # torch's Optimizer would keep its own three attributes and lose the wrapped optimizer.
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class ReplicaCheck:
    """The comparison of an Accelerator's ranks: at saves, and every 64 updates without a wait for anybody."""

    def __init__(self, process: ProcessContext, *, has_replicas: bool) -> None:
        self._process = process
        self._has_replicas = has_replicas
        """Whether every rank holds all weights, and steps them by itself."""
        self._pending: tuple[int, dict[str, str], list[str], Tensor] | None = None

    @classmethod
    def of(cls, process: ProcessContext, *, has_replicas: bool) -> ReplicaCheck | None:
        """Return the comparison of a job's ranks; None for one process, whose steps it would cost something."""
        return cls(process, has_replicas=has_replicas) if process.is_distributed else None

    def compare(self, optimizers: Iterable[AcceleratedOptimizer], loss_scale: float | None, section: str) -> None:
        """Raise a DesyncError on every rank unless all have the same. Collective; waits for the device."""
        facts = {"the number of updates": str(PROGRESS.updates)}
        if loss_scale is not None:
            facts["the loss scale"] = f"{loss_scale:g}"
        for number, optimizer in enumerate(optimizers, 1):
            facts |= _rates(optimizer, number)
            names, sums = self._weights(optimizer)
            facts |= _as_facts(names, sums)
        if difference := find_difference(gather_or_raise(self._process, section, None, facts)):
            _raise(f"{section}: {difference}. Nothing of it was saved")

    def note_update(self, optimizer: AcceleratedOptimizer) -> None:
        """Post this rank's facts before an update, those of an accelerator at the next time; raise on a difference."""
        watch = current_watch()
        if watch is None:
            return
        if watch.facts.difference:
            _raise(watch.facts.difference)
        facts, (names, sums) = _rates(optimizer), self._weights(optimizer)
        if sums is not None and sums.device.type != "cpu":
            before, self._pending = self._pending, (PROGRESS.updates, facts, names, sums)
            if before is None:
                return
            # Computed long ago: the device is not waited for.
            update, facts, names, sums = before
        else:
            update = PROGRESS.updates
        watch.facts.post(update, {**facts, **_as_facts(names, sums)})

    def _weights(self, optimizer: AcceleratedOptimizer) -> tuple[list[str], Tensor | None]:
        """Return names and sums of a few weights that all ranks hold, fp64; None without any."""
        units = [prepared.unit for prepared in optimizer.prepared]
        if not self._has_replicas or any(unit.local_replicas and unit.local_replicas.is_apart for unit in units):
            return [], None
        samples = {name: value for value, name in optimizer.samples.items() if name and not isinstance(value, DTensor)}
        if not samples:
            return [], None
        sums = [value.detach().sum(dtype=torch.float64) for value in samples.values()]
        return list(samples), torch.stack([each.to(sums[0].device) for each in sums])


def _rates(optimizer: AcceleratedOptimizer, number: int = 1) -> dict[str, str]:
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    # None where an optimizer finds its own, as Adafactor does; one on a device would be waited for.
    known = [float(r) for r in rates if isinstance(r, int | float) or isinstance(r, Tensor) and r.device.type == "cpu"]
    name = f"the learning rate of optimizer {number} ({type(optimizer.optimizer).__name__})"
    return {name: ", ".join(f"{rate:g}" for rate in known)}


def _as_facts(names: Sequence[str], sums: Tensor | None) -> dict[str, str]:
    if sums is None:
        return {}
    # Other devices may round otherwise.
    is_cpu = sums.device.type == "cpu"
    kind = f"cpu {torch.backends.cpu.get_cpu_capability()}" if is_cpu else device_name(sums.device)
    return {f"the sum of {name} ({kind})": repr(value) for name, value in zip(names, sums.tolist(), strict=True)}


def _raise(text: str) -> NoReturn:
    raise DesyncError(
        f"the ranks are out of step: {text}. Every rank makes each update, with the same learning rate, of the same "
        "weights: look for a step under a condition that not all ranks meet, and for a collective that one leaves out "
        "(debug=True finds it). Resume from an earlier checkpoint"
    )
