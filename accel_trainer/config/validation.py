"""Types, ranges and closed sets of every option, and the checks between options."""

from __future__ import annotations

import json
import math
import operator
import os
import re
import signal
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from typing import Any

from accel_trainer.config.config_source import FileProblemsError, whole_document
from accel_trainer.config.parallel import axis_problems
from accel_trainer.config.schema import (
    FieldSpec,
    Fp8Backend,
    FrozenDict,
    LaunchConfig,
    LossImplementation,
    MixedPrecision,
    NonFiniteAction,
    RankLossAction,
    RunConfig,
    WrapPolicy,
    field_specs,
    get_value,
    thaw,
)
from accel_trainer.errors import did_you_mean

_TRUE_WORDS = ("true", "1", "yes", "y", "t", "on")
_FALSE_WORDS = ("false", "0", "no", "n", "f", "off")
BOOLEAN_WORDS = frozenset((*_TRUE_WORDS, *_FALSE_WORDS))
"""Ways to write true and false on a command line and in variables, in lower case."""

MIXTURE_KEYS = (
    "datasets", "streaming", "temperature", "schedule", "samples_per_update", "stopping_strategy", "num_samples",
    "seed",
)  # fmt: skip
_OF_DATASET = ("path", "name", "data_dir", "data_files", "split", "columns", "weight")

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class WrongValueError(Exception):
    """A value does not fit its option; `expected` and `hint` complete the sentence `NAME is VALUE; expected ...`."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected, hint)
        self.expected = expected
        self.hint = hint


def show(value: Any) -> str:
    """Return a value as it would stand in a configuration file, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(thaw(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def show_plain(value: Any) -> str:
    """Return a value without quotes, as `path=value` and tables have it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if isinstance(value, str) else show(value)


def _at_least(bound: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value >= bound), f"a whole number of at least {bound}"


def _is_regex_list(patterns: tuple[str, ...]) -> bool:
    try:
        return all(re.compile(pattern) is not None for pattern in patterns)
    except re.error:
        return False


# torch counts nanoseconds in 64 bits, and waits not at all beyond 292 years.
_SECONDS = (lambda seconds: 0 < seconds <= 1e9), "a positive number of seconds, 1e9 at most"
_SIGNALS = {item.name for item in signal.Signals} - {"SIGKILL", "SIGSTOP"}
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "strategy": (lambda name: bool(name.strip()), "the name of a strategy such as auto, single, ddp or fsdp2"),
    "timeout_seconds": _SECONDS,
    **{path: _SECONDS for path in field_specs() if path.startswith("hang.")},
    **{path: _at_least(1) for path in field_specs() if path.endswith("_size")},
    "local_steps": _at_least(1),
    "local_steps_after": _at_least(0),
    "outer_optimizer.lr": (lambda rate: rate > 0, "a positive number"),
    "outer_optimizer.momentum": (lambda momentum: 0 <= momentum < 1, "a number from 0 on and below 1"),
    "max_rollbacks": _at_least(1),
    "slow_rank_updates": _at_least(0),
    "peak_flops": (lambda rate: rate >= 1e9, "operations a second of one device, 1e9 at least: 989e12 for an H100"),
    "checkpoint_mib_per_second": (lambda rate: rate > 0, "a positive number of MiB a second"),
    "ema_decay": (lambda decay: 0 < decay < 1, "a number above 0 and below 1, such as 0.999"),
    "loss_chunk_tokens": _at_least(1),
    "data.data_seed": _at_least(0),
    "accumulation.num_steps": _at_least(1),
    "accumulation.micro_batch_size": _at_least(1),
    "compile.backend": (
        lambda name: bool(name.strip()),
        "'no' or the name of a torch.compile backend such as 'inductor'",
    ),
    "compile.mode": (lambda mode: mode in COMPILE_MODES, f"one of {', '.join(map(repr, COMPILE_MODES))}"),
    "ddp.bucket_cap_mb": _at_least(1),
    "fsdp.min_num_params": _at_least(1),
    "fsdp.ignored_modules": (_is_regex_list, "a list of valid regular expressions for module names"),
    "preemption.signals": (
        _SIGNALS.issuperset,
        "names of signals that a process can take, such as SIGTERM and SIGUSR1",
    ),
    "preemption.grace_seconds": (lambda seconds: seconds > 0, "a positive number of seconds"),
    "launch.num_processes": _at_least(1),
    "launch.min_processes": _at_least(1),
    "launch.num_machines": _at_least(1),
    "launch.min_machines": _at_least(1),
    "launch.machine_rank": _at_least(0),
    "launch.main_process_port": (lambda port: 0 <= port <= 65535, "a port number from 0 to 65535"),
    "launch.gpu_ids": (lambda ids: bool(re.fullmatch(r"all|\d+(,\d+)*", ids)), "'all' or GPU numbers such as '0,2'"),
    "launch.num_cpu_threads_per_process": _at_least(1),
    "launch.max_restarts": _at_least(0),
    "launch.monitor_interval_seconds": (lambda seconds: seconds > 0, "a positive number of seconds"),
    "launch.tee": (
        lambda text: bool(re.fullmatch(r"[0-3]|(\d:[0-3],)*\d:[0-3]", text)),
        "a number from 0 to 3 (1 output, 2 errors, 3 both), or one for each local rank: '0:3,1:2'",
    ),
}

_MOST_RANKS, _MOST = 1_000_000, 2**31 - 1
_BEYOND_INT32 = ("data.data_seed", "fsdp.min_num_params")


def _most(path: str) -> int:
    """Return the largest count that an option may be: a typing error beyond, where a job would start that many."""
    # Jobs of the field have 100,000 ranks at most; torch counts ranks in 32 bits, and seeds in 64.
    if path.startswith("launch.") or path.endswith("_size"):
        return _MOST_RANKS
    return 2**63 - 1 if path in _BEYOND_INT32 else _MOST


def coerce(spec: FieldSpec, value: Any, *, lenient: bool = False, text: str | None = None) -> Any:
    """Return a value in the option's type and range; `lenient` takes text, and `text` is the scalar as it stood."""
    # An option that may be None is written KIND | None.
    kind = typing.get_args(spec.annotation)[0] if isinstance(spec.annotation, types.UnionType) else spec.annotation
    result: Any
    if spec.path == "activation_checkpointing":
        result = _checkpointing_policy(value)
    elif spec.path == "dataset_mixture":
        result = mixture_of(value)
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        result = _enum(kind, value, text)
    elif kind in _NUMBERS:
        result = _NUMBERS[kind](value, lenient)
    elif kind is str:
        result = _str(value, text)
    elif typing.get_origin(kind) is tuple:
        result = _names(value, split=spec.path != "fsdp.ignored_modules")
    else:
        result = _mapping(value, lenient)
    if spec.path == "compile.backend" and result.isupper():
        result = result.lower()  # as accelerate writes these names
    _check_range(spec.path, result)
    return result


def _check_range(path: str, value: Any) -> None:
    check, expected = _RANGES.get(path, (None, ""))
    if check is not None and not check(value):
        raise WrongValueError(expected)
    if type(value) is int and value > _most(path):
        raise WrongValueError(f"a whole number of at most {_most(path)}")


def _unquoted_hint(value: Any, text: str | None) -> str:
    """Explain why a word that YAML reads as a boolean did not arrive as text."""
    if value is False and (text is None or text.lower() == "false"):
        return "; write 'no' as text"
    if not isinstance(value, bool) or text is None or text.lower() in ("true", "false"):
        return ""
    return f"; YAML reads an unquoted {text} as {show(value)}: write '{text.lower()}' in quotes"


def _enum(kind: type[StrEnum], value: Any, text: str | None) -> StrEnum:
    members = {member.value: member for member in kind}
    if isinstance(value, str):
        found = members.get(value.strip().lower())
        if found is not None:
            return found
    hint = did_you_mean(value.lower(), members) if isinstance(value, str) else _unquoted_hint(value, text)
    raise WrongValueError(f"one of {', '.join(map(repr, members))}", hint)


def _bool(value: Any, lenient: bool) -> bool:
    if isinstance(value, bool):
        return value
    if lenient and isinstance(value, str | int):
        word = str(value).strip().lower()
        if word in BOOLEAN_WORDS:
            return word in _TRUE_WORDS
    quoted = isinstance(value, str) and value.strip().lower() in BOOLEAN_WORDS
    raise WrongValueError("true or false", " without quotes" if quoted else "")


def _int(value: Any, lenient: bool) -> int:
    if isinstance(value, str):
        value = _number_of_text(value, lenient)
    if not isinstance(value, bool | float) and hasattr(value, "__index__"):
        return operator.index(value)  # numpy's integers too
    # 1e8 is a float to every parser; people write it for a number of parameters.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    raise WrongValueError("a whole number")


def _number_of_text(text: str, lenient: bool) -> int | float:
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        decimal = text.lstrip("+-0_") or "0"
        raise WrongValueError("a whole number", f"; a leading zero means octal to some readers: write {decimal}")
    if not lenient:
        raise WrongValueError("a whole number", " without quotes" if re.fullmatch(r"[-+]?\d+", text) else "")
    try:
        return float(text) if re.search(r"[.eE]", text) else int(text)
    except ValueError:
        raise WrongValueError("a whole number") from None


def _float(value: Any, lenient: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str if lenient else int | float):
        raise WrongValueError("a number")
    try:
        number = float(value)
    except ValueError:
        raise WrongValueError("a number") from None
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise WrongValueError("a finite number")
    return number


_NUMBERS: Mapping[Any, Callable[[Any, bool], Any]] = {bool: _bool, int: _int, float: _float}


def _str(value: Any, text: str | None) -> str:
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration's member, its value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return text if text is not None else str(value)
    raise WrongValueError("text", _unquoted_hint(value, text))


def _checkpointing_policy(value: Any) -> str:
    """Return a policy as text: `{every: 2}` and `{ops: [aten.mm]}` of a file are `every:2` and `ops:aten.mm`."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, rest),) = value.items()
        value = f"{kind}:{','.join(map(str, rest)) if isinstance(rest, list | tuple) else rest}"
    word = "".join(str(value).split())
    if word.lower() in BOOLEAN_WORDS:  # YAML reads an unquoted off as false
        return "full" if word.lower() in _TRUE_WORDS else "off"
    if not re.fullmatch(r"off|full|selective|every:0*[1-9]\d*|ops:\w+(\.\w+)+(,\w+(\.\w+)+)*", word):
        raise WrongValueError(
            "'off', 'full', 'selective', 'every:N' with N from 1 on, or 'ops:NAME,NAME' with names in torch.ops such "
            "as aten.mm"
        )
    return word


def _names(value: Any, *, split: bool) -> tuple[str, ...]:
    if isinstance(value, str):
        parts = value.split(",") if split else [value]
        return tuple(part.strip() for part in parts if part.strip())
    is_list = isinstance(value, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(item, str) and item.strip() for item in value):
        raise WrongValueError("a list of names")
    names = sorted(value) if isinstance(value, set | frozenset) else value
    return tuple(name.strip() for name in names)


def _mapping(value: Any, lenient: bool) -> FrozenDict:
    if lenient and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise WrongValueError("a JSON object") from None
    if not isinstance(value, Mapping):
        raise WrongValueError("a mapping of options")
    return FrozenDict(value)


def mixture_of(value: Any) -> FrozenDict:
    """Return the block `dataset_mixture`: a mapping, JSON text, or a file, that is one or has it under this key."""
    if isinstance(value, str | os.PathLike):
        try:
            value = whole_document(value).root.plain()
        except FileProblemsError as error:
            raise WrongValueError("a mapping, or a file that is one", f": {error}") from None
    if isinstance(value, Mapping):
        value = value.get("dataset_mixture", value)
    _check_mixture_keys(value, MIXTURE_KEYS, "dataset_mixture")
    for number, entry in enumerate(value.get("datasets") or ()):
        _check_mixture_keys(entry, _OF_DATASET, f"dataset_mixture.datasets[{number}]")
    return FrozenDict(value)


def _check_mixture_keys(given: Any, known: tuple[str, ...], where: str) -> None:
    expected = f"a mapping with {', '.join(known)}"
    if not isinstance(given, Mapping):
        raise WrongValueError(expected, f"; {where} is {show(given)}")
    for name in given:
        if name not in known:
            raise WrongValueError(expected, f"; {where} holds the unknown key {name!r}{did_you_mean(str(name), known)}")


def cross_problems(config: RunConfig, describe: Callable[[str], str]) -> list[str]:
    """Return the contradictions between options; `describe` gives `path=value (from where)` for a dotted path."""
    launch, is_deepspeed = config.launch, config.strategy == "deepspeed"
    is_fp8 = config.mixed_precision == MixedPrecision.FP8
    checks = (
        (
            config.fsdp.replicate_per_node and config.fsdp.replicate_size > 1,
            f"{describe('fsdp.replicate_per_node')} contradicts {describe('fsdp.replicate_size')}: "
            "give the number of replicas, or one per node, not both",
        ),
        (
            launch.machine_rank >= launch.num_machines,
            f"{describe('launch.machine_rank')} does not fit {describe('launch.num_machines')}: "
            "machines are numbered from 0 to num_machines - 1",
        ),
        (
            launch.num_processes is not None and launch.num_processes % launch.num_machines,
            f"{describe('launch.num_processes')} cannot be divided over {describe('launch.num_machines')}: "
            "every machine runs the same number of processes",
        ),
        (
            launch.min_processes is not None and launch.min_processes > (launch.num_processes or 0),
            f"{describe('launch.min_processes')} does not fit {describe('launch.num_processes')}: give both, "
            "as num_processes MIN:MAX",
        ),
        (
            launch.min_processes is not None and is_deepspeed,
            f"{describe('launch.min_processes')} with {describe('strategy')}, whose engine's batch sizes are for one "
            "number of processes; give num_processes one number, or shard with fsdp2",
        ),
        (
            is_fp8 and config.fp8.backend != Fp8Backend.AO,
            f"{describe('fp8.backend')}: TransformerEngine and MS-AMP are not offered; use ao, which is torchao",
        ),
        (
            is_fp8 and is_deepspeed,
            f"{describe('mixed_precision')} contradicts {describe('strategy')}, whose engine has no fp8 layers; use "
            "strategy fsdp2 or ddp, or mixed_precision bf16",
        ),
        (
            is_fp8 and config.parallel.tp_size > 1,
            f"{describe('mixed_precision')} contradicts {describe('parallel.tp_size')}: layers that are split over "
            "ranks do not compute in fp8 here; use a tp_size of 1, or mixed_precision bf16",
        ),
        (
            config.loss_chunk_tokens is not None and config.loss is not LossImplementation.CHUNKED,
            f"{describe('loss_chunk_tokens')} contradicts {describe('loss')}, which has no chunks of a given size; "
            "leave one of them out",
        ),
        *_rank_loss_checks(launch, describe),
        *_activation_checks(config, describe),
        *_machine_checks(launch, describe),
        *_local_step_checks(config, describe),
        *_backward_update_checks(config, describe),
    )
    return [*axis_problems(config, describe), *(problem for is_wrong, problem in checks if is_wrong)]


def _machine_checks(launch: LaunchConfig, describe: Callable[[str], str]) -> Iterator[tuple[bool, str]]:
    """Yield contradictions about machines that come and go."""
    fewest = launch.min_machines
    if fewest is None:
        return
    named = describe("launch.min_machines")
    yield (
        fewest > launch.num_machines,
        f"{named} does not fit {describe('launch.num_machines')}: give both, as num_machines MIN:MAX",
    )
    yield (
        launch.rdzv_backend == "static",
        f"{named} with {describe('launch.rdzv_backend')}, where no machine comes or goes; set rdzv_backend to c10d",
    )
    expected = None if launch.num_processes is None else launch.num_processes // launch.num_machines * fewest
    yield (
        launch.min_processes != expected or expected is None,
        f"{named} with {describe('launch.min_processes')} and {describe('launch.num_processes')}: say how many "
        f"processes so few and all machines have: num_processes {expected or 'MIN'}:{launch.num_processes or 'MAX'}",
    )


def _rank_loss_checks(launch: LaunchConfig, describe: Callable[[str], str]) -> Iterator[tuple[bool, str]]:
    """Yield contradictions about ranks that go on without others."""
    is_elsewhere = launch.num_machines > 1 or launch.rdzv_backend != "static"
    yield (
        launch.on_rank_loss is RankLossAction.REPLACE and not launch.max_restarts,
        f"{describe('launch.on_rank_loss')} with {describe('launch.max_restarts')}: that is how many processes may be "
        "started in the place of lost ones; set --max_restarts, or on_rank_loss to continue",
    )
    yield (
        launch.on_rank_loss is not RankLossAction.RESTART and is_elsewhere,
        f"{describe('launch.on_rank_loss')} with {describe('launch.num_machines')} and "
        f"{describe('launch.rdzv_backend')}: ranks go on without one that was killed on one machine, with the static "
        "rendezvous; leave on_rank_loss out",
    )


def _activation_checks(config: RunConfig, describe: Callable[[str], str]) -> Iterator[tuple[bool, str]]:
    """Yield contradictions about activations: whether there is one, and the message."""
    yield (
        config.strategy == "fsdp2"
        and config.fsdp.activation_checkpointing
        and config.activation_checkpointing not in ("off", "full"),
        f"{describe('fsdp.activation_checkpointing')} contradicts {describe('activation_checkpointing')}: it is "
        "another spelling of activation_checkpointing=full; leave it out",
    )
    yield (
        config.activation_offload and config.compile.backend != "no",
        f"{describe('activation_offload')} contradicts {describe('compile.backend')}: a compiler decides by itself "
        "what is kept; leave one of them out, or use activation_checkpointing, which it follows",
    )


def _local_step_checks(config: RunConfig, describe: Callable[[str], str]) -> Iterator[tuple[bool, str]]:
    """Yield the options against updates that ranks make to replicas of their own: whether it does, and the message."""
    for path, is_wrong, reason in (
        (
            "strategy",
            config.strategy in ("fsdp2", "deepspeed"),
            "which keeps no replica of the model on each rank; use strategy ddp",
        ),
        (
            "mixed_precision",
            config.mixed_precision == MixedPrecision.FP16,
            "whose loss scale all ranks share, and an overflow on one of them would skip an update there only; use "
            "bf16",
        ),
        (
            "ddp.static_graph",
            config.ddp.static_graph,
            "with which DDP learns the graph in its first exchange of gradients; leave static_graph out",
        ),
        (
            "on_nonfinite",
            config.on_nonfinite in (NonFiniteAction.SKIP_STEP, NonFiniteAction.ROLLBACK),
            "for which all ranks have to see the same gradients; use raise or warn",
        ),
        (
            "ema_decay",
            config.ema_decay is not None,
            "whose averages would be those of each rank's own replica; leave one of the two out",
        ),
    ):
        yield (
            config.local_steps is not None and is_wrong,
            f"{describe('local_steps')} contradicts {describe(path)}, {reason}",
        )


def _backward_update_checks(config: RunConfig, describe: Callable[[str], str]) -> Iterator[tuple[bool, str]]:
    """Yield the options against updates in the backward: whether one is, and the message."""
    for path, is_wrong, reason in (
        (
            "strategy",
            config.strategy in ("ddp", "deepspeed"),
            "which keeps all gradients in buffers of its own, so that none would be freed; use strategy fsdp2",
        ),
        (
            "accumulation.num_steps",
            config.accumulation.num_steps > 1,
            "whose gradients are added up before an update is made; use windows of one micro-batch",
        ),
        (
            "mixed_precision",
            config.mixed_precision == MixedPrecision.FP16,
            "whose gradients are looked at together before an update is made; use bf16",
        ),
        (
            "on_nonfinite",
            config.on_nonfinite in (NonFiniteAction.SKIP_STEP, NonFiniteAction.ROLLBACK),
            "for which gradients are looked at together before an update is made; use raise or warn",
        ),
        ("local_steps", config.local_steps is not None, "which is of strategy ddp; leave one of the two out"),
    ):
        yield (
            config.optimizer_in_backward and is_wrong,
            f"{describe('optimizer_in_backward')} contradicts {describe(path)}, {reason}",
        )


UNUSED_UNDER = {
    "fsdp": ("auto", "single", "ddp", "deepspeed"),
    "ddp": ("single", "fsdp2", "deepspeed"),
    "deepspeed": ("auto", "single", "ddp", "fsdp2"),
}
"""Our strategies that have no use for a section; a registered one may use any."""


def unused_notes(config: RunConfig, given: Collection[str], describe: Callable[[str], str]) -> list[str]:
    """Return remarks on options that were given and that another option leaves without effect."""
    decisive, options = _unused_sections(config), _unused_options(config)
    changed = [path for path in given if get_value(config, path) != field_specs()[path].default]
    notes = []
    for section, path in decisive.items():
        if asked := [option for option in changed if option.startswith(f"{section}.")]:
            notes.append(f"{', '.join(map(describe, asked))}: not used with {describe(path)}")
    unused = [(path, by) for path, by in options.items() if path in given and path.rpartition(".")[0] not in decisive]
    return notes + [f"{describe(path)} is not used: {describe(by)}" for path, by in unused]


def _unused_sections(config: RunConfig) -> dict[str, str]:
    """Return the sections that nothing reads, each with the option that decides so."""
    unused = {name: "strategy" for name, strategies in UNUSED_UNDER.items() if config.strategy in strategies}
    if config.compile.backend == "no":
        unused["compile"] = "compile.backend"
    if config.mixed_precision != MixedPrecision.FP8:
        unused["fp8"] = "mixed_precision"
    if config.local_steps is None:
        unused["outer_optimizer"] = "local_steps"
    return unused


def _unused_options(config: RunConfig) -> dict[str, str]:
    """Return options that another one of their section leaves without effect, each with that one."""
    unused = {}
    if config.strategy in UNUSED_UNDER["deepspeed"]:
        unused["deepspeed"] = "strategy"  # as a block, not option by option
    if config.checkpoint_uri is None and config.checkpoint_mib_per_second is not None:
        unused["checkpoint_mib_per_second"] = "checkpoint_uri"
    if config.local_steps is None and config.local_steps_after:
        unused["local_steps_after"] = "local_steps"
    if config.local_steps is not None and config.outer_optimizer.lr is None:
        unused |= dict.fromkeys(("outer_optimizer.momentum", "outer_optimizer.nesterov"), "outer_optimizer.lr")
    if config.parallel.tp_size == 1:
        unused["parallel.tp_plan"] = "parallel.tp_size"
    for path, policy in {"fsdp.wrap_classes": WrapPolicy.TRANSFORMER, "fsdp.min_num_params": WrapPolicy.SIZE}.items():
        if config.fsdp.wrap_policy is not policy and get_value(config, path):
            unused[path] = "fsdp.wrap_policy"
    return unused
