"""The members of a Trainer that its collaborators read, set and call: one protocol for all, and one for each of them.

Names and meanings are those of transformers.Trainer where nothing else is said. Their types are not: transformers is
typed in ways that differ between the releases that are supported.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.trainer.arguments.training_arguments import TrainingArguments
from accel_trainer.trainer.checkpoint.run_checkpoints import RunCheckpoints

__all__ = ["CheckpointingTrainer", "EvaluatingTrainer", "PreparingTrainer", "RunningTrainer", "SteppingTrainer"]


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

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""


class SteppingTrainer(RunningTrainer, Protocol):
    """A Trainer whose updates an epoch runs: upstream's hooks, which subclasses override."""

    current_flos: float
    current_gradient_accumulation_steps: int
    """Micro-batches of the present update; the last one of an epoch may have fewer."""
    model_accepts_loss_kwargs: bool
    """Whether the model's loss is divided by the number of items."""
    _tr_loss: Tensor
    _globalstep_last_logged: int
    run_checkpoints: RunCheckpoints
    """Ours: of the present train()."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the next micro-batches, and the number of items to divide their losses by; None without labels."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one micro-batch; return its detached loss."""

    def compute_loss(self, model: nn.Module, inputs: Any, *, num_items_in_batch: Any = None) -> Any:
        """Return the loss of one micro-batch."""

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context in which losses are computed."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the number of operations of a forward and backward pass."""

    def _track_num_input_tokens(self, inputs: Any) -> None: ...

    def _clip_grad_norm(self, model: nn.Module) -> Any: ...

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any: ...

    def _get_learning_rate(self) -> Any: ...

    def _load_rng_state(self, checkpoint: str | None) -> None: ...

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None: ...


class PreparingTrainer(RunningTrainer, Protocol):
    """A Trainer whose model, optimizer and schedule are prepared."""

    deepspeed: Any
    """The engine around the model, where one is built."""
    is_in_train: bool
    _created_lr_scheduler: bool

    def create_optimizer(self, model: nn.Module) -> Any:
        """Return the optimizer of a model; the one that there is, if any."""

    def create_scheduler(self, num_training_steps: int) -> Any:
        """Build the schedule, unless there is one."""

    def _wrap_model(self, model: nn.Module, training: bool = True) -> nn.Module: ...


class EvaluatingTrainer(RunningTrainer, Protocol):
    """A Trainer whose evaluation or prediction runs."""

    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    gather_function: Any
    _loss_shifts_labels: bool

    def num_examples(self, dataloader: DataLoader) -> int:
        """Return the number of samples of a loader."""

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of one batch, detached; None for those that there are not."""

    def _prepare_input(self, data: Any) -> Any: ...

    def _prepare_inputs(self, inputs: Any) -> Any: ...


class CheckpointingTrainer(RunningTrainer, Protocol):
    """A Trainer that saves checkpoints and resumes from them."""

    run_checkpoints: RunCheckpoints
    """Ours: of the present train()."""

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples in an update, over all ranks."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it. Collective."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None: ...

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...

    def _save_scaler(self, output_dir: str) -> None: ...

    def _save_rng_state(self, output_dir: str) -> None: ...

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...
