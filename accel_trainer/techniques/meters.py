"""Meters of training: tokens, samples and model FLOPs a second, their share of the devices' peak, and peak memory.

Tokens are counted where the batch lies, and summed there in place: nothing waits for a device until a loop logs, where
the ranks exchange a few numbers. Time in evaluations, saves and resumes is no time of training.

B rows, T tokens of a row
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accel_trainer import logging
from accel_trainer.data.plan import BatchRows
from accel_trainer.runtime import collectives
from accel_trainer.runtime.memory import peak_memory
from accel_trainer.runtime.model_wrappers import unwrap_module
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rng import KeptStreams
from accel_trainer.runtime.tensor_trees import find_batch_size
from accel_trainer.techniques.model_flops import ModelFlops, copy_shapes, count_flops, device_name, peak_flops_by_name

logger = logging.get_logger(__name__)

_TOLERANCE = 0.01
"""By which the formula and torch's counter may differ."""


class _Counts(NamedTuple):
    """The work of one rank since the last time."""

    tokens: int
    pairs: int
    samples: int
    seconds: float
    peak_bytes: int | None
    peak_flops: float | None
    flops: ModelFlops | None


class StepMeters:
    """Counts of the micro-batches that train a model, read where a loop logs.

    A native loop's batches are those that its prepared loaders yield (`watch`) and a backward follows (`take`); the
    Trainer `add`s the batches of each update.

    Attributes:
        tokens_seen: of all ranks, until they were last read; a resumed run goes on with those of the checkpoint.
        pending: the batch that a loader has yielded, and that no backward has followed yet.
    """

    def __init__(self, process: ProcessContext, peak_flops: float | None, stalled: Callable[[], float]) -> None:
        """Take the peak rate of a device, None for that of the table, and a clock of saves and resumes in seconds."""
        self._process, self._stalled = process, stalled
        self._peak_flops = peak_flops or peak_flops_by_name(device_name(process.device))
        self._flops: ModelFlops | None = None
        self._num_models = 0
        self._copied: nn.Module | None = None
        """Of the model, until the first batch: torch's counter runs on it."""
        self.pending: Any = None
        self._num_taken = 0
        self._begun_at: float | None = None
        self._paused_seconds = 0.0
        """In passes over loaders that trained nothing, and in counting the model's operations."""
        self.begin()

    def begin(self, tokens_seen: int = 0, updates: int | None = None, seconds: float | None = None) -> None:
        """Forget all counts and go on after so many tokens of all ranks; updates and seconds are as of `read`."""
        self.tokens_seen = tokens_seen
        self._tokens = self._pairs = self._samples = 0
        self._on_device: Tensor | None = None
        """Tokens and pairs that were counted on a device, (2,), int64."""
        self._last_updates = PROGRESS.updates if updates is None else updates
        self._last_seconds = self._work_seconds() if seconds is None else seconds

    def reset(self) -> None:
        """Forget the models and the time, too: they are about to be prepared anew."""
        self._flops, self._num_models, self._copied, self.pending, self._begun_at = None, 0, None, None, None
        self._paused_seconds = 0.0
        self.begin()

    # --- the model -------------------------------------------------------------------------------------------------

    def take_model(self, model: nn.Module) -> None:
        """Take a model before it is prepared. FLOPs are those of the only one that is trained."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        self._num_models += 1
        self._flops = self._copied = None
        if self._num_models > 1:
            logger.warning_once("several models are trained: perf/ has no FLOPs, and no MFU")
            return
        self._flops = ModelFlops.by_formula(unwrap_module(model))
        try:
            self._copied = copy_shapes(model)
        except Exception as error:  # of a class that cannot be copied: any
            self._explain(error)

    def compare(self, batch: Any) -> float:
        """Count the model's operations by torch's counter, on shapes of the first batch; return its seconds.

        Draws no random number. Later calls do nothing.
        """
        copied, begin = self._copied, time.perf_counter()
        if copied is None or not find_batch_size(batch):
            return 0.0
        self._copied = None
        try:
            with KeptStreams():
                counted = count_flops(copied, batch)
        except Exception as error:  # a model that asks for values, or needs a kernel of another library: any
            self._explain(error)
        else:
            self._choose(counted, batch)
        return time.perf_counter() - begin

    def _choose(self, counted: int, batch: Any) -> None:
        """Take the formula's figures where they are those of the counter, and the counter's otherwise."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        rows, tokens = find_batch_size(batch) or 1, ids.numel() if isinstance(ids, Tensor) else 0
        by_formula = 0.0 if self._flops is None else self._flops.total(tokens, tokens * tokens // rows, rows)
        text = f"model FLOPs of the first micro-batch: {counted:.4g} by torch's counter, {by_formula:.4g} by formula"
        if abs(by_formula - counted) <= _TOLERANCE * counted:
            logger.info("%s", text)
            return
        (logger.info if self._flops is None else logger.warning)("%s; those of the counter are taken", text)
        self._flops = ModelFlops(per_token=counted / tokens) if tokens else ModelFlops(per_sample=counted / rows)

    def _explain(self, error: Exception) -> None:
        reason = f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        if self._flops is None:
            logger.warning("perf/ has no FLOPs, and no MFU: torch's counter cannot follow this model %s", reason)
        else:
            logger.info("model FLOPs are those of the formula: torch's counter cannot follow this model %s", reason)

    # --- batches ---------------------------------------------------------------------------------------------------

    def watch(self, batches: Any) -> Iterator[Any]:
        """Yield the batches of a pass over a loader. One of which no batch is taken is an evaluation, and a pause."""
        begin, taken = time.perf_counter(), self._num_taken
        if self._begun_at is None:
            self._begun_at, self._paused_seconds = begin, -self._stalled()
        paused = self._paused_seconds
        try:
            with closing(batches):
                for batch in batches:
                    self.pending = batch
                    yield batch
        finally:
            self.pending = None
            if self._num_taken == taken:
                self._paused_seconds = paused + time.perf_counter() - begin

    def take(self, rows: BatchRows | None, rank: int) -> None:
        """Count the batch that was yielded last, once: a backward follows it. None for rows that are not known."""
        if (batch := self.pending) is not None:
            self._paused_seconds += self.compare(batch)
            self._num_taken += 1
            self.add(batch, None if rows is None else rows.rows[rank])

    def add(self, batch: Any, num_samples: int | None = None) -> None:
        """Count a micro-batch of so many samples, None for its rows. Waits for nothing."""
        num_samples = (find_batch_size(batch) or 0) if num_samples is None else num_samples
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._samples += num_samples
        self.pending = None
        if not num_samples or not isinstance(ids, Tensor):
            return
        mask, positions = (_if_alike(batch.get(name), ids) for name in ("attention_mask", "position_ids"))
        if mask is None:
            self._tokens += ids.numel()
        if mask is None and positions is None:
            self._pairs += ids.numel() * ids.shape[-1]
        else:
            counts = _count_by_values(mask, positions)
            if self._on_device is None:
                self._on_device = torch.zeros(2, dtype=torch.int64, device=counts.device)
            self._on_device += counts.to(self._on_device.device, non_blocking=True)

    # --- figures ---------------------------------------------------------------------------------------------------

    def _work_seconds(self) -> float:
        """Return the seconds of a native loop until now in which it trained."""
        if self._begun_at is None:
            return 0.0
        return time.perf_counter() - self._begun_at - self._paused_seconds - self._stalled()

    def _gather(self, seconds: float) -> list[_Counts]:
        """Return the work of each rank since the last `read`, in `seconds` on this one. Collective."""
        if self._on_device is not None:
            tokens, pairs = self._on_device.tolist()
            self._tokens, self._pairs, self._on_device = self._tokens + tokens, self._pairs + pairs, None
        own = _Counts(
            self._tokens, self._pairs, self._samples, seconds, peak_memory(self._process.device), self._peak_flops,
            self._flops,
        )  # fmt: skip
        return collectives.gather_object(own, self._process)

    def count_tokens(self, copies: int) -> int:
        """Return the tokens of all ranks until now, each read by `copies` ranks. Collective; waits for the device."""
        return self.tokens_seen + sum(each.tokens for each in self._gather(0.0)) // copies

    def read(self, copies: int, updates: int | None = None, seconds: float | None = None) -> dict[str, float]:
        """Return the figures since the last call, over all ranks, and begin anew. Collective.

        Args:
            copies: the number of ranks that read the same data.
            updates: done since the beginning; None for those of the prepared optimizers.
            seconds: of training since the beginning; None for those in a native loop's passes.

        Returns:
            By name, without those that are not known: `perf/tokens_per_second` (padding does not count),
            `perf/samples_per_second`, `perf/step_seconds` (of an update, on the slowest rank),
            `perf/tflops_per_device` (10^12 model FLOPs a second), `perf/mfu` (their share of the peak),
            `perf/peak_memory_gib` (since the process began, of the rank with the most), `perf/peak_memory_rank` (the
            number of that rank, of several), `perf/tokens_seen` (since the run began).
        """
        if self._process.device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize(self._process.device)  # the time is that of work that is done
        now = self._work_seconds() if seconds is None else seconds
        ranks = self._gather(now - self._last_seconds)
        updates = PROGRESS.updates if updates is None else updates
        counts, steps = _total(ranks, copies), updates - self._last_updates
        self.begin(self.tokens_seen + counts[0], updates, now)
        figures = self._rates(ranks, counts, steps) if steps > 0 else {}
        figures |= _describe_memory([each.peak_bytes or 0 for each in ranks])
        return figures | ({"perf/tokens_seen": self.tokens_seen} if self.tokens_seen else {})

    def _rates(self, ranks: Sequence[_Counts], counts: tuple[int, int, int], steps: int) -> dict[str, float]:
        """Return the rates of so many updates of these tokens, pairs and samples in the time of the slowest rank."""
        seconds, (tokens, pairs, samples) = max(1e-9, *(each.seconds for each in ranks)), counts
        figures = {"perf/step_seconds": seconds / steps}
        for name, count in (("samples", samples), ("tokens", tokens)):
            if count:
                figures[f"perf/{name}_per_second"] = count / seconds
        if (flops := ranks[0].flops) is not None and samples:
            figures |= self._utilisation(flops.total(tokens, pairs, samples) / seconds, ranks)
        return figures

    def _utilisation(self, rate: float, ranks: Sequence[_Counts]) -> dict[str, float]:
        """Return the share of a device in `rate` operations a second of all ranks, and that of the peaks of all."""
        figures = {"perf/tflops_per_device": rate / len(ranks) / 1e12}
        known = [each.peak_flops for each in ranks if each.peak_flops is not None]
        if len(known) == len(ranks):
            return figures | {"perf/mfu": rate / sum(known)}
        logger.warning_once(
            f"perf/mfu is left out: the peak rate of {device_name(self._process.device)!r} is not known. Give that of "
            "one device, in operations a second, as peak_flops: TrainingArguments(peak_flops=989e12), the line "
            "peak_flops: 989e12 of a configuration file, or Accelerator(config={'meters': True, 'peak_flops': 989e12})"
        )
        return figures


def _total(ranks: Sequence[_Counts], copies: int) -> tuple[int, int, int]:
    """Return tokens, pairs and samples of all ranks, each of which so many have read."""
    tokens, pairs, samples = (
        sum(column) for column in zip(*((each.tokens, each.pairs, each.samples) for each in ranks), strict=True)
    )
    return tokens // copies, pairs // copies, samples // copies


def _describe_memory(peaks: Sequence[int]) -> dict[str, float]:
    """Return the most that a rank has taken of memory, and which one it is, of several; nothing where nobody counts."""
    most = max(peaks)
    if not most:
        return {}
    return {"perf/peak_memory_gib": most / 2**30} | ({"perf/peak_memory_rank": peaks.index(most)} if peaks[1:] else {})


def _count_by_values(mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """Return tokens and pairs of attention by a mask, or positions, (2,), int64; no tokens without a mask."""
    seen_BT = None if mask is None else mask != 0
    if positions is None:
        assert seen_BT is not None
        lengths_B = seen_BT.sum(-1)
        return torch.stack((lengths_B, lengths_B * lengths_B)).sum(-1)
    pairs_BT = 2 * positions + 1  # of rows that hold several sequences: 1 + 3 + ... + (2 n - 1) is the square of n
    if seen_BT is None:
        pairs = pairs_BT.sum()
        return torch.stack((torch.zeros_like(pairs), pairs))
    return torch.stack((seen_BT.sum(), (pairs_BT * seen_BT).sum()))


def _if_alike(value: Any, ids: Tensor) -> Tensor | None:
    """Return an entry of a batch that has a number for each token; None for one that is absent, or of another shape."""
    return value if isinstance(value, Tensor) and value.shape == ids.shape else None
