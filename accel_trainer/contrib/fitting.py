"""`accel-trainer estimate --fit 80GiB`: the options with which an update of so many rows fits, cheapest in time first.

Each layout is planned with its ways to save memory, in the order of what they cost, and with the most rows of a
micro-batch that fit; the fastest becomes a configuration file, with the reason beside each choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_trainer.big_models.device_map import convert_file_size_to_int
from accel_trainer.config.files import to_yaml
from accel_trainer.contrib.layouts import (
    SIZES_OF_MODELS,
    adapters_in_words,
    candidates,
    layout_name,
    outcomes,
    plan_of,
    with_policy,
)
from accel_trainer.contrib.planner import LayoutPlan
from accel_trainer.contrib.preflight import MARGIN, cost_of
from accel_trainer.errors import ConfigError
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import resolve_options
from accel_trainer.runtime.memory import size_in_words

_ROWS, _STEPS = "accumulation.micro_batch_size", "accumulation.num_steps"
_POLICY, _LOSS, _OFFLOAD = "activation_checkpointing", "loss", "fsdp.offload_params"
_CHUNKED = {_LOSS: "chunked"}
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    _CHUNKED,
    {**_CHUNKED, **with_policy("selective")},
    {**_CHUNKED, **with_policy("every:2")},
    {**_CHUNKED, **with_policy("full")},
)
"""Ways to save memory, from the one that costs least on."""
_MORE_WAYS: dict[Any, tuple[dict[str, Any], ...]] = {"fsdp2": ({**_CHUNKED, **with_policy("full"), _OFFLOAD: True},)}
"""Those that a strategy has beside."""
_HOST_BANDWIDTH = 20e9
"""Bytes a second between device and host, and of an update on the host: both are bound by memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A layout whose ranks fit, with the most rows of a micro-batch for it."""

    flags: Mapping[str, Any]
    """All options that were chosen, by dotted path."""
    plan: LayoutPlan
    seconds: float
    """Of an update, with what it takes to save memory."""
    reasons: Mapping[str, str]
    """Of choices, by dotted path."""


def fit_layout(args: argparse.Namespace, options: Options) -> None:
    """Write the fastest configuration that fits, or print it.

    Raises:
        ConfigError: nothing fits, or the rows of an update are not given.
    """
    if args.global_batch is None or args.global_batch < 1:
        raise ConfigError(
            f"--fit shares the rows of an update out over ranks and micro-batches, and --global_batch is "
            f"{args.global_batch}; give the rows of an update over all ranks"
        )
    search = Search(args, options, convert_file_size_to_int(args.fit))
    text, best = search.write(fits := _find_fits(args, options, search)), fits[0]
    if args.write is None:
        print(text, end="")
    else:
        Path(args.write).write_text(text, encoding="utf-8")
        print(f"{args.write}: {_summary(best)}")


def _find_fits(args: argparse.Namespace, options: Options, search: Search) -> list[Fit]:
    """Return the layouts that fit, the fastest first; a ConfigError where there is none."""
    fits, problems = list[Fit](), list[ConfigError]()
    layouts = list(candidates(args, options, policies=("off",)))
    # Ranks that share layers or tokens wait for each other in each of them: they are planned where replicas and shards
    # of the state alone do not suffice.
    for shares_models in (False, True):
        chosen = [each for each in layouts if shares_models == any(each.get(path, 1) > 1 for path in SIZES_OF_MODELS)]
        for outcome in [] if fits else outcomes(args, chosen, search):
            if isinstance(outcome, ConfigError):
                problems.append(outcome)
            else:
                fits.append(outcome)
    if not fits:
        sizes = [problem for problem in problems if "for one row" in str(problem)]
        reasons = "\n".join(f"  {problem}" for problem in (sizes or problems)[:8])
        raise ConfigError(
            f"no layout of {args.model_name} fits {args.fit} a rank; use more ranks or fewer tokens:\n{reasons}"
        )
    return sorted(fits, key=lambda fit: fit.seconds)


def _summary(fit: Fit) -> str:
    peak, rows, steps = size_in_words(fit.plan.peak), fit.flags[_ROWS], fit.flags[_STEPS]
    name = f"{layout_name(fit.plan)} ({fit.plan.strategy})"
    ways = [f"{path}={fit.flags[path]}" for path in (_LOSS, _POLICY, _OFFLOAD) if fit.flags.get(path, "off") != "off"]
    words = ", ".join([name, f"{rows} rows x {steps}", *ways])
    return f"{words}: {peak} at the peak, {1000 * fit.seconds:.4g} ms an update"


def _without_loss(way: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for path, value in way.items() if path != _LOSS}


def _gains_nothing_by_rows(fit: Fit, single: LayoutPlan) -> bool:
    """Whether larger micro-batches, for which a way that saves more makes room, would win nothing back."""
    return fit.flags[_STEPS] == 1 or single.exposed_seconds < 0.01 * single.compute_seconds


class Search:
    """The search for the fastest way of one layout; picklable, since several go on at a time."""

    def __init__(self, args: argparse.Namespace, options: Options, limit: int) -> None:
        """Take the command's arguments, its options of `launch`, and the bytes of a rank."""
        self._args, self._options, self._limit = args, options, limit

    def __call__(self, layout: Mapping[str, Any]) -> Fit | ConfigError:
        """Return the fastest fit of a layout, or the reason why there is none."""
        fits: list[Fit] = []
        needed: dict[str, str] = {}
        """By the choice that came after, what a rank of one row needed without it."""
        has_chunks = True
        ways = (*_WAYS, *_MORE_WAYS.get(layout.get("strategy"), ()))
        for way in ways:
            flags = {**layout, **(way if has_chunks else _without_loss(way))}
            try:
                single = self._plan(flags, 1)
            except ConfigError as error:
                if not way:  # an axis that the model, or the number of rows, cannot be shared over
                    return error
                has_chunks = has_chunks and way is not _CHUNKED  # a head that is no plain product
                continue
            if (size := MARGIN * single.peak) <= self._limit:
                fits.append(self._most_rows(flags, single, needed))
                if _gains_nothing_by_rows(fits[-1], single):
                    break
                continue
            if not way and (problem := self._refuse({**layout, **ways[-1]})) is not None:
                return problem
            needed |= dict.fromkeys({_LOSS, _POLICY, _OFFLOAD} - set(way), size_in_words(size))
        if not fits:
            return ConfigError(f"{layout_name(single)}: {size_in_words(MARGIN * single.peak)} for one row")
        return min(fits, key=lambda fit: fit.seconds)

    def _refuse(self, flags: Mapping[str, Any]) -> ConfigError | None:
        """Return what a layout needs with all that saves memory, where that is too much."""
        with suppress(ConfigError):  # of a head that is no plain product, or a model without layers
            plan = self._plan(flags, 1)
            if MARGIN * plan.peak > self._limit:
                size = size_in_words(MARGIN * plan.peak)
                return ConfigError(f"{layout_name(plan)}: {size} for one row, with all that saves memory")
        return None

    def _share(self, flags: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows of an update for each rank that reads, and the number of those."""
        readers = flags.get("parallel.dp_replicate_size", 1) * flags.get("parallel.dp_shard_size", 1)
        share, rest = divmod(self._args.global_batch, readers)
        if rest:
            raise ConfigError(f"{self._args.global_batch} rows of an update over {readers} ranks: no whole number")
        return share, readers

    def _plan(self, flags: Mapping[str, Any], rows: int) -> LayoutPlan:
        args = argparse.Namespace(**{**vars(self._args), "batch": rows})
        plan = plan_of(args, self._options, {**flags, _STEPS: self._share(flags)[0] // rows})
        self._args.sequence = args.sequence  # the model's, where none was given
        return plan

    def _most_rows(self, flags: Mapping[str, Any], single: LayoutPlan, needed: Mapping[str, str]) -> Fit:
        """Return the fit with the most rows of a micro-batch, given the plan of one row."""
        share, readers = self._share(flags)
        rows, plan, refused = self._search_rows(flags, single, share)
        reasons = {
            _ROWS: f"the most that fit; {refused}" if refused else "all that a rank has of an update",
            _STEPS: f"{self._args.global_batch} rows = {rows} x {share // rows} x {readers} ranks that read",
        }
        for path in flags.keys() & {_LOSS, _POLICY, _OFFLOAD}:
            without = needed.get(path)
            reasons[path] = f"without, one row needs {without}" if without else "more rows at once are faster"
        seconds = cost_of(flags) * plan.seconds_per_row * plan.rows
        if flags.get(_OFFLOAD):
            state = plan.parameters + plan.gradients + plan.optimizer_state
            seconds += ((share // rows) * (2 * plan.parameters + plan.gradients) + state) / _HOST_BANDWIDTH
        chosen = {_ROWS: rows, _STEPS: share // rows}
        return Fit(flags={**flags, **chosen}, plan=plan, seconds=seconds, reasons=reasons)

    def _search_rows(self, flags: Mapping[str, Any], single: LayoutPlan, share: int) -> tuple[int, LayoutPlan, str]:
        """Return the most rows of a micro-batch that fit, with their plan, and why the next number does not."""
        refused = ""
        sizes = [size for size in range(share, 1, -1) if share % size == 0]
        plans, per_row = dict[int, LayoutPlan](), float(single.peak)
        # No row takes more than the first with all that is there anyway. Where that may be too much, two rows tell.
        if sizes and MARGIN * single.peak * share > self._limit:
            plans[sizes[-1]] = self._plan(flags, sizes[-1])
            per_row = (plans[sizes[-1]].peak - single.peak) / (sizes[-1] - 1)
        for size in sizes:
            peak = single.peak + per_row * (size - 1)
            # Memory is about linear in rows: what is foreseen to fit is planned, down to the first that does.
            if MARGIN * peak <= self._limit:
                peak = (found := plans.get(size) or self._plan(flags, size)).peak
                if MARGIN * peak <= self._limit:
                    return size, found, refused
            refused = f"{size} would need about {size_in_words(MARGIN * peak)}"
        return 1, single, refused

    def write(self, fits: list[Fit]) -> str:
        """Return the first of some fits as a configuration file, with reasons as comments."""
        args, best = self._args, fits[0]
        options = dataclasses.replace(self._options, flags={**self._options.flags, **best.flags})
        resolved, _ = resolve_options(options, os.environ, None)
        reasons = {
            **dict.fromkeys(self._options.flags, "as it was given"),
            "strategy": f"the fastest of {len(fits)} layout(s) that fit",
            **best.reasons,
        }
        head = [
            f"# {args.model_name} with updates of {args.global_batch} rows of {args.sequence} tokens, "
            f"{args.optimizer}, weights in {args.dtype}{adapters_in_words(args)}:",
            f"# {size_in_words(best.plan.peak)} of {args.fit} at the peak, {1000 * best.seconds:.4g} ms an update at "
            f"{args.teraflops:g} TFLOP/s, planned by `accel-trainer estimate --fit`.",
            *[f"# Next: {_summary(fit)}" for fit in fits[1:3]],
        ]
        return "\n".join(head) + "\n" + _with_comments(to_yaml(resolved.config), reasons)


def _with_comments(text: str, reasons: Mapping[str, str]) -> str:
    """Return YAML of nested mappings with a comment behind each option that has a reason."""
    lines, path = [], list[str]()
    for line in text.splitlines():
        key = line.strip().partition(":")[0]
        path[(len(line) - len(line.lstrip())) // 2 :] = [key]
        reason = reasons.get(".".join(path))
        lines.append(f"{line}  # {reason}" if reason else line)
    return "\n".join(lines) + "\n"
