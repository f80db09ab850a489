"""`accel-trainer estimate`: the memory that a model takes, from its configuration and without its weights.

By dtype; or of a rank of a job by purpose, with the collectives of a step, as `planner.py` finds it. As
`accel_trainer.commands.estimate` it is where programs look for the command as functions. `--help` imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_trainer.errors import CheckpointNotFoundError, ConfigError, MissingExtraError
from accel_trainer.launch.cli import add_option, as_subcommand, command_parser
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import read_options, resolve_options
from accel_trainer.runtime.cores import usable_cores

if TYPE_CHECKING:
    from accel_trainer.contrib.planner import LayoutPlan

T = TypeVar("T")

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
_TRAINABLE = ("float32", "float16", "bfloat16")
_LIBRARIES = ("timm", "transformers")


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
    add_option(parser, "library_name", choices=_LIBRARIES, help=text)
    dtypes = ["float32", "float16", "int8", "int4"]
    text = f"default: {' '.join(dtypes)}"
    parser.add_argument("--dtypes", nargs="+", default=dtypes, choices=tuple(_BITS), help=text)
    text = "run the code that is beside the configuration; of authors whom you trust"
    add_option(parser, "trust_remote_code", action="store_true", help=text)
    plan = parser.add_argument_group("a rank of a job")
    plan.add_argument("--config_file", "--config-file", "--config", metavar="FILE", help="as for launch")
    add_option(plan, "num_processes", type=int, metavar="N", help="processes of the job")
    plan.add_argument("--batch", type=int, default=1, metavar="N", help="rows that a rank reads at once [1]")
    plan.add_argument("--sequence", type=int, metavar="N", help="tokens of a row [2048, or the model's most]")
    plan.add_argument("--dtype", choices=_TRAINABLE, default="float32", help="of the weights [float32]")
    plan.add_argument("--optimizer", default="AdamW", metavar="NAME", help="a class of torch.optim [AdamW]")
    for name, default, text in _SPEEDS:
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


_SPEEDS = (
    ("ranks_per_node", 8, "ranks of one machine, unless the number of machines is configured [8]"),
    ("bandwidth", 50.0, "GB/s that a rank sends to other machines [50]"),
    ("node_bandwidth", 300.0, "GB/s that a rank sends within its machine [300]"),
    ("teraflops", 400.0, "10^12 operations a second of matrix products, as a rank sustains them [400]"),
)


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table, or the plans, for parsed arguments; a CheckpointNotFoundError or ConfigError without a model."""
    from accel_trainer.big_models.device_map import convert_bytes

    if args.num_processes is not None or args.config_file is not None:
        return _print_plans(args)
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    rows = [
        [dtype, *map(convert_bytes, sizes), "N/A" if training["step"] < 0 else convert_bytes(training["step"])]
        for dtype, *sizes, training in _sizes(model, args.dtypes)
    ]
    title = f"Memory usage of {type(model).__name__}, loaded from `{args.model_name}`"
    print(create_ascii_table(["dtype", "Largest Layer", "Total Size", "Training using Adam"], rows, title))


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
SIZES_OF_MODELS = ("parallel.tp_size", "parallel.sp_size", "parallel.ep_size")
"""The axes that not every model can take."""


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


def with_policy(policy: str) -> dict[str, Any]:
    """Return the options of a policy of activation checkpointing, whichever option the configuration has it by."""
    return {"activation_checkpointing": policy, "fsdp.activation_checkpointing": False}


def _plans_by_policy(args: argparse.Namespace, options: Options, own: str) -> list[LayoutPlan]:
    """Return the plans of a layout by each policy that the model can take, `own` among them."""
    plans = (_try_plan(args, options, with_policy(policy)) for policy in dict.fromkeys([*_POLICIES, own]))
    return [plan for plan in plans if not isinstance(plan, ConfigError)]


def plan_of(args: argparse.Namespace, options: Options, flags: Mapping[str, Any]) -> LayoutPlan:
    """Return the plan of the job that the options configure, with some of them replaced."""
    # A compiler has nothing to compile, and memory hardly differs.
    flags = {**options.flags, "compile.backend": "no", **flags}
    resolved, _ = resolve_options(dataclasses.replace(options, flags=flags), os.environ, None)
    launch = resolved.config.launch
    if launch.num_processes is None:
        raise ConfigError("the plan of a layout needs the number of processes; add --num_processes N")
    from accel_trainer.checkpoint.weights.into_model import as_dtype
    from accel_trainer.contrib.planner import Cluster, Workload, plan_layout

    cluster = Cluster(**{name: getattr(args, name) for name, *_ in _SPEEDS})
    if resolved.is_set("launch.num_machines"):
        cluster = dataclasses.replace(cluster, ranks_per_node=-(-launch.num_processes // launch.num_machines))
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2048
    args.sequence = args.sequence or min(2048, most)
    workload = Workload(batch=args.batch, sequence=args.sequence, dtype=as_dtype(args.dtype), optimizer=args.optimizer)
    return plan_layout(model, resolved, launch.num_processes, workload, cluster)


_ALONE_SECONDS = 5.0
"""How long layouts are compared in this process alone: another one imports torch and transformers for that long."""


def _all_plans(args: argparse.Namespace, options: Options) -> list[LayoutPlan]:
    """Return the plans of layouts that the model and the number of processes allow; without any, raise the refusal."""
    found = outcomes(args, candidates(args, options), partial(_try_plan, args, options))
    plans = [outcome for outcome in found if not isinstance(outcome, ConfigError)]
    if not plans:
        raise next(outcome for outcome in reversed(found) if isinstance(outcome, ConfigError))
    return plans


def outcomes(
    args: argparse.Namespace, layouts: Iterable[Mapping[str, Any]], plan: Callable[[Any], T | ConfigError]
) -> list[T | ConfigError]:
    """Return plans or refusals, after some seconds by all cores; sizes refused alone are not tried with others."""
    num_workers = getattr(args, "num_workers", 1)
    until = float("inf") if num_workers == 1 else time.perf_counter() + _ALONE_SECONDS
    waiting = deque(layouts)
    found: list[T | ConfigError] = []
    refused: set[tuple[str, int]] = set()
    """Sizes that do not fit the model, with nothing beside them: nor will they with something."""
    while waiting and time.perf_counter() < until:
        flags = waiting.popleft()
        asked = _sizes_of_models(flags)
        if not asked & refused:
            found.append(plan(flags))
            refused |= asked if len(asked) == 1 and isinstance(found[-1], ConfigError) else set()
    if rest := [flags for flags in waiting if not _sizes_of_models(flags) & refused]:
        # Not forked: torch's threads do not survive that.
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(num_workers, len(rest)), mp_context=spawned) as pool:
            found += pool.map(plan, rest)
    return found


def _sizes_of_models(flags: Mapping[str, Any]) -> set[tuple[str, int]]:
    return {(path, flags[path]) for path in SIZES_OF_MODELS if flags.get(path, 1) > 1}


def _try_plan(args: argparse.Namespace, options: Options, flags: Mapping[str, Any]) -> LayoutPlan | ConfigError:
    try:
        return plan_of(args, options, flags)
    except ConfigError as problem:  # no plan for tensor parallelism, or a size that does not divide
        return problem


def candidates(
    args: argparse.Namespace, options: Options, policies: Sequence[str] = ("off", "full")
) -> Iterator[dict[str, Any]]:
    """Yield the options of layouts: replicas, and sizes of all axes with each policy of checkpointing."""
    num_processes = resolve_options(options, os.environ, None)[0].config.launch.num_processes or 1
    if num_processes == 1:
        yield {}
        return
    fixed = {"fsdp.replicate_size": 1, "fsdp.replicate_per_node": False, **dict.fromkeys(SIZES_OF_MODELS, 1)}
    none = {"strategy": "ddp", "parallel.dp_replicate_size": num_processes, "parallel.dp_shard_size": 1}
    yield {**fixed, **none, **with_policy("off")}
    for sizes, policy in itertools.product(_sharded_sizes(args, num_processes), policies):
        yield {**fixed, "strategy": "fsdp2", **sizes, **with_policy(policy)}


def _sharded_sizes(args: argparse.Namespace, num_processes: int) -> Iterator[dict[str, int]]:
    """Yield sizes of axes, single ones first: shards over all ranks or a machine's, which share layers or tokens."""
    node = min(args.ranks_per_node, num_processes)
    within = [size for size in range(1, node + 1) if node % size == 0 and num_processes % size == 0]
    for tp, sp in sorted(itertools.product(within, within), key=lambda each: (min(each), each)):
        rest, remainder = divmod(num_processes, tp * sp)
        if node % (tp * sp) or remainder:
            continue
        for shard in dict.fromkeys((rest, node // (tp * sp), *[1] * (sp == 1))):
            if rest % shard or shard * tp * sp == 1:
                continue
            for ep in (1, *_expert_sizes(within, tp, sp, shard)):
                sizes = {"dp_replicate": rest // shard, "dp_shard": shard, "tp": tp, "sp": sp, "ep": ep}
                yield {f"parallel.{axis}_size": size for axis, size in sizes.items()}


def _expert_sizes(within: Sequence[int], tp: int, sp: int, shard: int) -> list[int]:
    """Return sizes over which experts are shared: some neighbours; beside slices of sequences, all of a machine."""
    shared = within[1:] if sp == 1 else within[-1:]
    return [size for size in shared if tp == 1 and shard * sp % size == 0]


def layout_name(plan: LayoutPlan) -> str:
    """Return the axes of a plan that are larger than 1, in words."""
    sizes = [f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1 and axis != "ep"]
    experts = f", ep {plan.sizes['ep']}" if plan.sizes["ep"] > 1 else ""
    return (" x ".join(sizes) or "one process") + experts


def _plan_table(plan: LayoutPlan, policies: Sequence[LayoutPlan], args: argparse.Namespace) -> str:
    """Return a plan as tables: of memory, of its `policies` of activation checkpointing, and of collectives."""
    from accel_trainer.big_models.device_map import convert_bytes

    memory = [
        ("parameters", plan.parameters, plan.peak_parts["parameters"]),
        ("gradients", plan.gradients, plan.peak_parts["gradients"]),
        ("optimizer state", plan.optimizer_state, plan.peak_parts["optimizer_state"]),
        ("buffers of the model", plan.peak_parts["buffers"], plan.peak_parts["buffers"]),
        ("gathered units, at most", plan.unsharded, plan.peak_parts["unsharded"]),
        ("buffers of collectives", None, plan.peak_parts["exchange"]),
        ("activations after the forward", plan.activations, plan.peak_parts["activations"]),
        ("peak", None, plan.peak),
    ]
    rows = [[name, *("" if size is None else convert_bytes(size) for size in sizes)] for name, *sizes in memory]
    title = (
        f"A rank of {layout_name(plan)} ({plan.strategy}), {args.batch} x {args.sequence} for each of "
        f"{plan.num_readers} reader(s), {args.optimizer}"
    )
    tables = [create_ascii_table(["memory", "size", "at the peak"], [r for r in rows if any(r[1:])], title)]
    headers = ["activation_checkpointing", "activations", "peak", "computed again", "computation"]
    fewest, lines = min(other.flops for other in policies), []
    for other in policies:
        sizes, again = map(convert_bytes, (other.activations, other.peak)), other.flops / fewest - 1
        lines.append([other.checkpointing, *sizes, f"{100 * again:.0f} %", _ms(other.compute_seconds)])
    tables.append(create_ascii_table(headers, lines, f"\nPolicies; this plan has {plan.checkpointing}"))
    if plan.exchanges:
        headers = ["collective", "axis", "ranks", "calls", "full tensors", "time"]
        lines = [
            [kind, axis, str(num_ranks), str(calls), convert_bytes(num_bytes), _ms(seconds)]
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
    from accel_trainer.big_models.device_map import convert_bytes

    fitting = [plan for plan in plans if limit is None or plan.peak <= limit]
    headers = ["layout", "strategy", "checkpointing", "state", "activations", "peak", "compute", "exposed", "per row"]
    title = (
        f"Layouts of `{args.model_name}`, {args.batch} x {args.sequence} for each reader, {args.optimizer}, the "
        "fastest first (computation and exposed communication, per row of all)"
    )
    rows = []
    for plan in fitting:
        sizes = (plan.parameters + plan.gradients + plan.optimizer_state, plan.activations, plan.peak)
        times = (plan.compute_seconds, plan.exposed_seconds, plan.seconds_per_row)
        names = [layout_name(plan), plan.strategy, plan.checkpointing]
        rows.append([*names, *map(convert_bytes, sizes), *map(_ms, times)])
    lines = [create_ascii_table(headers, rows, title)] if fitting else []
    if len(fitting) < len(plans):
        least = min(plan.peak for plan in plans if plan not in fitting)
        lines.append(f"{len(plans) - len(fitting)} more need above {args.memory}: {convert_bytes(least)} at least")
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

_COLOURS = ("#3b6ea5", "#7aa6d6", "#274b73", "#9a9a9a", "#d98c3f", "#e8bf8a", "#5f9e6e")
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 250, 560, 18, 8, 46


def _draw(plans: Sequence[LayoutPlan], limit: int | None) -> str:
    """Return an SVG: the peak of each plan as a bar of its parts, and a line at the limit."""
    from accel_trainer.big_models.device_map import convert_bytes

    parts = list(plans[0].peak_parts)
    most = max([plan.peak for plan in plans] + ([] if limit is None else [limit]))
    scale, height = _WIDTH / most, _TOP + len(plans) * (_BAR + _GAP) + 10
    drawn = []
    for index, part in enumerate(parts):
        left = 10 + 115 * index
        drawn.append(f'<rect x="{left}" y="12" width="10" height="10" fill="{_COLOURS[index]}"/>')
        drawn.append(f'<text x="{left + 14}" y="21">{escape(part.replace("_", " "))}</text>')
    for row, plan in enumerate(plans):
        x, y = float(_LEFT), _TOP + row * (_BAR + _GAP)
        label = f"{layout_name(plan)}{f', {plan.checkpointing}' * plan.recomputes}"
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for part, colour in zip(parts, _COLOURS, strict=True):
            width = plan.peak_parts[part] * scale
            title = f"<title>{escape(part.replace('_', ' '))}: {convert_bytes(plan.peak_parts[part])}</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}">{title}</rect>'
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{convert_bytes(plan.peak)}</text>')
    if limit is not None:
        end = _LEFT + limit * scale
        drawn.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{_TOP - 6}" y2="{height - 6}" stroke="#b00020"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" role="img" '
        f'aria-label="Memory of a rank at its peak" font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>\n'
    )


# --- the model --------------------------------------------------------------------------------------------------------


def _find_library(model_name: str, library_name: str | None, access_token: str | None) -> tuple[str, str | None]:
    """Return where a model is found, and its library: the given one, or what its files or the Hub say."""
    local = Path(model_name).expanduser()
    if local.exists():
        config = local / "config.json" if local.is_dir() else local
        return str(config.parent if config.name == "config.json" else config), library_name or _library_of(config)
    if library_name is None:
        info = verify_on_hub(model_name, access_token)
        if info == "gated":
            raise CheckpointNotFoundError(
                f"{model_name} is gated: log in with `hf auth login` as a user who has access, or pass a directory"
            )
        if info == "repo":
            raise CheckpointNotFoundError(
                f"{model_name} is neither a directory nor a model on the Hub; one that is private asks for "
                "`hf auth login`"
            )
        library_name = getattr(info, "library_name", None)
    return model_name, library_name


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Return a model without memory, in float32: of the class that its configuration names, with its head.

    Where the configuration names no class that transformers has, it is the one of `AutoModel`, which has no head.

    Args:
        model_name: a directory with a `config.json`, such a file, or a name on the Hub.
        library_name: "transformers" or "timm"; None is what the files or the Hub say.
        trust_remote_code: whether code that is beside the configuration may run.
        access_token: for models of the Hub that are not public.

    Raises:
        CheckpointNotFoundError: there is no such model, or its files are not to be had.
        ConfigError: the library is unknown, or the configuration makes no model.
        MissingExtraError: the library is not installed.
    """
    model_name, library_name = _find_library(model_name, library_name, access_token)
    if library_name not in _LIBRARIES:
        raise ConfigError(
            f"{model_name} is of the library {library_name or 'that nothing names'}; models of "
            f"{' and '.join(_LIBRARIES)} are built: pass --library_name"
        )
    try:
        library = importlib.import_module(library_name)
    except ImportError:
        raise MissingExtraError(
            f"{model_name} is a model of {library_name}, which is not installed: pip install {library_name}"
        ) from None
    build = _build_transformers if library_name == "transformers" else _build_timm
    try:
        return build(library, model_name, trust_remote_code, access_token)
    except OSError as error:
        raise CheckpointNotFoundError(f"no configuration of {model_name} can be read: {_first_line(error)}") from error
    except (KeyError, RuntimeError, ValueError) as error:
        hint = "" if trust_remote_code or "trust_remote_code" not in str(error) else "; see --trust_remote_code"
        raise ConfigError(
            f"{library_name} makes no model from the configuration of {model_name}: {_first_line(error)}{hint}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return the Hub's answer on a model, "gated" or "repo" (none); a CheckpointNotFoundError where it is offline."""
    hub = importlib.import_module("huggingface_hub")  # no requirement of ours: transformers brings it
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        return hub.model_info(repo, token=token)
    except errors.GatedRepoError:
        return "gated"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return "repo"
    except Exception as error:  # of the transport, whose classes are those of the library that huggingface_hub uses
        raise CheckpointNotFoundError(
            f"the Hub cannot be asked for {repo} ({type(error).__name__}: {_first_line(error)}); pass a directory, or "
            "--library_name for a model that is in the cache"
        ) from error


def _library_of(config: Path) -> str:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"{config.absolute()} cannot be read ({_first_line(error)}); give a directory with the config.json of a "
            "model, or such a file"
        ) from error
    return "timm" if isinstance(content, dict) and "architecture" in content else "transformers"


def _build_transformers(library: Any, name: str, trusts_code: bool, token: str | None) -> Any:
    import torch

    from accel_trainer.checkpoint.weights.into_model import init_empty_weights

    config = library.AutoConfig.from_pretrained(name, trust_remote_code=trusts_code, token=token)
    own_code = next((key for key in getattr(config, "auto_map", None) or () if key.startswith("AutoModelFor")), None)
    known = next((each for each in config.architectures or () if hasattr(library, each)), None)
    with init_empty_weights():
        if known is not None and own_code is None:
            return getattr(library, known)(config)
        # Without a dtype it would be the one in the configuration.
        build = getattr(library, own_code or "AutoModel").from_config
        return build(config, dtype=torch.float32, trust_remote_code=trusts_code)


def _build_timm(library: Any, name: str, trusts_code: bool, token: str | None) -> Any:
    from accel_trainer.checkpoint.weights.into_model import init_empty_weights

    with init_empty_weights():
        return library.create_model(f"local-dir:{name}" if Path(name).is_dir() else add_timm_hub_prefix(name))


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a name on the Hub as timm wants it, `hf-hub:NAME`; names of its architectures and others stay."""
    return model_name if ":" in model_name or "/" not in model_name else f"hf-hub:{model_name}"
