"""`accel-trainer estimate`: the memory that a model takes, from its configuration and without its weights.

By dtype; or of a rank of a job by purpose, with the collectives of a step, as `planner.py` finds it. As
`accel_trainer.commands.estimate` it is where programs look for the command as functions. `--help` imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_trainer.config.files import to_yaml
from accel_trainer.contrib.empty_models import LIBRARIES, create_empty_model
from accel_trainer.contrib.empty_models import add_timm_hub_prefix as add_timm_hub_prefix
from accel_trainer.contrib.empty_models import verify_on_hub as verify_on_hub
from accel_trainer.contrib.layouts import (
    MARGIN,
    SIZES_OF_MODELS,
    SPEEDS,
    DoesNotFitError,
    adapters_in_words,
    candidates,
    cost_of,
    layout_name,
    outcomes,
    plan_of,
    try_plan,
    with_policy,
)
from accel_trainer.errors import ConfigError, size_in_words
from accel_trainer.launch.cli import add_option, as_subcommand, command_parser
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import read_options, resolve_options
from accel_trainer.runtime.cores import usable_cores

if TYPE_CHECKING:
    from accel_trainer.contrib.planner import LayoutPlan

T = TypeVar("T")

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
_DTYPES = ["float32", "float16", "int8", "int4"]
_TRAINABLE = ("float32", "float16", "bfloat16")
_OF_A_JOB = "a rank of a job"


def run_estimate(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = estimate_command_parser()
    args, others = parser.parse_known_args(words)
    if others and not _names_a_job(args):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    args.layout_options = others
    args.num_workers = usable_cores()  # programs that call the functions may have no guard around their main part
    estimate_command(args)
    return 0


def main() -> None:
    """Run the command with the words of the command line."""
    estimate_command(estimate_command_parser().parse_args())


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer estimate`; with `subparsers`, as their command `estimate-memory`."""
    description = (
        "Print the memory that a model takes, for each dtype: of its largest layer, of all weights and buffers, and in "
        "training with Adam (weights, gradients and two states in that dtype; activations are not in it). In mixed "
        "precision all of these stay in float32. With --num_processes, or a --config that has it: the memory of a rank "
        "of that job by purpose, and the collectives of a step, from a step of the real strategy on tensors without "
        "memory. Options of `launch` that choose a layout may stand behind MODEL: --use_fsdp, --parallel_tp_size 8, "
        "--mixed_precision bf16, ..."
    )
    parser = command_parser("estimate", description)
    parser.add_argument("model_name", metavar="MODEL", help="a directory, a config.json, or a name on the Hub")
    text = "whose model it is, where its files do not say so"
    add_option(parser, "library_name", choices=LIBRARIES, help=text)
    text = f"default: {' '.join(_DTYPES)}"
    parser.add_argument("--dtypes", nargs="+", default=_DTYPES, choices=tuple(_BITS), help=text)
    text = "run the code that is beside the configuration; of authors whom you trust"
    add_option(parser, "trust_remote_code", action="store_true", help=text)
    plan, defaults = parser.add_argument_group(_OF_A_JOB), dict[str, Any]()

    def add(name: str, *others: str, default: Any = None, **words: Any) -> None:
        # Arguments hold those that are given, and the defaults beside them.
        defaults[name] = default
        add_option(plan, name, *others, default=argparse.SUPPRESS, **words)

    add("config_file", "--config", metavar="FILE", help="as for launch")
    add("num_processes", type=int, metavar="N", help="processes of the job")
    add("batch", type=int, default=1, metavar="N", help="rows that a rank reads at once [1]")
    add("sequence", type=int, metavar="N", help="tokens of a row [2048, or the model's most]")
    add("dtype", choices=_TRAINABLE, default="float32", help="of the weights [float32]")
    add("lora", type=int, metavar="RANK", help="train LoRA of that rank on all linear layers, with PEFT")
    text = "with --lora: the frozen layers are packed by bitsandbytes, as QLoRA has them"
    add("load_in_4bit", default=False, action="store_true", help=text)
    add("optimizer", default="AdamW", metavar="NAME", help="a class of torch.optim [AdamW]")
    for name, default, text in SPEEDS:
        add(name, type=type(default), default=default, metavar="X", help=text)
    text = "plan the layouts that the job can have, the fastest first"
    add("compare", default=False, action="store_true", help=text)
    text = "of a rank, 80GiB for one: whether the plan fits; with --compare, layouts that need more are left out"
    add("memory", metavar="SIZE", help=text)
    text = "choose micro-batch, accumulation, layout and ways to save memory with which a rank fits, 80GiB for one"
    add("fit", metavar="SIZE", help=text)
    add("global_batch", type=int, metavar="N", help="with --fit: rows of an update over all ranks")
    text = "with --fit: the configuration file, with reasons beside the choices [printed]"
    add("write", metavar="FILE", help=text)
    add("json", default=False, action="store_true", help="print plans as JSON")
    add("picture", metavar="FILE", help="write the memory by purpose as an SVG")
    parser.set_defaults(of_a_job=defaults)
    return as_subcommand(parser, subparsers, "estimate-memory", estimate_command)


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table, or the plans, for parsed arguments; a CheckpointNotFoundError or ConfigError without a model."""
    if _names_a_job(args):
        _check_effects(args)
        args = _with_defaults(args)
        _check_values(args)
        return _print_plans(args)
    if given := [f"--{name}" for name in args.of_a_job if name in args]:
        raise ConfigError(
            f"{', '.join(given)}: of {_OF_A_JOB}, and no job is given, without which the model's sizes by dtype are "
            "printed; add --num_processes N (1 for one process), or --config FILE"
        )
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    rows = [
        [dtype, *map(size_in_words, sizes), "N/A" if training["step"] < 0 else size_in_words(training["step"])]
        for dtype, *sizes, training in _sizes(model, args.dtypes)
    ]
    title = f"Memory usage of {type(model).__name__}, loaded from `{args.model_name}`"
    print(create_ascii_table(["dtype", "Largest Layer", "Total Size", "Training using Adam"], rows, title))


def _names_a_job(args: argparse.Namespace) -> bool:
    return "num_processes" in args or "config_file" in args


def _check_effects(args: argparse.Namespace) -> None:
    """Refuse options of a job that change nothing beside the others."""
    fits, as_json = "fit" in args, "json" in args and "picture" not in args
    for names, is_without_effect, owner in (
        (("dtypes",), args.dtypes != _DTYPES, "sizes without a job; the weights of a plan are of --dtype"),
        (("global_batch", "write"), not fits, "--fit SIZE, which is not given; add it, or leave these out"),
        (
            ("batch", "compare", "memory", "json", "picture"),
            fits,
            "plans, and --fit writes the options that it finds for its own SIZE; leave out one or the other",
        ),
        (("memory",), as_json, "tables and pictures, and --json has the peak of each plan; leave out one of them"),
    ):
        if is_without_effect and (given := [f"--{name}" for name in names if name in args]):
            raise ConfigError(f"{', '.join(given)}: of {owner}")


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**args.of_a_job, **vars(args)})


def _check_values(args: argparse.Namespace) -> None:
    """Refuse, before a plan is made, numbers that no job has, and files that cannot be written."""
    for name in ("batch", "sequence", *(name for name, *_ in SPEEDS)):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name} is {value}; give a number above 0")
    for name in ("picture", "write"):
        value = getattr(args, name)
        if value is not None and not (folder := Path(value).parent).is_dir():
            raise ConfigError(f"--{name} {value} cannot be written: there is no {folder}; name another file")


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each of `args.dtypes`: dtype, bytes of the largest layer, of all, and in training by purpose."""
    return _sizes(create_empty_model(args.model_name, args.library_name, args.trust_remote_code), args.dtypes)


def _sizes(model: Any, dtypes: Sequence[str]) -> list[list[Any]]:
    from accel_trainer.big_models.device_map import calculate_maximum_sizes

    total, (largest, _) = calculate_maximum_sizes(model)
    return [
        [dtype, largest * _BITS[dtype] / 32, total * _BITS[dtype] / 32, estimate_training_usage(total, dtype)]
        for dtype in dtypes
    ]


def estimate_training_usage(bytes: int, mixed_precision: str) -> dict[str, float]:
    """Return the bytes of training with Adam: of model, gradients and the optimizer's states, and of all in a step.

    Args:
        bytes: of the model in float32.
        mixed_precision: dtype that weights, gradients and states have; in those that are not trained, all are -1.
    """
    if mixed_precision not in _TRAINABLE:
        return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)
    size = bytes * _BITS[mixed_precision] / 32
    return {"model": size, "optimizer": 2 * size, "gradients": size, "step": 4 * size}


def create_ascii_table(headers: list[str], rows: list[list[str]], title: str) -> str:
    """Return rows as lines of text below their headers and a title, each column as wide as its longest word."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(f"{word:>{width}}" for word, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return "\n".join([title, *lines])


# --- layouts ----------------------------------------------------------------------------------------------------------


_FLAGS_OF = {"ddp": "--multi_gpu", "fsdp2": "--use_fsdp"}
_POLICIES = ("off", "selective", "every:2", "full")


def _take_machines(args: argparse.Namespace, options: Options) -> None:
    """Take the ranks of a machine from the configuration, where that says how many machines there are."""
    resolved, _ = resolve_options(options, os.environ, None)
    if resolved.is_set("launch.num_machines") and (num_processes := resolved.config.launch.num_processes):
        args.ranks_per_node = -(-num_processes // resolved.config.launch.num_machines)


def _print_plans(args: argparse.Namespace) -> None:
    """Print the plan of the configured layout, or of all; see the arguments' help."""
    from accel_trainer.big_models.device_map import convert_file_size_to_int

    limit = None if args.memory is None else convert_file_size_to_int(args.memory)
    options = _layout_options(args)
    _take_machines(args, options)
    if args.fit is not None:
        return _fit_layout(args, options, convert_file_size_to_int(args.fit))
    if args.compare:
        plans = sorted(_all_plans(args, options), key=lambda plan: plan.seconds_per_row)
    else:
        plans = [plan_of(args, options, {})]
    if args.picture is not None:
        Path(args.picture).write_text(_draw(plans, limit), encoding="utf-8")
    if args.json:
        content = [{**dataclasses.asdict(plan), "seconds_per_row": plan.seconds_per_row} for plan in plans]
        for each in content:
            each["exchanges"] = [exchange._asdict() for exchange in each["exchanges"]]
        print(json.dumps(content if args.compare else content[0], indent=2))
    elif args.compare:
        print(_comparison(plans, limit, args))
    else:
        print(_plan_table(plans[0], _plans_by_policy(args, options, plans[0].checkpointing), args))
        if limit is not None:
            print(_verdict(plans[0], limit, args.memory))


def _layout_options(args: argparse.Namespace) -> Options:
    words = [] if args.config_file is None else ["--config_file", args.config_file]
    words += [] if args.num_processes is None else ["--num_processes", str(args.num_processes)]
    options = read_options([*words, *getattr(args, "layout_options", ())], "accel-trainer estimate", os.environ)
    if options.rest:
        raise ConfigError(
            f"accel-trainer estimate: {' '.join(options.rest)} belongs to no option; the model comes first, and "
            "options of launch behind it"
        )
    return options


def _plans_by_policy(args: argparse.Namespace, options: Options, own: str) -> list[LayoutPlan]:
    """Return the plans of a layout by each policy that the model can take, `own` among them."""
    plans = (try_plan(args, options, with_policy(policy)) for policy in dict.fromkeys([*_POLICIES, own]))
    return [plan for plan in plans if not isinstance(plan, ConfigError)]


def _all_plans(args: argparse.Namespace, options: Options) -> list[LayoutPlan]:
    """Return the plans of layouts that the model and the number of processes allow; without any, raise the refusal."""
    found = outcomes(args, candidates(args, options), partial(try_plan, args, options))
    plans = [outcome for outcome in found if not isinstance(outcome, ConfigError)]
    if not plans:
        raise next(outcome for outcome in reversed(found) if isinstance(outcome, ConfigError))
    return plans


def _plan_table(plan: LayoutPlan, policies: Sequence[LayoutPlan], args: argparse.Namespace) -> str:
    """Return a plan as tables: of memory, of its `policies` of activation checkpointing, and of collectives."""
    memory = [
        ("parameters", plan.parameters, plan.peak_parts["parameters"]),
        ("gradients", plan.gradients, plan.peak_parts["gradients"]),
        ("optimizer state", plan.optimizer_state, plan.peak_parts["optimizer_state"]),
        ("averages of the weights", plan.peak_parts["averages"] or None, plan.peak_parts["averages"] or None),
        ("buffers of the model", plan.peak_parts["buffers"], plan.peak_parts["buffers"]),
        ("gathered units, at most", plan.unsharded, plan.peak_parts["unsharded"]),
        ("buffers of collectives", None, plan.peak_parts["exchange"]),
        ("activations after the forward", plan.activations, plan.peak_parts["activations"]),
        ("peak", None, plan.peak),
    ]
    rows = [[name, *("" if size is None else size_in_words(size) for size in sizes)] for name, *sizes in memory]
    title = (
        f"A rank of {layout_name(plan)} ({plan.strategy}), {args.batch} x {args.sequence} for each of "
        f"{plan.num_readers} reader(s), {args.optimizer}{adapters_in_words(args)}"
    )
    tables = [create_ascii_table(["memory", "size", "at the peak"], [r for r in rows if any(r[1:])], title)]
    headers = ["activation_checkpointing", "activations", "peak", "computed again", "computation"]
    fewest, lines = min(other.flops for other in policies), []
    for other in policies:
        sizes, again = map(size_in_words, (other.activations, other.peak)), other.flops / fewest - 1
        lines.append([other.checkpointing, *sizes, f"{100 * again:.0f} %", _ms(other.compute_seconds)])
    tables.append(create_ascii_table(headers, lines, f"\nPolicies; this plan has {plan.checkpointing}"))
    if plan.exchanges:
        headers = ["collective", "axis", "ranks", "calls", "full tensors", "time"]
        lines = [
            [kind, axis, str(num_ranks), str(calls), size_in_words(num_bytes), _ms(seconds)]
            for kind, axis, num_ranks, calls, num_bytes, seconds, _ in plan.exchanges
        ]
        tables.append(create_ascii_table(headers, lines, "\nCollectives of an update"))
    tables.append(
        f"\n{plan.flops / 1e12:.1f} TFLOP in {_ms(plan.compute_seconds)}, collectives in {_ms(plan.exchange_seconds)}, "
        f"of which {_ms(plan.exposed_seconds)} are not hidden by computation (at {args.bandwidth:g} GB/s between "
        f"machines of {args.ranks_per_node}, {args.node_bandwidth:g} within, {args.teraflops:g} TFLOP/s)"
    )
    tables += [_BALANCE] * plan.assumes_balance
    return "\n".join(tables)


_BALANCE = "Routing is assumed to be balanced: each expert gets as many tokens as the others"


def _verdict(plan: LayoutPlan, limit: int, memory: str) -> str:
    needed = MARGIN * plan.peak
    left = size_in_words(abs(limit - needed))
    end = f"and {left} of {memory} are left" if needed <= limit else f"{left} more than {memory}, and does not fit"
    return f"With the 5 % that a plan may miss a rank needs {size_in_words(needed)}, {end}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _comparison(plans: Sequence[LayoutPlan], limit: int | None, args: argparse.Namespace) -> str:
    """Return the plans that fit as a table, the fastest first, and a line about the others."""
    fitting = [plan for plan in plans if limit is None or plan.peak <= limit]
    headers = ["layout", "strategy", "checkpointing", "state", "activations", "peak", "compute", "exposed", "per row"]
    title = (
        f"Layouts of `{args.model_name}`, {args.batch} x {args.sequence} for each reader, {args.optimizer}"
        f"{adapters_in_words(args)}, the fastest first (computation and exposed communication, per row of all)"
    )
    rows = []
    for plan in fitting:
        sizes = (plan.parameters + plan.gradients + plan.optimizer_state, plan.activations, plan.peak)
        times = (plan.compute_seconds, plan.exposed_seconds, plan.seconds_per_row)
        names = [layout_name(plan), plan.strategy, plan.checkpointing]
        rows.append([*names, *map(size_in_words, sizes), *map(_ms, times)])
    lines = [create_ascii_table(headers, rows, title)] if fitting else []
    if len(fitting) < len(plans):
        least = min(plan.peak for plan in plans if plan not in fitting)
        lines.append(f"{len(plans) - len(fitting)} more need above {args.memory}: {size_in_words(least)} at least")
    lines += [_BALANCE] * plans[0].assumes_balance
    if fitting:
        lines.append(f"The first: accel-trainer launch {' '.join(_launch_flags(fitting[0]))} ...")
    return "\n".join(lines)


def _launch_flags(plan: LayoutPlan) -> Iterator[str]:
    if plan.strategy in _FLAGS_OF:
        yield _FLAGS_OF[plan.strategy]
    if plan.is_sharded:
        yield from (f"--parallel_{axis}_size {size}" for axis, size in plan.sizes.items() if size > 1)
    if plan.recomputes:
        yield f"--activation_checkpointing {plan.checkpointing}"


# --- the fastest options that fit -------------------------------------------------------------------------------------


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


def _fit_layout(args: argparse.Namespace, options: Options, limit: int) -> None:
    """Write the fastest configuration that fits, or print it; a ConfigError where none does, or without `global_batch`.

    Each layout is planned with its ways to save memory, in the order of what they cost, and with the most rows of a
    micro-batch that fit; the fastest becomes a configuration file, with the reason beside each choice.
    """
    if args.global_batch is None or args.global_batch < 1:
        raise ConfigError(
            f"--fit shares the rows of an update out over ranks and micro-batches, and --global_batch is "
            f"{args.global_batch}; give the rows of an update over all ranks"
        )
    search = Search(args, options, limit)
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
            return DoesNotFitError(f"{layout_name(single)}: {size_in_words(MARGIN * single.peak)} for one row")
        return min(fits, key=lambda fit: fit.seconds)

    def _refuse(self, flags: Mapping[str, Any]) -> ConfigError | None:
        """Return what a layout needs with all that saves memory, where that is too much."""
        with suppress(ConfigError):  # of a head that is no plain product, or a model without layers
            plan = self._plan(flags, 1)
            if MARGIN * plan.peak > self._limit:
                size = size_in_words(MARGIN * plan.peak)
                return DoesNotFitError(f"{layout_name(plan)}: {size} for one row, with all that saves memory")
        return None

    def _share(self, flags: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows of an update for each rank that reads, and the number of those."""
        readers = flags.get("parallel.dp_replicate_size", 1) * flags.get("parallel.dp_shard_size", 1)
        share, rest = divmod(self._args.global_batch, readers)
        if rest:
            raise DoesNotFitError(f"{self._args.global_batch} rows of an update over {readers} ranks: no whole number")
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
        plans: dict[int, LayoutPlan] = {}
        per_row = float(single.peak)
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


# --- the picture ------------------------------------------------------------------------------------------------------

_COLOURS = ("#3b6ea5", "#7aa6d6", "#274b73", "#8a6fb0", "#9a9a9a", "#d98c3f", "#e8bf8a", "#5f9e6e")
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 250, 560, 18, 8, 46


def _draw(plans: Sequence[LayoutPlan], limit: int | None) -> str:
    """Return an SVG: the peak of each plan as a bar of its parts, and a line at the limit."""
    parts = list(plans[0].peak_parts)
    most = max([plan.peak for plan in plans] + ([] if limit is None else [limit]))
    scale, height = _WIDTH / most, _TOP + len(plans) * (_BAR + _GAP) + 10
    drawn = []
    for index, part in enumerate(parts):
        left = 10 + 108 * index
        drawn.append(f'<rect x="{left}" y="12" width="10" height="10" fill="{_COLOURS[index]}"/>')
        drawn.append(f'<text x="{left + 14}" y="21">{escape(part.replace("_", " "))}</text>')
    for row, plan in enumerate(plans):
        x, y = float(_LEFT), _TOP + row * (_BAR + _GAP)
        label = f"{layout_name(plan)}{f', {plan.checkpointing}' * plan.recomputes}"
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for part, colour in zip(parts, _COLOURS, strict=True):
            width = plan.peak_parts[part] * scale
            title = f"<title>{escape(part.replace('_', ' '))}: {size_in_words(plan.peak_parts[part])}</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}">{title}</rect>'
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{size_in_words(plan.peak)}</text>')
    if limit is not None:
        end = _LEFT + limit * scale
        drawn.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{_TOP - 6}" y2="{height - 6}" stroke="#b00020"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" role="img" '
        f'aria-label="Memory of a rank at its peak" font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>\n'
    )
