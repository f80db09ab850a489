"""Trainer and Seq2SeqTrainer: upstream's classes with explicit overrides where they reach for accelerate.

Nothing is patched: every override has its own name here, and `tests/trainer/test_guard.py` walks the source of the
installed Trainer for methods that would need one. docs/trainer_overrides.md has the reason for each. Data loading,
optimizers, schedules, callbacks, logging, the hub and the order of everything stay upstream's.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import time
import traceback
from collections.abc import Mapping, Sized
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import (
    BestRun,
    EvalLoopOutput,
    HPSearchBackend,
    SaveStrategy,
    TrainOutput,
)

from accel_trainer.accelerator.accelerated_optimizer import AcceleratedOptimizer
from accel_trainer.big_models.dispatch import is_offloaded
from accel_trainer.config import LossDivision
from accel_trainer.data.loader import PreparedDataLoader, keeping_epoch
from accel_trainer.errors import ConfigError
from accel_trainer.runtime.memory import clear_device_cache, is_out_of_memory
from accel_trainer.runtime.model_wrappers import move_module
from accel_trainer.runtime.own_watch import failing_together
from accel_trainer.runtime.preemption import StopSignals
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.trainer.arguments.training_arguments import Seq2SeqTrainingArguments, TrainingArguments, setting
from accel_trainer.trainer.checkpoint import upstream_files
from accel_trainer.trainer.checkpoint.resuming import ResumingMethods, begin_pass, keeping_best, loading_by_override
from accel_trainer.trainer.checkpoint.saving import RunCheckpoints, SavingMethods
from accel_trainer.trainer.diagnostics import Fingerprints, UpdateProfile, explaining_memory
from accel_trainer.trainer.evaluation import EvaluationPreempted, run_evaluation
from accel_trainer.trainer.loop import EpochRun, TrainerHandover, WindowReader, plain_modules, take_back
from accel_trainer.trainer.loss import (
    LossNormalization,
    count_items,
    prepare_labels,
    smoothing_chunks,
)
from accel_trainer.trainer.loss_spikes import LossSpikes
from accel_trainer.trainer.preparation import (
    ModelPreparation,
    TakenArguments,
    build_accelerator,
    check_arguments,
    check_dataset,
    count_multiplying,
    keeping_global_batch,
    load_model,
)
from accel_trainer.trainer.run_clock import RunClock
from accel_trainer.trainer.search import BatchSizeSearch, check_search, search_with_optuna
from accel_trainer.trainer.signals import flags_of, share_metrics
from accel_trainer.trainer.training_data import (
    check_packed_model,
    check_packing_arguments,
    mixed_training_data,
    packed_for_training,
    padding_collator,
    unpacked_collator,
)
from accel_trainer.tree import is_namedtuple, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import EvalPrediction, TrainerCallback

    from accel_trainer.accelerator import Accelerator

_IS_TRAINING = operator.attrgetter("training")


class Trainer(ResumingMethods, transformers.Trainer):
    """Upstream's Trainer on accel_trainer: one process, DDP, FSDP2 or DeepSpeed, with or without accelerate.

    A Trainer of another library runs on this core by naming this class, and `TrainingArguments`, after the library's:

        @dataclass
        class SFTArguments(trl.SFTConfig, accel_trainer.TrainingArguments): ...

        class SFTTrainer(trl.SFTTrainer, accel_trainer.Trainer): ...

    What the library overrides stays as it is, and its `super()` is this class in the place of transformers.Trainer.
    Every method here is one of that class, with the same signature; `self.accelerator` is an
    `accel_trainer.Accelerator`.

    Attributes:
        arguments_class: built where a Trainer is made without arguments.
    """

    if TYPE_CHECKING:
        _created_lr_scheduler: bool
        args: TrainingArguments
        model: Any
        optimizer: Any
        lr_scheduler: Any
        accelerator: Accelerator
        gather_function: Callable[..., Any]

    arguments_class: type[TrainingArguments] = TrainingArguments
    neftune_hook_handle: Any = None
    _reader: WindowReader | None = None
    current_gradient_accumulation_steps = 1
    _modules: tuple[nn.Module, ...] = ()
    """Of the model as the epoch began, where none has a train() of its own."""
    _schedule_of_both: Any = None
    loss_spikes: LossSpikes | None = None
    _num_multiplying: tuple[int, int] | None = None
    """The model's id, and how many of its parameters multiply inputs: upstream asks in every step."""
    planned_run: Any = None
    """Of `preflight`: the contrib.preflight.PlannedRun of the last train(), on this rank."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class that would put methods here before those of another library's Trainer."""
        super().__init_subclass__(**kwargs)
        bases = (Trainer, ResumingMethods, SavingMethods)
        own = {name for base in bases for name in vars(base) if not name.startswith("__")}
        for base in cls.__mro__[cls.__mro__.index(Trainer) + 1 :]:
            hidden = sorted(own & set(vars(base)))
            if hidden and issubclass(base, transformers.Trainer) and base not in Trainer.__mro__:
                raise ConfigError(
                    f"{cls.__name__} names {base.__name__} after accel_trainer.{Trainer.__name__}, whose "
                    f"{', '.join(hidden)} would be called in the place of its own; name it first: "
                    f"class {cls.__name__}({base.__name__}, accel_trainer.{Trainer.__name__})"
                )

    if TYPE_CHECKING:
        # For type checkers: at run time it takes whatever the class behind it takes.
        def __init__(
            self,
            model: nn.Module | str | os.PathLike[str] | None = None,
            args: TrainingArguments | None = None,
            data_collator: Callable[[list[Any]], Any] | None = None,
            train_dataset: Any = None,
            eval_dataset: Any = None,
            processing_class: Any = None,
            model_init: Callable[..., nn.Module] | None = None,
            compute_loss_func: Callable[..., Any] | None = None,
            compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
            callbacks: list[TrainerCallback] | None = None,
            optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
            optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
            preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        ) -> None: ...

    else:

        def __init__(self, model: Any = None, args: TrainingArguments | None = None, *rest: Any, **kwargs: Any) -> None:
            """Build a Trainer as upstream's; `model` may also be the path or name that `from_pretrained` takes.

            Raises:
                ConfigError: `args` are not ours, `model` is neither a module nor a path, a dataset is empty, or an
                    option cannot be honoured on this device or number of processes.
            """
            if args is None:
                args = self.arguments_class(output_dir="tmp_trainer")
            check_arguments(args)
            self._loss_normalization = LossNormalization()
            self._preparation = ModelPreparation()
            # Upstream's callback (5.23, trainer_jit_checkpoint.py) acts on a rank's own signal, and hangs the others.
            jit, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
            super().__init__(load_model(model, args), args, *rest, **kwargs)
            self.data_collator = padding_collator(self.data_collator, args)
            args.enable_jit_checkpoint = jit
            self.run_checkpoints = RunCheckpoints(self.accelerator.process)
            self.run_clock = RunClock(self.accelerator.process)
            # By name: contrib imports the core, and the core nothing of contrib.
            report = importlib.import_module("accel_trainer.contrib.run_report.callback")
            self.run_report = report.RunReport(self)
            # As long as a train() lasts: each has a close() for its end, however it comes.
            self._records: list[Any] = [self.run_report]
            if args.profile:
                self._records.append(UpdateProfile(args, self.accelerator.process))
            if args.fingerprint_every:
                self._records.append(Fingerprints(self))
            for record in self._records:
                self.add_callback(record)
            self._taken_arguments = TakenArguments(self.args)
            prepare_labels(self)
            self.train_dataset = mixed_training_data(self)
            check_packing_arguments(self)

    # --- set-up ----------------------------------------------------------------------------------------------------

    is_distributed_loading_by_transformers = property(
        lambda self: False,
        lambda self, value: None,
        doc="""False: upstream (5.23, trainer.py:469) trains a model with `distributed_config` by ways of its own, and
        saves no state for it; here the strategy knows it, as it does every other.""",
    )

    def create_accelerator_and_postprocess(self) -> None:
        """Build the Accelerator of this Trainer from its arguments. Collective. Runs again for each search trial."""
        args = self.args
        self.accelerator = build_accelerator(args, self.model)
        asks_for_copies = "get_tp_size" in transformers.Trainer.compute_loss.__code__.co_names
        if self.accelerator.config.parallel.sequence_size > 1 and not asks_for_copies:
            raise ConfigError(
                f"transformers {transformers.__version__} multiplies losses by the number of processes, also of those "
                "that share the tokens of a sequence (sp_size, cp_size); use transformers 5.20 or newer for them"
            )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )
        facts = self.accelerator.strategy.capabilities
        self.is_sharded, kind = facts.shards_parameters, facts.distributed_type
        self.is_deepspeed_enabled, self.is_fsdp_enabled = kind == "DEEPSPEED", kind == "FSDP"

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if getattr(model, "hf_device_map", None) is not None:
            super()._move_model_to_device(model, device)
        elif not is_offloaded(model):
            move_module(model, device)

    def _validate_args(self) -> None:
        check_dataset(self.train_dataset, "train_dataset")
        check_dataset(self.eval_dataset, "eval_dataset")
        # Upstream would refuse `optimizers` for what the switch says; here one that holds no state yet is re-bound.
        with setting(self, is_fsdp_enabled=False):
            super()._validate_args()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        raise ConfigError(
            "_build_accelerator_args() builds arguments for Hugging Face accelerate, which is not used here; override "
            "create_accelerator_and_postprocess() and set self.accelerator to an accel_trainer.Accelerator"
        )

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> DataLoader:
        name = {"Training": "train_dataset", "Evaluation": "eval_dataset"}.get(description, "test_dataset")
        check_dataset(dataset, name)
        if name == "train_dataset":
            (dataset, collator), drops = packed_for_training(self, dataset), self.args.dataloader_drop_last
        else:
            collator, drops = unpacked_collator(self), False
        # Whatever is evaluated or predicted counts, also where updates are to have equally many samples.
        with setting(self.args, dataloader_drop_last=drops), setting(self, data_collator=collator):
            return super()._get_dataloader(dataset, description, *args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        # One that groups by length does so within a number of batches: the order is to be that of the run's beginning.
        micro_batch, accumulation = self.order_batch()
        with setting(self.args, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=accumulation):
            return super()._get_train_sampler(*args, **kwargs)

    # --- training --------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train; see upstream. Collective.

        Args:
            resume_from_checkpoint: a checkpoint, whose contents are verified before anything is loaded; True or
                "latest" is the newest good one in `output_dir` and `checkpoint_uri`, and bad ones are renamed to
                `_bad-...` with a warning. "auto" is the same, or a run that begins where there is none.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: the named one is incomplete; none of several is good.
            IncompatibleCheckpointError: updates would have other samples than those of the run that saved it, and
                `on_changed_run` refuses that; nothing has been loaded.
            ConfigError: an argument was set that cannot change once the Trainer is built; an evaluation has cast the
                weights to 16 bits.
        """
        if self.model_init is None:
            self._preparation.check_not_cast(self)
        super()._hp_search_setup(trial)  # a trial's values, before anything is made of the arguments
        self._taken_arguments.begin(self)
        searches = self._searches_batch_size = self.args.auto_find_batch_size
        # Upstream's search (5.23, trainer.py:1570) needs accelerate, and goes on with the weights that an attempt left.
        self.args.auto_find_batch_size = False
        self._num_multiplying = None
        self.run_clock = RunClock(self.accelerator.process)
        self.loss_spikes = None if self.args.on_loss_spike == "off" else LossSpikes(self.args.loss_spike_threshold)
        is_failed = True
        self.stop_signals = StopSignals(self._signals_to_note())
        try:
            with (
                failing_together(),
                explaining_memory(self),
                self.stop_signals,
                # Before _resuming(), which asks for the accumulation that this sets: a save within an update needs it.
                keeping_global_batch(self),
            ):
                self._plan()
                with self._resuming(resume_from_checkpoint) as checkpoint:
                    # A search goes on with what it had found before the checkpoint.
                    found = upstream_files.read_train_batch_size(checkpoint) if searches and checkpoint else None
                    search = BatchSizeSearch(self) if searches else None
                    with nullcontext() if search is None else search.keeping_update(found):
                        if self.run_checkpoints.resumption is not None:
                            self._check_run(self.run_checkpoints.resumption, is_searched=trial is not None)
                        run = functools.partial(super().train, checkpoint, trial, ignore_keys_for_eval)
                        output = run() if search is None else search.run(run)
                    is_failed = False
                    return output
        finally:
            self.args.auto_find_batch_size = searches
            for record in self._records:
                record.close()
            self.end_decisions(is_failed=is_failed)
            if is_failed:
                self.is_in_train = False
                self.end_local_updates(is_failed=True)
                # Upstream takes its noise off the embeddings at the end of a train() that succeeds (5.23, :2038).
                if self.neftune_hook_handle is not None:
                    self.neftune_hook_handle.remove()

    def _plan(self) -> None:
        """Plan the training that follows, where `preflight` asks for it. Not collective."""
        self.planned_run = None
        if self.args.preflight != "off":
            planning = importlib.import_module("accel_trainer.contrib.preflight")  # by name, as the report
            self.planned_run = planning.preflight_training(self)

    def go_on_without(self, error: RuntimeError) -> None:
        """Go on where `error` is that of a collective in which a rank was lost; raise it elsewhere. Collective."""
        lost = self.accelerator.lost_ranks
        assert lost is not None
        # Frames of a loop over a loader would keep its pass open.
        traceback.clear_frames(error.__traceback__)
        lost.go_on(error)
        self.meet_anew()

    def meet_anew(self) -> None:
        """Go on in another group of ranks. Every one of them calls it; they do not communicate."""
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        if self.decisions is not None:
            self.decisions.meet_anew()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> TrainOutput:
        self._loss_normalization.begin(self)
        self._preparation.release()  # before upstream frees the Accelerator's memory, the optimizer's state with it
        args.auto_find_batch_size = self._searches_batch_size
        lost, self.handover = self.accelerator.lost_ranks, TrainerHandover(self)
        with (
            nullcontext()
            if lost is None
            else lost.beginning_updates(args.gradient_accumulation_steps, self.handover, reports=bool(args.report_to))
        ):
            return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _hp_search_setup(self, trial: Any) -> None:
        """Do nothing: `train()` has taken the trial's values."""

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Do nothing: `BatchSizeSearch` has begun the attempt."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        """Prepare the model, build optimizer and schedule, load a checkpoint. Collective."""
        if isinstance(self.optimizer, AcceleratedOptimizer):
            # Of an earlier train(), whose unit was freed with the Accelerator's memory. Its state stays.
            self.optimizer = self.optimizer.optimizer
        self._taken_arguments.renew_optimizer(self, max_steps)
        if self._created_lr_scheduler:
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        model = self._preparation.prepare_for_training(self, max_steps)
        check_packed_model(self, model, train_dataloader)
        if resume_from_checkpoint is not None:
            if self.is_sharded:  # other models were loaded before they were prepared (5.23, trainer.py:1563)
                with loading_by_override(self):
                    self._load_from_checkpoint(resume_from_checkpoint)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
            upstream_files.load_averages(self, resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self.begin_local_updates(resume_from_checkpoint)
        self._join_others()
        if self.is_world_process_zero():
            if (resumption := self.run_checkpoints.resumption) is not None:
                resumption.warn_of_changes(self)
            self.run_report.begin(model)
        return model, train_dataloader

    def _join_others(self) -> None:
        """Join the others in the middle of their training, in a process that was started in a lost rank's place."""
        if self.accelerator.process.is_alone and self.accelerator.lost_ranks is not None:
            self.begin_decisions()  # which compares what ranks do: the others have done so
            self.accelerator.lost_ranks.join()
            self.meet_anew()

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: DataLoader,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        if (num_before := self.handover.begin_epoch(epoch)) is None:
            return
        if self.run_checkpoints.metrics.begun_at is None:
            self.run_checkpoints.metrics.begun_at = self.state.global_step
            self.resume_running_loss()
        self.begin_decisions()
        is_resumed = epoch == epochs_trained and resume_from_checkpoint is not None
        trained = steps_trained_in_current_epoch if is_resumed and not self.args.ignore_data_skip else 0
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(epoch)
        checkpoint = resume_from_checkpoint if is_resumed else None
        batches, restore_rng_from = begin_pass(self, train_dataloader, trained, checkpoint)
        saves = isinstance(train_dataloader, PreparedDataLoader) and restore_rng_from is None
        self._finish_boundary(model, trial, ignore_keys_for_eval, start_time, saves=saves)
        if is_resumed and self.state.global_step >= self.state.max_steps:
            # Upstream looks behind an update only: each start of a run that is over would train one more.
            self.control.should_training_stop = True
            return
        self._loss_normalization.begin_epoch(self)
        self._reader = reader = WindowReader(batches, self.accelerator.readers, self.run_clock)
        run = EpochRun(
            trainer=self,
            reader=reader,
            model=model,
            epoch=epoch,
            steps_in_epoch=steps_in_epoch,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
            start_time=start_time,
            step=trained + num_before - 1,
            is_resumed=is_resumed,
        )
        self._modules = plain_modules(model)
        guard = self.accelerator.nonfinite_guard
        with nullcontext() if guard is None else setting(guard, roll_back=take_back):
            try:
                run.train(restore_rng_from)
            finally:
                self._reader, self._modules = None, ()
            reader.close()
            run.end()

    def _prepare_input(self, data: Any) -> Any:
        """Return inputs on the device, also those in namedtuples and dataclasses; see upstream."""
        if is_namedtuple(data) or (is_dataclass(data) and not isinstance(data, type | Mapping)):
            return map_leaves(self._prepare_input, data, is_leaf=lambda node: node is not data)
        return super()._prepare_input(data)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; refuse an empty one."""
        # A dataclass, or a class of the user's own, has no length that upstream could look at.
        return super()._prepare_inputs(inputs) if isinstance(inputs, Sized) else self._prepare_input(inputs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train one micro-batch and return its loss; see upstream. Collective on the last one of a window."""
        args, accelerator = self.args, self.accelerator
        # The walk of train() is 40 us for a Llama of two layers; most often all are in training mode already.
        if not self._modules or not all(map(_IS_TRAINING, self._modules)):
            model.train()
        # Of schedule-free optimizers: an evaluation has left its own weights in the model.
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager(), smoothing_chunks(self, model):
            loss = self._loss_normalization.compute(self, model, inputs, num_items_in_batch)
        del inputs
        if args.torch_empty_cache_steps is not None and self.state.global_step % args.torch_empty_cache_steps == 0:
            clear_device_cache()
        loss = self._loss_normalization.weigh(self, loss, has_items=num_items_in_batch is not None)
        if accelerator.has_lomo_optimizer:
            accelerator.lomo_backward(loss, self._get_learning_rate())
            return loss.detach()
        guard, options = accelerator.nonfinite_guard, dict[str, Any]()
        if guard is not None and guard.spreads:
            guard.spread(loss, options)
        # Not accelerator.backward(): it weighs by the batch that the loader gave last, and a window is read ahead. A
        # script may call training_step() by itself, on a model that is not prepared: there is nothing to average.
        is_bare = accelerator.num_processes == 1 and not accelerator.is_prepared(model)
        (Tensor.backward if is_bare else accelerator.unit_of(model).backward)(loss, **options)
        return loss.detach()

    @property
    def divides_as_upstream(self) -> bool:
        """Whether losses are divided by transformers' own rules, which trust signatures."""
        return self.accelerator.config.accumulation.loss_division is LossDivision.TRANSFORMERS

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Tensor | None:
        """Return the divisor of a loss by items: the labels of an update (scalar, int64), of all ranks or of this.

        Collective with `average_tokens_across_devices`. None for losses that are means, and without labels.
        """
        takes_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return count_items(self, batch_samples, device) if takes_items else None

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Callable[..., Any], Any]:
        # Upstream's slices the buffers of a batch for ring attention of its own; here the model's forward makes them.
        return nullcontext, inputs

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # transformers 5.23 (trainer.py:2777) takes the norm by itself over several meshes; the strategy knows its own.
        return self._bound_grad_norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._bound_grad_norm(model, float("inf")) if grad_norm is None else grad_norm

    def _bound_grad_norm(self, model: nn.Module, max_norm: float) -> Any:
        in_backward = self.accelerator.config.optimizer_in_backward
        if in_backward or getattr(self.optimizer, "updates_in_backward", False):
            return None  # the gradients are gone
        return self.accelerator.clip_grad_norm_(model.parameters(), max_norm)

    def _get_learning_rate(self) -> Any:
        if self.accelerator.strategy.capabilities.describes_optimizers:
            # An engine's schedule knows no rate before its first step, nor after a resume; transformers 5.23 then logs
            # 0 (trainer.py:1433).
            return self.optimizer.param_groups[0]["lr"]
        return super()._get_learning_rate()

    def get_tp_size(self) -> int:
        """Return the number of ranks that read the same data, along any axis; upstream divides counts by it."""
        return self.accelerator.process.world_size // self.accelerator.readers.world_size

    def get_cp_size(self) -> int:
        """Return 1, as `get_sp_size` does."""
        return 1

    def get_sp_size(self) -> int:
        """Return 1: upstream takes it for loaders that hand out slices; here the model's forward makes them."""
        return 1

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the number of operations of a forward and backward pass; see upstream."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if not isinstance(inputs, Mapping) or name not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        size = inputs[name].numel()
        if name == "input_ids":
            self.run_clock.num_tokens += size
        known = self._num_multiplying
        if known is None or known[0] != id(self.model):
            known = self._num_multiplying = id(self.model), count_multiplying(self.model)
        return 6 * size * known[1]

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        # Not upstream's: callbacks of one rank may set flags in each of the three parts, and the next is collective.
        decisions = self.decisions
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            flags = flags_of(self.control)
            self._log_update(tr_loss, grad_norm, learning_rate, start_time)
            if decisions is not None:
                decisions.end_log(self.control, flags)
        if self.control.should_evaluate and not self.is_preempted:
            metrics = self._evaluate_unless_preempted(trial, ignore_keys_for_eval)
            if metrics is None:
                return
            is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_new_best
            if decisions is not None:
                decisions.end_evaluation(self.control)
        if self.control.should_save and not self.is_preempted:
            self.save_and_call_back(model, trial)
            if decisions is not None:
                decisions.end_save(self.control)

    def _evaluate_unless_preempted(self, trial: Any, ignore_keys: Any) -> dict[str, float] | None:
        """Evaluate; None where a signal ends the run meanwhile, and nothing of the evaluation is kept. Collective."""
        num_logs, self.ends_evaluations = len(self.state.log_history), True
        try:
            return self._evaluate(trial, ignore_keys)
        except EvaluationPreempted:
            del self.state.log_history[num_logs:]
            self.control.should_evaluate = True
            return None
        finally:
            self.ends_evaluations = False

    def _log_update(
        self, tr_loss: Tensor, grad_norm: Tensor | float | None, learning_rate: float | None, start_time: float
    ) -> None:
        """Log the mean loss since the last log, over all ranks, and begin to add anew. Collective."""
        slow_ranks, figures = self.accelerator.slow_ranks, dict[str, Any]()
        if slow_ranks is None:
            losses = self.accelerator.gather(tr_loss)
        else:
            # In the one exchange that a log has anyway.
            ranks = self.accelerator.gather(torch.cat((tr_loss.reshape(1), slow_ranks.read().to(tr_loss)))[None])
            losses, figures = ranks[:, 0].contiguous(), slow_ranks.judge(ranks[:, 1:])
        loss = losses.mean().item()
        tr_loss.zero_()
        logs = {"loss": loss / (self.state.global_step - self._globalstep_last_logged)}
        if grad_norm is not None:
            logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, Tensor) else grad_norm
        logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
        self._total_loss_scalar += loss
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()
        if (meters := self.accelerator.meters) is not None:
            seconds = self.run_clock.work_seconds(self.run_checkpoints.metrics.stalled_seconds)
            logs |= meters.read(self.get_tp_size(), self.state.global_step, seconds) | figures
        self.log(logs, start_time)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> TrainOutput:
        self._finish_boundary(self.model_wrapped, trial, None, start_time, saves=True)
        self.finish_save()
        # Losses since the last log are this rank's own; transformers 5.23 (trainer.py:1998) takes them for the job's.
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        self.end_local_updates(is_failed=False)
        self.accelerator.unit_of(self.model).adopt_averages()
        self.run_checkpoints.metrics.finish(self.state.global_step)
        self.run_report.finish()
        with keeping_best(self, Path(self._get_output_dir(trial=trial))), loading_by_override(self):
            output: TrainOutput = super()._finalize_training(trial, num_train_samples, start_time)
        return output

    # --- evaluation ------------------------------------------------------------------------------------------------

    @failing_together()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate or predict: every sample once, in order, with the exact mean loss. Collective."""
        begin = time.perf_counter()
        # Predictions that a script asks for go on with its streams: those that are sampled differ from call to call.
        is_alone = self.is_in_train or description != "Prediction"
        with (
            self.mean_of_replicas(),
            self.averaged_weights(),
            KeptStreams() if is_alone else nullcontext(),
            keeping_epoch(dataloader),
        ):
            model, preparation_seconds = self._preparation.prepare_for_evaluation(self)
            output = run_evaluation(
                self, model, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        self.run_clock.evaluation_seconds += time.perf_counter() - begin
        if preparation_seconds is not None:
            # Only in the evaluation that spent them: transformers 5.23 repeats the number in every later one, and takes
            # it off their runtime (trainer.py:3095, :2875).
            output.metrics[f"{metric_key_prefix}_model_preparation_time"] = preparation_seconds
        if self.compute_metrics is not None:
            share_metrics(output.metrics, self.accelerator.process)
        return output

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        # It stands between an evaluation in training, which a subclass may extend, and all decisions on its metrics.
        share_metrics(metrics, self.accelerator.process)
        super()._report_to_hp_search(trial, step, metrics)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        searches = self.args.auto_find_batch_size
        try:
            # Whatever a subclass evaluates with: what is drawn must not move the streams that training goes on with.
            with KeptStreams(), setting(self.args, auto_find_batch_size=False):
                return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        except RuntimeError as error:
            if not searches or not is_out_of_memory(error):
                raise
            # Without "out of memory": the search must not answer with a smaller training batch.
            raise RuntimeError(
                "Evaluation hit an out-of-memory error. `auto_find_batch_size` only adjusts the training batch size, "
                "reduce `per_device_eval_batch_size` instead."
            ) from error

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trained parameters; upstream's is 0 under ZeRO-3, where a rank holds partitions."""
        count: int = get_model_param_count(self.model, trainable_only=True)
        return count

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Search for hyperparameters; see upstream. Collective.

        With Optuna, `hp_space` and `model_init` may ask the trial for values on every rank, a trial that is pruned ends
        on all of them, and all get the best run. Each trial's checkpoints are in a directory of its own,
        `output_dir/run-N`, and can be resumed.

        Raises:
            ConfigError: under DeepSpeed, whose engine holds the model and the optimizer of an earlier trial; with
                Optuna's `n_jobs`.
            RuntimeError: no backend, or not the one that was asked for, is installed; there is no `model_init`.
        """
        check_search(self)
        chosen = HPSearchBackend(default_hp_search_backend() if backend is None else backend)
        try:
            if chosen is HPSearchBackend.OPTUNA:
                return search_with_optuna(self, hp_space, compute_objective, n_trials, direction, hp_name, **kwargs)
            return super().hyperparameter_search(
                hp_space, compute_objective, n_trials, direction, chosen, hp_name, **kwargs
            )
        finally:
            self.hp_search_backend = None


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """Upstream's Seq2SeqTrainer on accel_trainer; see `Trainer`."""

    arguments_class = Seq2SeqTrainingArguments
