"""Methods of the Accelerator that a training step calls: accumulation, backward, clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_trainer import logging
from accel_trainer.accelerator.accelerated_optimizer import describe_models, is_layerwise, updates_in_backward
from accel_trainer.accelerator.accumulation import PreparedUnit, TokenWindow, finish_windows
from accel_trainer.accelerator.settings import AcceleratorSettings
from accel_trainer.config import LossDivision
from accel_trainer.data.sampler import ShardedBatchSampler
from accel_trainer.errors import ConfigError
from accel_trainer.plugins.kwargs import AutocastKwargs
from accel_trainer.runtime.own_watch import raise_if_theirs
from accel_trainer.runtime.whereabouts import section
from accel_trainer.strategies.api import TrainUnit
from accel_trainer.strategies.gradients import leaves_of

logger = logging.get_logger(__name__)


class AcceleratorStepping(AcceleratorSettings):
    """Accumulation windows, losses and gradients of the prepared units."""

    _last_grad_norm: Tensor

    def unit_of(self, item: nn.Module | Optimizer) -> TrainUnit:
        """Return the unit of a model or optimizer; a ConfigError for one that this Accelerator has not prepared."""
        return self._prepared.get(item).unit

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update. A number that is set holds for the next windows; every rank sets the same.

        Raises:
            ConfigError: when set: it is no number from 1 on, a window is half full, or the engine has its own.
        """
        return self.config.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        if num_steps == self.gradient_accumulation_steps:
            return
        setting = f"gradient_accumulation_steps = {num_steps!r}"
        if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
            raise ConfigError(f"{setting}: expected an integer, 1 or more")
        if self.config.optimizer_in_backward:
            raise ConfigError(
                f"{setting}: with {self.resolved.describe('optimizer_in_backward')} an update is made in each backward"
            )
        if not self.strategy.capabilities.settable_accumulation:
            raise ConfigError(
                f"{setting}: strategy {self.strategy.name!r} has its number of micro-batches since the model was "
                "prepared; pass it to the Accelerator"
            )
        for window in (prepared.window for prepared in self._prepared.units):
            if window.is_open:
                raise ConfigError(
                    f"{setting} was set after {window.held} of {window.num_steps} micro-batches of an update; set it "
                    "where sync_gradients is true"
                )
        self.config = replace(self.config, accumulation=replace(self.config.accumulation, num_steps=num_steps))
        self.gradient_state.num_steps = num_steps
        self.gradient_state.plugin_kwargs["num_steps"] = num_steps
        for prepared in self._prepared.units:
            prepared.window.num_steps = num_steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its accumulation window: gradients are complete, the optimizer steps."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    def accumulate(self, *models: nn.Module | Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Context of one micro-batch: gradients are exchanged, and the optimizer steps, on the last of a window.

        A window is `gradient_accumulation_steps` micro-batches, or the rest of the loader. No argument means all
        prepared models; a list stands for those in it.

        Raises:
            ConfigError: a model is not prepared, or shares its optimizer with one that is not given.
        """
        # Half of diffusers' scripts give a list, which accelerate takes for a model that has nothing to synchronise.
        given = chain.from_iterable(each if isinstance(each, list | tuple) else [each] for each in models)
        prepared = [self._prepared.get(model) for model in given] or self._prepared.units
        for optimizer in self._prepared.optimizers:
            together = optimizer.prepared
            if len(together) > 1 and 0 < sum(each in prepared for each in together) < len(together):
                raise ConfigError(
                    f"accumulate() was given {describe_models(prepared)}, and {type(optimizer.optimizer).__name__} "
                    f"steps {describe_models(together)} together; pass all of them: accumulate(a, b)"
                )
        if not prepared:
            raise ConfigError("accumulate() was called before a model was prepared; pass the model to prepare() first")
        return self._micro_batch(prepared)

    @contextmanager
    def _micro_batch(self, units: list[PreparedUnit]) -> Iterator[None]:
        loaders = self.gradient_state.begin_micro_batch()
        for prepared in units:
            window = prepared.window
            if window.num_steps == 1:
                window.advance(None, False)  # however many batches the loader still has
            else:
                left = [loader.remaining for loader in loaders if loader.remaining is not None]
                window.advance(min(left, default=None), any(loader.end_of_dataloader for loader in loaders))
                prepared.unit.set_gradient_sync(window.exchanges_gradients)
            prepared.took_backward = False
            prepared.corrected = prepared.tokens is None and window.held == window.divisor
            if prepared.tokens is not None and window.held == 1:
                prepared.tokens.begin()
        if self.lost_ranks is not None:
            self.lost_ranks.begin_micro_batch(units)
        outer, self._prepared.current = self._prepared.current, units
        self.gradient_state.sync_gradients = units[0].window.is_last
        with nullcontext() if self.lost_ranks is None else self.lost_ranks.ending_blocks():
            try:
                yield
            except BaseException as error:
                raise_if_theirs(error)
                raise
            finally:
                self._prepared.current = outer

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any] = (), even_batches: bool | None = None) -> Iterator[None]:
        """Context for ranks with unequal numbers of samples: prepared loaders need none, and `joinables` is not used.

        Args:
            even_batches: whether prepared loaders whose passes begin in the block fill up their last step.
        """
        if even_batches is None:
            yield
            return
        samplers = [
            sampler
            for loader in self._prepared.dataloaders
            for sampler in (loader.batch_sampler, loader.sampler)
            if isinstance(sampler, ShardedBatchSampler)
        ]
        if len(samplers) < len(self._prepared.dataloaders):
            logger.warning(
                "join_uneven_inputs(even_batches=%s) leaves loaders of iterable datasets alone", even_batches
            )
        before = [sampler.even_batches for sampler in samplers]
        try:
            for sampler in samplers:
                sampler.even_batches = even_batches
            yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the gradients of the backwards in this block on this rank."""
        unit = self.unit_of(model)
        unit.set_gradient_sync(False)
        try:
            yield
        finally:
            unit.set_gradient_sync(True)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Exchange gradients in the backward of this block, although its forward ran without: in `no_sync`, or earlier.

        The optimizer's step still waits for the window's end. Every trained parameter takes part in the backward.
        Collective with several processes.

        Raises:
            ConfigError: DDP runs with `find_unused_parameters`, and decides in the forward.
        """
        return self._prepared.get(model).unit.sync_in_backward()

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Set, in windows made by hand, whether the next backward of `model` exchanges gradients, and its steps act."""
        prepared = self._prepared.get(model)
        prepared.window.is_last = enabled
        prepared.unit.set_gradient_sync(enabled)
        self.gradient_state.sync_gradients = enabled

    @section("backward")
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of `loss`; in `accumulate()` those of a window are the mean over its micro-batches.

        Outside of it, in windows made by hand, each loss is divided by `gradient_accumulation_steps`. Where ranks hold
        unequally many samples of a step, each loss counts by its samples, by zero on a rank without any. Collective on
        the last micro-batch of a window.

        Args:
            kwargs: of `Tensor.backward`; of LOMO optimizers, `learning_rate`.

        Raises:
            Exception: a background save has failed; on all ranks.
            RemoteRankError: another rank has failed or is gone, and gradients cannot be exchanged.
        """
        self._meter()
        if self.has_lomo_optimizer:
            return self.lomo_backward(loss, **kwargs)
        if self._checkpointer.background is not None and self.sync_gradients:
            self._checkpointer.background.poll()
        units = self._prepared.current or self._leading_units(loss)
        if not units:
            return self._backward_alone(loss, **kwargs)
        leading, in_window = units[0], bool(self._prepared.current)
        if in_window and self.lost_ranks is not None and not leading.window.held:
            return self.lost_ranks.leave_out_backward()
        loss = self._weigh(leading, loss, in_window)
        if self.nonfinite_guard is not None:
            self.nonfinite_guard.add_loss(loss, kwargs)
        reached = _reached(self._prepared.current, loss)
        if self._exchange(leading, loss, in_window, kwargs):
            for prepared in units:
                prepared.take_backward(prepared in reached)

    def _exchange(self, leading: PreparedUnit, loss: Tensor, in_window: bool, kwargs: dict[str, Any]) -> bool:
        """Run the backward; return False where a rank is lost in it, and the update begins again."""
        backward = partial(leading.unit.backward, loss, **kwargs)
        if self.lost_ranks is not None:
            if in_window:
                return self.lost_ranks.attempt(backward)
            self.lost_ranks.note_window_by_hand()
        try:
            backward()
        except RuntimeError as error:
            raise_if_theirs(error)
            raise
        return True

    def _meter(self) -> None:
        if self.meters is not None:
            self.meters.take(self.gradient_state.rows_over(self.readers.world_size), self.readers.rank)

    def _leading_units(self, loss: Tensor) -> list[PreparedUnit]:
        """Return the unit that a backward outside of `accumulate()` is given to; none before one is prepared."""
        units = self._prepared.units
        if len(units) < 2:
            return units
        trained = [prepared for prepared in units if prepared.unit.optimizers] or units
        # Of several the first will do, but for an engine's, which takes part in the backward of its own model alone.
        if len(trained) < 2 or not self.strategy.capabilities.builds_engine:
            return trained[:1]
        reached = leaves_of(loss)
        found = [prepared for prepared in trained if prepared.unit.has_any(reached)]
        if len(found) == 1:
            return found
        names = ", ".join(type(prepared.unit.module).__name__ for prepared in found or trained)
        raise ConfigError(
            f"backward() was called with a loss of {len(found)} prepared models ({names}), and an engine takes part in "
            "the backward of its own model alone: freeze the parameters of the others (model.requires_grad_(False)), "
            "or use strategy 'ddp' or 'fsdp2'"
        )

    def _weigh(self, leading: PreparedUnit, loss: Tensor, in_window: bool) -> Tensor:
        """Return the loss by the samples that this rank holds of the step, over the micro-batches of a window."""
        if leading.tokens is not None and leading.tokens.is_weighed:
            return loss
        divisor = leading.window.divisor if in_window else leading.window.num_steps
        # accelerate takes the rows that fill up a step for samples, also where a rank has no others.
        is_filled = self.even_batches and self.config.accumulation.loss_division is LossDivision.ACCELERATE
        weight = 1.0 if is_filled else self.gradient_state.loss_weight(self.readers)
        loss = loss if weight == 1.0 else loss * weight
        return loss if divisor == 1 else loss / divisor

    def _backward_alone(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulate gradients where no model is prepared: on one process in full precision, as torch does."""
        if self.process.is_distributed or self.scaler is not None:
            raise ConfigError("backward() was called before a model was prepared; pass the model to prepare() first")
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def lomo_backward(self, loss: Tensor, learning_rate: float | None = None) -> None:
        """Run the backward of `loss` by the prepared LOMO optimizers, which update parameters in it. On one process.

        Raises:
            ConfigError: no such optimizer is prepared, there is no learning rate, or gradients are to be accumulated.
        """
        held = [each.optimizer for each in self._prepared.optimizers]
        found = [each for each in held if updates_in_backward(each) and not is_layerwise(each)]
        if not found or learning_rate is None or self.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"lomo_backward(learning_rate={learning_rate}) with {len(found)} LOMO optimizer(s) and "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: it updates parameters of "
                "prepared LOMO optimizers at once; call backward(loss, learning_rate=...) with accumulation of 1"
            )
        if self.nonfinite_guard is not None:
            self.nonfinite_guard.add_loss(loss)
        for optimizer in found:
            optimizer.fused_backward(loss, learning_rate)  # type: ignore[attr-defined]

    def global_token_mean(self, loss_sum: Tensor, num_tokens: Tensor | int) -> Tensor:
        """Return a loss for `backward` that makes the update's gradient that of the mean over all its tokens.

        Over the accumulation window and all ranks. All losses of a window have to come from here. The result is no
        mean to log: for that, `reduce` sums and numbers.

        Collective at the end of a window, where `clip_grad_norm_` or `optimizer.step()` sum the numbers of tokens, and
        in the first call. A rank without samples counts none; samples that fill up a last batch (`even_batches=True`)
        count like others.

        Args:
            loss_sum: scalar, the sum of the losses of this micro-batch's tokens on this rank.
            num_tokens: of how many tokens; a window without any leaves gradients at zero.

        Raises:
            ConfigError: an argument is no scalar, or no model is prepared.
        """
        units = self._prepared.current or self._prepared.units[:1]
        device = loss_sum.device
        if isinstance(num_tokens, int):
            count = torch.full((), num_tokens, device=device)  # by the device: a copy to it would wait
        else:
            count = torch.as_tensor(num_tokens).to(device, non_blocking=device.type != "cpu")
        if not units or loss_sum.numel() != 1 or count.numel() != 1 or count.is_floating_point():
            raise ConfigError(
                f"global_token_mean() got a loss of shape {tuple(loss_sum.shape)} and tokens {num_tokens!r} for "
                f"{len(units)} prepared model(s); it takes a sum (reduction='sum') and an integer, after prepare()"
            )
        count = count.detach().reshape(()).to(torch.int64)
        rows = self.gradient_state.rows_over(self.readers.world_size)
        if rows is not None and rows.rows[self.readers.rank] == 0:
            # The one row of this batch is a filler, so that this rank takes part in the collectives.
            loss_sum, count = loss_sum * 0, count * 0
        windows = []
        for prepared in units:
            prepared.tokens = prepared.tokens or TokenWindow(self.readers)
            windows.append(prepared.tokens)
        divisor = windows[0].provisional_divisor(count, units[0].window.num_steps)
        for window in windows:
            window.add(count, divisor)
        # Strategies average gradients over the ranks that read, hence their number as a factor.
        return loss_sum.reshape(()) * (self.readers.world_size / divisor)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Context for computations outside of the model, a loss for instance, in the configured precision.

        Args:
            autocast_handler: options for this block alone; `enabled=False` also ends another autocast.

        Raises:
            ConfigError: the handler sets `output_dtype`, which concerns prepared models.
        """
        if autocast_handler is None:
            return self.precision.autocast(self.process.device.type)
        if autocast_handler.output_dtype is not None:
            raise ConfigError(
                f"autocast() was given AutocastKwargs(output_dtype={autocast_handler.output_dtype!r}), which says what "
                "prepared models return; pass it to Accelerator(kwargs_handlers=[...])"
            )
        options = autocast_handler.autocast_options()
        policy = replace(
            self.precision,
            autocast_enabled=options.get("enabled", self.precision.autocast_enabled),
            cache_enabled=options.get("cache_enabled", self.precision.cache_enabled),
        )
        return policy.autocast(self.process.device.type)

    @section("gradient clipping")
    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Bound the global gradient norm of `parameters`; return the norm before clipping. Collective.

        Acts on the last micro-batch of an accumulation window; before it, nothing is clipped and the norm of the last
        update is returned (NaN before the first). Where no model is prepared, it clips as torch does.

        Returns:
            Scalar, on the gradients' device.

        Raises:
            ConfigError: the parameters were taken before prepare() sharded them.
        """
        if not self.gradient_state.sync_gradients:
            return self._last_grad_norm
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self._prepared.units:
            return nn.utils.clip_grad_norm_(given, max_norm, norm_type)
        unit = self._unit_for(given)
        # A rank was lost in it, and the update begins again, or has come from another rank.
        if not self.gradient_state.sync_gradients or (self.lost_ranks is not None and self.lost_ranks.is_given):
            return self._last_grad_norm
        norm = unit.clip_grad_norm(given, max_norm, norm_type)
        if norm is not None:
            self._last_grad_norm = norm
            if self.nonfinite_guard is not None and not self.nonfinite_guard.is_late:
                before = self.nonfinite_guard.norm  # of another part of the gradients
                self.nonfinite_guard.norm = norm if before is None else norm + before
        return self._last_grad_norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the gradients of `parameters` to [-clip_value, clip_value] on the last micro-batch of a window."""
        if self.sync_gradients:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._prepared.units:
                self._unit_for(given).clip_grad_value(given, clip_value)
            else:
                nn.utils.clip_grad_value_(given, clip_value)

    def _unit_for(self, parameters: list[Tensor]) -> TrainUnit:
        """Return the unit to clip with, and finish the windows of every unit that holds one of the parameters."""
        units = self._prepared.units
        if len(units) > 1 or self.strategy.capabilities.shards_parameters:
            units = self._units_holding(parameters)
        finish = partial(finish_windows, units)
        if self.lost_ranks is None:
            finish()
        else:
            self.lost_ranks.attempt(finish)
        return units[0].unit

    def _units_holding(self, parameters: list[Tensor]) -> list[PreparedUnit]:
        wanted = {id(parameter) for parameter in parameters}
        held = [{id(own) for own in prepared.unit.module.parameters()} for prepared in self._prepared.units]
        found = [prepared for prepared, own in zip(self._prepared.units, held, strict=True) if wanted & own]
        stale = wanted.difference(*held) if self.strategy.capabilities.shards_parameters else ()
        if stale or not found:
            raise ConfigError(
                f"{len(stale) or len(wanted)} of {len(wanted)} parameters belong to no prepared model; sharding "
                "replaces parameters, so take model.parameters() from the model that prepare() returned"
            )
        return found

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide the gradients of one, several or all optimizers by the fp16 loss scale, once per step."""
        if optimizer is None:
            for prepared in self._prepared.units:
                prepared.unit.unscale_gradients()
            return
        for each in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
            self._prepared.get(each).unit.unscale_gradients(getattr(each, "optimizer", each))


def _reached(units: list[PreparedUnit], loss: Tensor) -> list[PreparedUnit]:
    """Return those of several units that a backward of `loss` adds gradients to; all where none is found."""
    # Models may take turns in a micro-batch: with a loss of one, the other has not had its last backward.
    if len(units) < 2 or units[0].window.num_steps == 1:
        return units
    leaves = leaves_of(loss)
    return [prepared for prepared in units if prepared.unit.has_any(leaves)] or units
