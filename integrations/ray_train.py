"""Ray beside a Trainer: checkpoints and metrics reported to Ray Train or Tune, and Ray Data's shard as a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray.train
import ray.tune
from torch.utils.data import IterableDataset
from transformers import TrainerCallback


class RayReportCallback(TrainerCallback):
    """Reports each checkpoint of a Trainer with the metrics logged since the one before, and evaluations without one.

    Ray Train has a report wait until its controller has looked, every 2 s by default, and keeps metrics beside
    checkpoints only: what is merely logged is not reported. Ray's own `RayTrainReportCallback` works, too. It has every
    worker copy the folder twice, takes the newest folder of `output_dir` by its number, and repeats old metrics.

    A checkpoint is a folder that `trainer.train(resume_from_checkpoint=...)` takes. The worker that wrote it sends it:
    rank 0, or the first of each machine with `save_on_each_node`; Ray merges these.

    Args:
        report: `ray.train.report`, or `ray.tune.report` where a trial of Tune makes the Trainer itself.
        options: further ones of `report`, such as `checkpoint_upload_mode`.
    """

    def __init__(self, report: Callable[..., Any] = ray.train.report, **options: Any) -> None:
        self._report, self._options = report, options
        self._num_reported = self._saved_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out reports of the run that is resumed."""
        self._num_reported, self._saved_step = len(state.log_history), state.global_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report an evaluation that no save follows. Collective under Ray Train, as is `on_save`."""
        if not control.should_save:
            new = state.log_history[self._num_reported :]
            self._num_reported = len(state.log_history)
            self._report(_merge(new, state), **self._options)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the checkpoint that has been committed."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        checkpoint = ray.tune.Checkpoint.from_directory(folder) if args.should_save else None
        # With save_async later steps may have been logged, and with save_strategy="best" the evaluation been reported.
        earlier = [entry for entry in state.log_history if entry["step"] <= state.global_step]
        new = [entry for entry in earlier if entry["step"] > self._saved_step]
        self._num_reported, self._saved_step = max(self._num_reported, len(earlier)), state.global_step
        self._report(_merge(new, state), checkpoint=checkpoint, **self._options)


def _merge(entries: Iterable[dict[str, Any]], state: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for entry in entries:
        metrics |= entry
    return {**metrics, "step": state.global_step, "epoch": state.epoch}


class RayShard(IterableDataset[Any]):
    """This worker's share of a Ray dataset, for a torch DataLoader that `prepare` or a Trainer is given.

    Args:
        source: of `ray.train.get_dataset_shard(name)`: `iter_torch_batches(batch_size=..., device="cpu")` for a loader
            with `batch_size=None`, `iter_rows()` for one that collates rows.
    """

    is_sharded_by_rank = True

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)
