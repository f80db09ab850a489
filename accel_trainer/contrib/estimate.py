"""`accel-trainer estimate`: the memory that a model takes, from its configuration and without its weights.

By dtype; or of a rank of a job by purpose, with the collectives of a step, as `planner.py` finds it. As
`accel_trainer.commands.estimate` it is where programs look for the command as functions. `--help` imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_trainer.contrib.empty_models import LIBRARIES, create_empty_model
from accel_trainer.contrib.empty_models import add_timm_hub_prefix as add_timm_hub_prefix
from accel_trainer.contrib.empty_models import verify_on_hub as verify_on_hub
from accel_trainer.contrib.layouts import (
    SPEEDS,
    adapters_in_words,
    candidates,
    layout_name,
    outcomes,
    plan_of,
    try_plan,
    with_policy,
)
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import add_option, as_subcommand, command_parser
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import read_options
from accel_trainer.runtime.cores import usable_cores

if TYPE_CHECKING:
    from accel_trainer.contrib.planner import LayoutPlan

T = TypeVar("T")

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
_TRAINABLE = ("float32", "float16", "bfloat16")
_OF_A_JOB = "a rank of a job"


def run_estimate(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = estimate_command_parser()
    args, others = parser.parse_known_args(words)
    if others and args.num_processes is None and args.config_file is None:
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
    dtypes = ["float32", "float16", "int8", "int4"]
    text = f"default: {' '.join(dtypes)}"
    parser.add_argument("--dtypes", nargs="+", default=dtypes, choices=tuple(_BITS), help=text)
    text = "run the code that is beside the configuration; of authors whom you trust"
    add_option(parser, "trust_remote_code", action="store_true", help=text)
    plan = parser.add_argument_group(_OF_A_JOB)
    plan.add_argument("--config_file", "--config-file", "--config", metavar="FILE", help="as for launch")
    add_option(plan, "num_processes", type=int, metavar="N", help="processes of the job")
    plan.add_argument("--batch", type=int, default=1, metavar="N", help="rows that a rank reads at once [1]")
    plan.add_argument("--sequence", type=int, metavar="N", help="tokens of a row [2048, or the model's most]")
    plan.add_argument("--dtype", choices=_TRAINABLE, default="float32", help="of the weights [float32]")
    plan.add_argument(
        "--lora", type=int, metavar="RANK", help="train LoRA of that rank on all linear layers, with PEFT"
    )
    text = "with --lora: the frozen layers are packed by bitsandbytes, as QLoRA has them"
    add_option(plan, "load_in_4bit", action="store_true", help=text)
    plan.add_argument("--optimizer", default="AdamW", metavar="NAME", help="a class of torch.optim [AdamW]")
    for name, default, text in SPEEDS:
        add_option(plan, name, type=type(default), default=default, metavar="X", help=text)
    text = "plan the layouts that the job can have, the fastest first"
    plan.add_argument("--compare", action="store_true", help=text)
    text = "of a rank, 80GiB for one: with --compare, layouts that need more"
    plan.add_argument("--memory", metavar="SIZE", help=text)
    text = "choose micro-batch, accumulation, layout and ways to save memory with which a rank fits, 80GiB for one"
    plan.add_argument("--fit", metavar="SIZE", help=text)
    add_option(plan, "global_batch", type=int, metavar="N", help="with --fit: rows of an update over all ranks")
    text = "with --fit: the configuration file, with reasons beside the choices [printed]"
    plan.add_argument("--write", metavar="FILE", help=text)
    plan.add_argument("--json", action="store_true", help="print plans as JSON")
    plan.add_argument("--picture", metavar="FILE", help="write the memory by purpose as an SVG")
    return as_subcommand(parser, subparsers, "estimate-memory", estimate_command)


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table, or the plans, for parsed arguments; a CheckpointNotFoundError or ConfigError without a model."""
    from accel_trainer.runtime.memory import size_in_words

    if args.num_processes is not None or args.config_file is not None:
        return _print_plans(args)
    _refuse_options_of_a_job(args)
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    rows = [
        [dtype, *map(size_in_words, sizes), "N/A" if training["step"] < 0 else size_in_words(training["step"])]
        for dtype, *sizes, training in _sizes(model, args.dtypes)
    ]
    title = f"Memory usage of {type(model).__name__}, loaded from `{args.model_name}`"
    print(create_ascii_table(["dtype", "Largest Layer", "Total Size", "Training using Adam"], rows, title))


def _refuse_options_of_a_job(args: argparse.Namespace) -> None:
    group = next(group for group in estimate_command_parser()._action_groups if group.title == _OF_A_JOB)
    of_a_job = {each.option_strings[0]: (getattr(args, each.dest, each.default), each) for each in group._group_actions}
    given = [name for name, (value, each) in of_a_job.items() if value != each.default]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: of {_OF_A_JOB}, and no job is given, without which the model's sizes by dtype are "
            "printed; add --num_processes N (1 for one process), or --config FILE"
        )


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


def _print_plans(args: argparse.Namespace) -> None:
    """Print the plan of the configured layout, or of all; see the arguments' help."""
    from accel_trainer.big_models.device_map import convert_file_size_to_int

    limit = None if args.memory is None else convert_file_size_to_int(args.memory)
    options = _layout_options(args)
    if args.fit is not None:
        from accel_trainer.contrib.fitting import fit_layout

        return fit_layout(args, options)
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
    from accel_trainer.runtime.memory import size_in_words

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


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _comparison(plans: Sequence[LayoutPlan], limit: int | None, args: argparse.Namespace) -> str:
    """Return the plans that fit as a table, the fastest first, and a line about the others."""
    from accel_trainer.runtime.memory import size_in_words

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


# --- the picture ------------------------------------------------------------------------------------------------------

_COLOURS = ("#3b6ea5", "#7aa6d6", "#274b73", "#8a6fb0", "#9a9a9a", "#d98c3f", "#e8bf8a", "#5f9e6e")
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 250, 560, 18, 8, 46


def _draw(plans: Sequence[LayoutPlan], limit: int | None) -> str:
    """Return an SVG: the peak of each plan as a bar of its parts, and a line at the limit."""
    from accel_trainer.runtime.memory import size_in_words

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
