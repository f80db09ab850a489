"""The members of a Trainer that its collaborators read, set and call: one protocol for all, and one for each of them.

Names and meanings are those of transformers.Trainer where nothing else is said. Their types are not: transformers is
typed in ways that differ between the releases that are supported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.runtime.preemption import StopSignals
from accel_trainer.strategies.local_replicas import LocalReplicas
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments
from accel_trainer.trainer.checkpoint.run_checkpoints import RunCheckpoints
from accel_trainer.trainer.run_record import RunRecord

__all__ = [
    "CheckpointingTrainer",
    "EvaluatingTrainer",
    "PreparingTrainer",
    "RunningTrainer",
    "SearchingTrainer",
    "SharedDecisions",
    "SteppingTrainer",
    "TrialTrainer",
]


class SharedDecisions(Protocol):
    """Decisions of the ranks of a run, where a loop lets them act: see `decisions.Decisions`. Collective, each."""

    def end_micro_batch(self, control: TrainerControl) -> None:
        """After each micro-batch that ends no update."""

    def end_update(self, trainer: RunningTrainer) -> None:
        """After each update."""

    def end_epoch(self, control: TrainerControl) -> None:
        """After each epoch."""

    def end_evaluation_batch(self) -> None:
        """After each batch of an evaluation that belongs to the training."""


class RunningTrainer(Protocol):
    """A Trainer while it trains or evaluates."""

    args: TrainingArguments
    accelerator: Accelerator
    model: Any
    """The user's module; under FSDP2 its class has been replaced by one that shards."""
    model_wrapped: Any
    """The outermost module, to call in training."""
    optimizer: Any
    lr_scheduler: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    is_sharded: bool
    """Ours: whether a rank holds only its shard of each parameter, so that forwards are collective."""
    local_replicas: LocalReplicas | None
    """Ours: of the present train(), where each rank updates its own."""

    is_world_process_zero: Callable[[], bool]


class SteppingTrainer(RunningTrainer, Protocol):
    """A Trainer whose updates an epoch runs: upstream's hooks, which subclasses override."""

    current_flos: float
    current_gradient_accumulation_steps: int
    """Micro-batches of the present update; the last one of an epoch may have fewer."""
    model_accepts_loss_kwargs: bool
    """Whether the model's loss is divided by the number of items."""
    run_checkpoints: RunCheckpoints
    """Ours: of the present train()."""
    roll_back: Callable[[str, Any, int], None]
    """Ours: load the newest checkpoint of the run; the data goes on."""

    stop_signals: StopSignals
    """Ours: those that end the present train()."""

    @property
    def is_preempted(self) -> bool:
        """Ours: whether the ranks have agreed to save and end here, for a signal to one of them."""

    save_and_end: Callable[[nn.Module, Any], NoReturn]
    """Ours: save, and end this process with exit code 85. Collective."""

    @property
    def decisions(self) -> SharedDecisions | None:
        """What the ranks of this run decide together; None on one process."""

    """Ours: of the present train() on several ranks."""
    get_batch_samples: Callable[..., tuple[list[Any], Any]]
    """The next micro-batches, and the number of items to divide their losses by; None without labels."""
    training_step: Callable[..., Tensor]
    compute_loss: Callable[..., Any]
    compute_loss_func: Callable[..., Any] | None
    label_smoother: Any
    autocast_smart_context_manager: Callable[[], AbstractContextManager[Any]]
    floating_point_ops: Callable[[Any], int]
    _tr_loss: Tensor
    _loss_shifts_labels: bool
    _globalstep_last_logged: int
    _track_num_input_tokens: Callable[[Any], None]
    _clip_grad_norm: Callable[[nn.Module], Any]
    _get_grad_norm: Callable[..., Any]
    _get_learning_rate: Callable[[], Any]
    _load_rng_state: Callable[[str | None], None]
    _maybe_log_save_evaluate: Callable[..., None]


class PreparingTrainer(RunningTrainer, Protocol):
    """A Trainer whose model, optimizer and schedule are prepared."""

    deepspeed: Any
    """The engine around the model, where one is built."""
    is_in_train: bool
    label_smoother: Any
    neftune_noise_alpha: float | None
    create_optimizer: Callable[[], Any]
    create_optimizer_and_scheduler: Callable[..., None]
    create_scheduler: Callable[..., Any]
    _created_lr_scheduler: bool
    _loss_shifts_labels: bool
    _train_batch_size: int
    given_batch: tuple[int, int] | None
    """Ours: batch size and accumulation of the arguments, while a train() on fewer processes has others."""
    _schedule_of_both: Any
    """Ours: what a `create_optimizer_and_scheduler` of a subclass made in an earlier `train()`."""
    _wrap_model: Callable[..., nn.Module]


class SearchingTrainer(RunningTrainer, Protocol):
    """A Trainer that looks for a batch size that fits."""

    model_init: Callable[..., nn.Module] | None
    end_decisions: Callable[..., None]
    """Ours: end what the ranks of an attempt decide together."""
    _created_lr_scheduler: bool
    _preparation: Any
    """Ours: what it has prepared."""
    neftune_hook_handle: Any
    """Of the hook that adds noise to embeddings, which every attempt adds."""
    _train_batch_size: int
    """Samples of a micro-batch on one device."""


class TrialTrainer(RunningTrainer, Protocol):
    """A Trainer that runs the trials of a search for hyperparameters."""

    objective: Any
    """What the present trial is judged by; None before its first evaluation."""
    compute_objective: Callable[[dict[str, float]], Any]
    train: Callable[..., Any]
    evaluate: Callable[..., dict[str, float]]


class EvaluatingTrainer(RunningTrainer, Protocol):
    """A Trainer whose evaluation or prediction runs."""

    ends_evaluations: bool
    """Ours: whether a signal ends the evaluation that runs, which belongs to the training."""
    is_preempted_in_evaluation: Callable[[DataLoader], bool]
    """Ours: whether a signal ends it after this batch. Collective if one has come."""
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    gather_function: Any
    num_examples: Callable[..., int]
    prediction_step: Callable[..., tuple[Any, Any, Any]]
    """Loss, logits and labels of one batch, detached; None for those that there are not."""
    label_names: list[str]
    can_return_loss: bool
    """Whether the model returns a loss without labels."""
    compute_loss: Callable[..., Any]
    compute_loss_context_manager: Callable[[], AbstractContextManager[Any]]
    _get_num_items_in_batch: Callable[[list[Any], Any], Any]
    _loss_shifts_labels: bool
    _prepare_input: Callable[[Any], Any]
    _prepare_inputs: Callable[[Any], Any]


class CheckpointingTrainer(RunningTrainer, Protocol):
    """A Trainer that saves checkpoints and resumes from them."""

    run_checkpoints: RunCheckpoints
    """Ours: of the present train()."""
    run_record: RunRecord
    """Ours: of the same."""
    _tr_loss: Tensor
    """Sum of this rank's losses since the last log."""
    _globalstep_last_logged: int
    _train_batch_size: int
    """Samples of a micro-batch on one rank."""
    get_total_train_batch_size: Callable[[Any], int]
    order_batch: Callable[[], tuple[int, int]]
    """Ours: micro-batch and accumulation with which the order of the samples is made."""
    mean_of_replicas: Callable[[], AbstractContextManager[None]]
    """Ours: the model is the mean of all replicas within it. Collective."""
    save_model: Callable[..., None]
    """Writes the model so that `from_pretrained` reads it. Collective."""
    _save: Callable[..., None]
    _save_optimizer_and_scheduler: Callable[[str], None]
    _save_scaler: Callable[[str], None]
    _save_rng_state: Callable[[str], None]
    _push_from_checkpoint: Callable[[str], None]
