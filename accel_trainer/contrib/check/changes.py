"""Meanings that change under names that stay: by the call that has them, with the words to write instead.

docs/migration.md shows this table (`make names`). Names that are missing are not in it: they are looked up in this
package, with the reasons of `differences.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The fate of a line."""

    WORKS = "works"
    IMPORT = "import"
    """It works once its import line is changed."""
    CHANGES = "changes"
    """It runs, and gives something else."""
    REPLACE = "replace"
    """It fails."""


@dataclass(frozen=True, slots=True)
class Change:
    """One meaning that changes."""

    call: str
    """`set_seed` or `Accelerator.reduce`: a function, or a method of the class."""
    words: str
    """How it differs."""
    instead: str
    """For those who want the old meaning."""
    keyword: str = ""
    """Only where this argument is given; with `=VALUE`, where it is this literal."""
    by_compat: str = ""
    """The option that `compat` restores it by."""
    verdict: Verdict = Verdict.CHANGES


_NAN = "an update whose gradients are NaN ends the run with exit code 76, where theirs trains on"
_EVEN = (
    "each sample counts once: on several processes the last step is not filled up with samples from the beginning, and "
    "metrics see none twice"
)
_BATCH = "gradients of a short last window are the mean over what it holds, and are not made smaller"
_ON_NAN = 'on_nonfinite="warn"'

CHANGES = (
    Change(
        "Accelerator.prepare_scheduler",
        "a prepared schedule steps once per update, not once for each process",
        "len(train_dataloader) after prepare(), without a factor num_processes; or scheduler_steps=per_process",
        by_compat="scheduler_steps",
    ),
    Change("Accelerator", _EVEN, "DataLoaderConfiguration(even_batches=True)", by_compat="data.even_batches"),
    Change("Accelerator", _NAN, "on_nonfinite=warn in the file or as a flag", by_compat="on_nonfinite"),
    Change(
        "Accelerator", _BATCH, "accumulation.loss_division=accelerate", "gradient_accumulation_steps",
        by_compat="accumulation.loss_division",
    ),
    Change(
        "GradientAccumulationPlugin", _BATCH, "accumulation.loss_division=accelerate",
        by_compat="accumulation.loss_division",
    ),
    Change("TrainingArguments", _NAN, _ON_NAN, by_compat="on_nonfinite"),
    Change(
        "TrainingArguments", _EVEN, 'accelerator_config={"even_batches": True}', by_compat="data.even_batches"
    ),
    Change(
        "TrainingArguments",
        "an update's loss is one mean over its micro-batches and processes, for every model",
        'loss_division="transformers"', "gradient_accumulation_steps", by_compat="accumulation.loss_division",
    ),
    Change(
        "TrainingArguments", "eval_loss is the mean over label tokens, whatever the batches are",
        'eval_loss_weighting="batch"', "eval_strategy", by_compat="eval_loss_weighting",
    ),
    Change("Trainer.evaluate", "eval_loss is the mean over label tokens, whatever the batches are",
           'eval_loss_weighting="batch"', by_compat="eval_loss_weighting"),
    Change(
        "Trainer.train", "a resume with another number of samples in an update is an error on as many processes",
        'on_changed_run="warn"', "resume_from_checkpoint", by_compat="on_changed_run",
    ),
    Change(
        "set_seed", "initial weights are equal on all ranks; from the first prepare() on each has its own dropout",
        "set_seed(seed, same_on_all_ranks=True) for one stream on all of them",
    ),
    Change(
        "random_split", "after the first prepare() ranks draw differently, and split otherwise",
        "split before prepare(), or random_split(..., generator=torch.Generator().manual_seed(42))",
    ),
    Change(
        "DataLoaderConfiguration", "the order follows seed and epoch all the same: it is another one than theirs",
        "use_seedable_sampler=True gives the order of theirs with that option", "use_seedable_sampler=False",
    ),
    Change(
        "Accelerator.join_uneven_inputs", "it only switches even_batches: uneven data needs no context",
        "the loop without it",
    ),
    Change("Accelerator.reduce", "the scale multiplies on one process and on CPUs, too", "no scale there",
           "scale"),
    Change(
        "Accelerator.load_state", "a state is loaded as a whole: strict=False is an error", "load_state(directory)",
        "strict=False", verdict=Verdict.REPLACE,
    ),
    Change(
        "Accelerator.save_state", "files are safetensors and JSON under names of their own",
        "load_state() reads accelerate's states, too; tools that read its files do not read these",
    ),
    Change("gather_object", "it joins lists; anything else comes back as one entry for each process", "pass a list"),
    Change(
        "find_executable_batch_size", "each call of the function begins with starting_batch_size again",
        "keep the size that was found in a variable",
    ),
    Change("LocalSGD", "it counts updates, not micro-batches", "divide local_sgd_steps by the accumulation steps"),
    Change(
        "Accelerator.get_tracker", "a tracker that is not open is an error, also after end_training()",
        "open it with log_with and init_trackers()",
    ),
    Change(
        "AcceleratorState._reset_state", "an Accelerator knows its process by itself: this takes nothing from it",
        "a new Accelerator()",
    ),
    Change(
        "notebook_launcher", "an error of a worker is a ProcessGroupError that names its rank, and no ChildFailedError",
        "except ProcessGroupError, of accel_trainer.errors",
    ),
    Change(
        "write_basic_config", "it writes YAML, and refuses a name that ends in .json", "a name that ends in .yaml",
    ),
)  # fmt: skip
"""Ranked: those of learning first."""
