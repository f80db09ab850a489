"""The run that saved a checkpoint beside the one that goes on from it: options, versions, samples of an update."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from accel_trainer.checkpoint.manifest import Manifest, used_versions
from accel_trainer.config import ChangedRunAction, Resolved
from accel_trainer.errors import IncompatibleCheckpointError

# Beginnings of the names of options that change nothing of what is learnt.
_IS_OF_PLACE = re.compile(
    r"(output_dir|run_name|project|trackio|report_|logging_|log_|disable_tqdm|save_|load_best|metric_for|greater_is|eval_|"
    r"push_to_hub|hub_|resume_from|on_save_error|on_changed_run|max_pause_s|preempt|hang\.|verify|launch\.|"
    r"timeout_seconds|local_rank|dataloader_|include_|debug|do_|use_cpu|enable_jit|accelerator_config)"
)


RECORD_KEY = "run"
"""Of a manifest's metadata: the record of the run until then, with its options in words."""


class UpdateBatch(NamedTuple):
    """The samples of an update over all ranks, and the factors of their number."""

    num_samples: int
    num_readers: int
    """Ranks that read different data."""
    micro_batch: int | None = None
    """Samples of a micro-batch on one rank; None where nothing tells."""
    accumulation_steps: int | None = None
    """Micro-batches of an update; None where nothing tells."""

    def describe(self) -> str:
        """Return `16 samples = 4 x 2 x 2 (micro-batch x accumulation x ranks)`; the number alone without factors."""
        text = f"{self.num_samples:,} sample{'' if self.num_samples == 1 else 's'}"
        if self.micro_batch is None or self.accumulation_steps is None:
            return text
        factors = self.micro_batch, self.accumulation_steps, self.num_readers
        if math.prod(factors) != self.num_samples:  # a script counts them otherwise
            return text
        return f"{text} = {' x '.join(map(str, factors))} (micro-batch x accumulation x ranks)"

    def settings_for(self, num_samples: int, micro_batch_name: str) -> str:
        """Return which settings give an update so many samples on these ranks, each with its present value."""
        size, steps = self.micro_batch or 1, self.accumulation_steps or 1
        share, rest = divmod(num_samples, self.num_readers)
        if rest:
            return f"a number of ranks that divides {num_samples}"
        own_steps, own_size = f"(now {steps})", f"(now {size})"
        ways = [f"gradient_accumulation_steps={share // size} {own_steps}"] if share % size == 0 else []
        ways += [f"{micro_batch_name}={share // steps} {own_size}"] if share % steps == 0 else []
        if ways:
            return " or ".join(ways)
        size = max(each for each in range(1, size + 1) if share % each == 0)
        return f"{micro_batch_name}={size} {own_size} and gradient_accumulation_steps={share // size} {own_steps}"


class UpdateBatchChange(NamedTuple):
    """Another number of samples in an update than in the run that saved a checkpoint, in words."""

    found: str
    settings: str
    """With which updates would have as many."""
    has_other_ranks: bool
    """Whether another number of ranks reads different data now."""

    @classmethod
    def find(
        cls, path: Path, before: UpdateBatch, now: UpdateBatch, *, micro_batch_name: str, loader: str = ""
    ) -> UpdateBatchChange | None:
        """Return the change from the run that saved the checkpoint `path`; None where there are as many samples."""
        if before.num_samples == now.num_samples:
            return None
        return cls(
            f"{path} is of a run whose updates had {before.describe()}{loader}, and this run's have {now.describe()}",
            now.settings_for(before.num_samples, micro_batch_name),
            before.num_readers != now.num_readers,
        )

    def check(self, resolved: Resolved, *, auto_refuses: bool) -> None:
        """Refuse to go on from the checkpoint, where `on_changed_run`, or its default for this change, has it so."""
        action = resolved.config.on_changed_run
        if action is ChangedRunAction.REFUSE or action is ChangedRunAction.AUTO and auto_refuses:
            raise IncompatibleCheckpointError(
                f"{how_to_go_on(resolved)}\n{self.found}: from here on it would be another run. The same "
                f"one goes on with as many samples in an update: set {self.settings}"
            )


def how_to_go_on(resolved: Resolved) -> str:
    """Return the first line of a refusal: the one option that goes on, spelled as where it is set."""
    # The default refuses a Trainer's resume alone.
    argument = "TrainingArguments(on_changed_run=...)"
    spelled = resolved.spell("on_changed_run", str(ChangedRunAction.WARN), argument=argument)
    return f"{spelled} goes on with this run's options; {resolved.describe('on_changed_run')} refuses this:"


def describe_changes(
    path: Path,
    manifest: Manifest,
    before: Mapping[str, str],
    now: Mapping[str, str],
    *,
    without_effect: Collection[str] = (),
) -> str | None:
    """Return how options (but those `without_effect`) and versions differ from the saving run's; None if not."""
    before, now = {**before, **manifest.versions}, {**now, **used_versions()}
    changes = [
        f"{name}: {before[name]} -> {value}"
        + (" (without effect, the run goes on with the checkpoint's)" if name in without_effect else "")
        for name, value in now.items()
        if name in before and before[name] != value and not _IS_OF_PLACE.match(name)
    ]
    return f"{path} is of a run that was set up otherwise: {', '.join(changes)}" if changes else None
