"""The flags of `accel-trainer launch`: one for each option of the configuration, and a few of the launcher's own.

Everything behind the script belongs to the script, also flags that are spelled like ours. `-` and `_` are the same.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from accel_trainer.config import FieldSpec, field_specs, flag_name, schema
from accel_trainer.config.description import documentation
from accel_trainer.config.dialects import fsdp as fsdp_dialect
from accel_trainer.config.dialects.accelerate_file import (
    DYNAMO,
    PARALLEL_COMM,
    PARALLEL_DETAILS,
    PARALLEL_SIZES,
    put_parallelism,
)
from accel_trainer.config.document import Entry
from accel_trainer.config.layer import Layer, SourceKind
from accel_trainer.config.parallel import SIZE_PATHS, fsdp1_problems
from accel_trainer.config.validation import BOOLEAN_WORDS, WrongValueError, coerce, show
from accel_trainer.errors import ConfigError, did_you_mean

_ALIASES = {
    "use_cpu": "use_cpu",
    "t": "launch.tee",
    **{f"dynamo_{name}": path for name, path in DYNAMO.items()},
}
_DEEPSPEED_FLAGS = {
    "deepspeed_config_file": ("FILE", "DeepSpeed's own configuration: JSON, YAML, or a packaged name such as zero3"),
    "zero_stage": ("{0,1,2,3}", "what is sharded: nothing, optimizer state, gradients too, parameters too"),
    "offload_optimizer_device": ("{none,cpu,nvme}", "where optimizer state is kept between uses"),
    "offload_param_device": ("{none,cpu,nvme}", "where parameters are kept between uses, with stage 3"),
    "offload_optimizer_nvme_path": ("DIR", "folder for optimizer state offloaded to nvme"),
    "offload_param_nvme_path": ("DIR", "folder for parameters offloaded to nvme"),
    "gradient_clipping": ("NORM", "bound of the global gradient norm"),
    "zero3_init_flag": ("true|false", "partition parameters while the model is built, with stage 3"),
    "zero3_save_16bit_model": ("true|false", "gather the weights when a model is saved, with stage 3"),
    "deepspeed_moe_layer_cls_names": ("A,B", "classes of mixture-of-experts layers, gathered as a whole with stage 3"),
    "deepspeed_hostfile": ("FILE", "machines of the job, one `name slots=N` each; DeepSpeed's runner starts them"),
    "deepspeed_inclusion_filter": ("HOSTS", "machines and slots of the hostfile to use: host1@host2:0,2"),
    "deepspeed_exclusion_filter": ("HOSTS", "machines and slots of the hostfile to leave out"),
    "deepspeed_multinode_launcher": (
        "{standard,pdsh,openmpi,mvapich,mpich,slurm,nossh}",
        "what starts the other machines of the hostfile [pdsh]; standard: one launch by hand on each, no hostfile",
    ),
}
"""Keys of the DeepSpeed block, as accelerate's launcher has them: value and help."""
_PARALLELISM = "parallelism_config"
_FP8_OF_OTHERS = (
    "fp8_use_autocast_during_eval", "fp8_margin", "fp8_interval", "fp8_format", "fp8_amax_history_len",
    "fp8_amax_compute_algo", "fp8_override_linear_precision", "fp8_opt_level",
)  # fmt: skip
_REFUSED = {
    **dict.fromkeys(
        ("megatron_lm_", "use_megatron_lm"),
        "there is no Megatron-LM strategy; use --use_fsdp, with --parallel_tp_size, or --use_deepspeed",
    ),
    **dict.fromkeys(
        _FP8_OF_OTHERS, "it is an option of TransformerEngine or MS-AMP, and fp8 is torchao's here; leave it out"
    ),
    "downcast_bf16": "it exists on TPUs only; use --mixed_precision bf16",
    "mpirun_hostfile": "start the launcher or the script with mpirun itself (mpirun -f HOSTFILE accel-trainer launch "
    "...), whose ranks are found; or give DeepSpeed's runner --deepspeed_hostfile",
    **dict.fromkeys(
        ("tpu", "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", "vm", "env", "restart_tpuvm_pod_server"),
        "it is for pods of TPUs; leave it out, chips are found where torch-tpu is (variables of workers are those of "
        "the launcher)",
    ),
    **dict.fromkeys(
        ("aws_access_key_id", "aws_secret_access_key"),
        "jobs are not started on SageMaker; start this launcher there with SageMaker's own tools",
    ),
    **dict.fromkeys(
        (f"{_PARALLELISM}_{name}" for name in PARALLEL_DETAILS),
        "each way to share sequences has one backend, which takes any length, and the attention that the model was "
        "loaded with; leave it out",
    ),
}
"""Flags of accelerate's launcher that are not offered, or how their names begin, and what to do instead."""
_BOOLEANS = {"true": True, "false": False}
_SECTION_TITLES = {
    "": "what runs",
    "launch": "processes and machines",
    "accumulation": "gradient accumulation",
    "data": "data loaders",
    "fp8": "linear layers in fp8, with --mixed_precision fp8",
    "compile": "torch.compile",
    "ddp": "DistributedDataParallel",
    "outer_optimizer": "the optimizer at the exchanges of --local_steps",
    "parallel": "ranks along the axes of the mesh",
    "fsdp": "FSDP2 (also the spellings of accelerate, such as --fsdp_transformer_layer_cls_to_wrap)",
    "hang": "ending where a rank hangs",
    "preemption": "ending at a signal",
    "deepspeed": "DeepSpeed",
    _PARALLELISM: "ranks as accelerate's ParallelismConfig divides them",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line."""

    name: str
    """The name without dashes, with underscores."""
    path: str | None = None
    """Dotted path of the option it sets; None for the launcher's own."""
    key: str | None = None
    """Key of the block, if `path` is one."""
    is_switch: bool = False
    """Alone it means true; `true` or `false` may follow, after an `=` where it is no option of the configuration."""
    preset: str | None = None
    """The value that a switch stands for, when that is not true or false."""
    help: str = ""
    metavar: str | None = None

    def may_take(self, word: str) -> bool:
        """Whether the next word is the value of a switch; of one that accelerate has a value for, in all its ways."""
        if self.name.startswith("fsdp_"):
            return word.lower() in BOOLEAN_WORDS or _is_strategy_of_fsdp1(self, word)
        return word.lower() in _BOOLEANS

    @property
    def takes_no_value(self) -> bool:
        """Whether a value never follows it."""
        return self.preset is not None or self.path is None and self.is_switch


def _own(text: str, *, metavar: str | None = None) -> Any:
    """Return a field of `Options` that is a flag of the launcher's own: a switch, or with `metavar` a value."""
    return field(default=False if metavar is None else None, metadata={"help": text, "metavar": metavar})


def _of_job(text: str, metavar: str) -> Any:
    """Return such a field that is for a scheduler's job, and no word of the command in it."""
    return field(default=None, metadata={"help": text, "metavar": metavar, "is_for_schedulers": True})


@dataclass(slots=True)
class Options:
    """A command line, taken apart: our options, and the script with its own.

    A field with a help is a flag of the launcher's own; this is the one place that it is written in.
    """

    config_file: str | None = _own("YAML or JSON file, or a packaged name such as full_shard", metavar="FILE")
    module: bool = _own("the script is the name of a module, as in python -m")
    quiet: bool = _own("taken, and without effect; only the failing rank's traceback is shown")
    dry_run: bool = _own("print the command, its variables and the options, and start nothing")
    print: str | None = _of_job(
        "print the job for a scheduler, and start nothing: kubernetes is Kubeflow Trainer's TrainJob",
        "{slurm,kubernetes,jobset,skypilot}",
    )
    submit: str | None = _of_job("hand what --print prints to sbatch or kubectl", "{slurm,kubernetes,jobset}")
    image: str | None = _of_job("of a printed job's containers", "IMAGE")
    resources: str | None = _of_job("what its scheduler is asked for besides, by its own names", "NAME=VALUE,...")
    secret: str | None = _of_job("Kubernetes' Secrets or SkyPilot's variables that its processes get", "A,B")
    volume: str | None = _of_job("claims, or SkyPilot's buckets, and where they are mounted", "SOURCE:/FOLDER,...")
    no_python: bool = _own("the script is a program of its own: start it without python")
    as_accelerate: bool = _own("in the script, `import accelerate` gives this package, whether or not it is installed")
    use_parallelism_config: bool = _own("taken; the sizes say it themselves")
    flags: dict[str, Any] = field(default_factory=dict)
    """Values by dotted path, as they were written."""
    spelled: dict[str, str] = field(default_factory=dict)
    """The flag that was given, by dotted path, where it is not the option's own: `--use_fsdp` for `strategy`."""
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=(), compare=False)
    """Those before the script, but for the options for schedulers."""
    rest: tuple[str, ...] = ()
    """The script and everything after it."""


_OWN = {each.name: each.metadata for each in fields(Options) if each.metadata}
OF_JOBS = tuple(name for name, own in _OWN.items() if "is_for_schedulers" in own)
"""Flags that are for a scheduler's job."""
_STRATEGY_SWITCHES = {"use_fsdp": "fsdp2", "use_deepspeed": "deepspeed", "multi_gpu": "ddp"}


@functools.cache
def launch_flags() -> Mapping[str, Flag]:
    """Return every flag by its name without dashes; aliases lead to the flag they stand for."""
    flags = {
        name: Flag(name, is_switch=own["metavar"] is None, help=own["help"], metavar=own["metavar"])
        for name, own in _OWN.items()
    }
    for name, strategy in _STRATEGY_SWITCHES.items():
        text = f"the same as --strategy {strategy}"
        flags[name] = Flag(name, "strategy", is_switch=True, preset=strategy, help=text)
    described = documentation()
    for path, spec in field_specs().items():
        if path != "deepspeed":  # a block of a file, not a value
            name = flag_name(path).removeprefix("--")
            is_switch = "bool" in str(spec.annotation)
            text = described.get(path, "") + (f" [{spec.default}]" if spec.default not in (None, "", (), {}) else "")
            flags[name] = Flag(name, path, None, is_switch, None, text, _metavar(spec, is_switch))
    for name, (metavar, text) in _DEEPSPEED_FLAGS.items():
        flags[name] = Flag(name, "deepspeed", name, metavar == "true|false", None, text, metavar)
    flags |= {alias: flags[flag_name(path).removeprefix("--")] for alias, path in _ALIASES.items()}
    for size in PARALLEL_SIZES:
        name = f"{_PARALLELISM}_{size}"
        flags[name] = Flag(name, _PARALLELISM, size, metavar="N", help="ranks along this axis of accelerate's mesh")
    name = f"{_PARALLELISM}_{PARALLEL_COMM}"
    flags[name] = Flag(name, _PARALLELISM, PARALLEL_COMM, metavar="NAME", help=described[f"parallel.{PARALLEL_COMM}"])
    flags |= {"m": flags["module"], "q": flags["quiet"]}
    return flags


def _metavar(spec: FieldSpec, is_switch: bool) -> str:
    if is_switch:
        return "true|false"
    if isinstance(spec.annotation, type) and issubclass(spec.annotation, StrEnum):
        return "{" + ",".join(spec.annotation) + "}"
    number = "SECONDS" if spec.path.endswith("_seconds") else "NUMBER"
    kinds = {"tuple": "A,B", "Mapping": "FILE", "int": "N", "float": number}
    return next((word for kind, word in kinds.items() if kind in str(spec.annotation)), "TEXT")


class _LaunchParser(argparse.ArgumentParser):
    """argparse's help and results, of words that `read_flags` has read: one reader knows where the script begins."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse our flags, and leave the script with its own options to argparse."""
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] in (["-h"], ["--help"]):
            self.print_help()
            self.exit()
        given, rest = read_flags(words, self.prog)
        parsed, unknown = super().parse_known_args(["--", *rest] if rest else [], namespace)
        for flag, value, _, _ in given:
            setattr(parsed, flag.name, _typed(flag, value))
        return parsed, unknown


def _typed(flag: Flag, value: Any) -> Any:
    """Return a value with the type that programs expect of it; one in a wrong spelling stays text."""
    if flag.is_switch:
        return _BOOLEANS.get(str(value).lower(), value)
    kinds = {"N": int, "{0,1,2,3}": int, "SECONDS": float, "NUMBER": float, "NORM": float}
    try:
        return kinds.get(flag.metavar or "", str)(value)
    except ValueError:
        return value


def options_parser(usage: str | None = None, description: str | None = None) -> argparse.ArgumentParser:
    """Return a parser of the flags, with help that is grouped as the configuration is; see `parse_options`.

    What is not given is None in its results, or False for switches that take no value. They are not checked.
    """
    parser = _LaunchParser(
        "accel-trainer launch", usage=usage, description=description, add_help=False, allow_abbrev=False
    )
    own = parser.add_argument_group("launcher")
    own.add_argument("-h", "--help", action="help", help="show this and end")
    groups = {title: parser.add_argument_group(text) for title, text in _SECTION_TITLES.items()}
    for flag in dict.fromkeys(launch_flags().values()):
        section = flag.path if flag.key is not None else (flag.path or "").rpartition(".")[0]
        group = own if flag.path is None else groups[section or ""]
        kind: dict[str, Any] = {"action": "store_true"} if flag.takes_no_value else {"metavar": flag.metavar}
        names = [f"{'--' if len(name) > 1 else '-'}{name}" for name, known in launch_flags().items() if known is flag]
        group.add_argument(*names, dest=flag.name, help=flag.help.replace("%", "%%"), **kind)
    return parser


def print_help(words: Sequence[str], command: str, synopsis: str, description: str) -> bool:
    """Print the help of a command with the flags of `launch` if the first word is `--help`; return whether it was."""
    is_asked = bool(words) and words[0] in ("-h", "--help")
    if is_asked:
        options_parser(f"{command} {synopsis}", description).print_help()
    return is_asked


def read_flags(argv: Sequence[str], command: str) -> tuple[list[tuple[Flag, Any, str, Sequence[str]]], tuple[str, ...]]:
    """Return the flags before the script, each with value, spelling and words; and the script with its own."""
    given = []
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] not in ("-", "--"):
        flag, value, used = _read_flag(argv, position, command)
        given.append((flag, value, argv[position].partition("=")[0], argv[position : position + used]))
        position += used
    rest = tuple(argv[position:])
    if rest[:1] == ("--",):
        return given, rest[1:]
    if given and rest:
        _check_word_behind_switch(given, rest[0])
    return given, rest


def _check_word_behind_switch(given: Sequence[tuple[Flag, Any, str, Sequence[str]]], word: str) -> None:
    """Refuse a value that is neither true nor false; a word that may be a script's or a module's name is none."""
    flag, value, written, _ = given[-1]
    takes_value = value is True and flag.path is not None and flag.preset is None
    if not takes_value or any(other.name in ("module", "no_python") for other, *_ in given):
        return
    # With --print the script may be on another machine, and no file here.
    if not os.path.exists(word) and not word.endswith(".py") and os.sep not in word:
        raise ConfigError(
            f"{written} is {word!r}; expected true or false, or a script behind it, and there is no file {word!r}; "
            "for a module, add -m"
        )


def parse_options(argv: Sequence[str], command: str) -> Options:
    """Split a command line into our options, and the script with its own."""
    given, rest = read_flags(argv, command)
    options = Options(rest=rest)
    entries: list[Entry] = []
    sizes: dict[str, Entry] = {}
    for flag, value, written, words in given:
        if flag.name not in (*OF_JOBS, "dry_run"):
            options.words += tuple(words)
        if flag.path == _PARALLELISM:
            size = int(value) if value.isdecimal() else value
            sizes[str(flag.key)] = Entry(flag.name, size, written, f"--{flag.name}")
        elif flag.path == "fsdp" or _is_strategy_of_fsdp1(flag, value):
            entries.append(Entry(flag.name, value, written, f"--{flag.name}"))
        else:
            _apply(options, flag, value, written)
    layer = _fsdp_layer(entries)
    put_parallelism(sizes, layer)
    _take(options, layer)
    return options


def _take(options: Options, layer: Layer) -> None:
    """Put flags in the spelling of accelerate among the options."""
    if layer.problems:
        raise ConfigError("; ".join(layer.problems))
    for path, setting in layer.settings.items():
        if path == "strategy" and options.flags.get(path) == "fsdp2":
            del options.flags[path]  # of --use_fsdp, which NO_SHARD says more of
        known = options.flags.setdefault(path, schema.thaw(setting.value))
        if coerce(field_specs()[path], known, lenient=True) != setting.value:
            raise ConfigError(
                f"{setting.source.where} contradicts {options.spelled.get(path, flag_name(path))}: they set {path} to "
                f"{show(setting.value)} and to {show(known)}; keep one of the two"
            )
        _note_spelling(options, path, setting.source.where)
    sizes = {options.spelled.get(path, flag_name(path)): options.flags.get(path) for path in SIZE_PATHS}
    if problems := fsdp1_problems(layer.fsdp1, sizes):
        raise ConfigError("; ".join(problems))
    options.notes = tuple(layer.notes)


def _read_flag(argv: Sequence[str], position: int, command: str) -> tuple[Flag, Any, int]:
    """Return the flag at `position`, its value, and how many words it took."""
    written, equals, value = argv[position].partition("=")
    flag = _find_flag(written, command)
    if equals:
        return flag, value, 1
    following = argv[position + 1] if position + 1 < len(argv) else None
    if flag.is_switch:
        takes_word = flag.path is not None and flag.preset is None and following is not None
        return (flag, following, 2) if takes_word and flag.may_take(str(following)) else (flag, True, 1)
    if following is None or following.startswith("--") and _name(following) in launch_flags():
        raise ConfigError(f"option {written} of {command} needs a value, and {following or 'nothing'} follows it")
    return flag, following, 2


def _is_strategy_of_fsdp1(flag: Flag, value: Any) -> bool:
    """Whether a value is the name of one of FSDP1's strategies, which stand for several options, and no switch."""
    is_switch = str(value).lower() in BOOLEAN_WORDS
    return flag.name == "fsdp_reshard_after_forward" and not is_switch and fsdp_dialect.strategy_name(value) is not None


def _name(word: str) -> str:
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def _find_flag(written: str, command: str) -> Flag:
    """Return a flag of ours, or accelerate's spelling of an FSDP option as a flag whose path is `fsdp`."""
    name = _name(written)
    flag = launch_flags().get(name)
    if flag is None and name.startswith("fsdp_") and fsdp_dialect.is_known_key(name):
        flag = Flag(name, "fsdp", name)
    if flag is None or (len(name) == 1) != (not written.startswith("--")):
        _refuse_of_others(written, name)
        known = [f"--{known}" for known in launch_flags() if len(known) > 1]
        hint = did_you_mean("--" + name, known) or "; there is none like it."
        raise ConfigError(
            f"unknown option {written!r} of {command}{hint} Options of the script stand behind the script; "
            f"`{command} --help` lists ours"
        )
    return flag


def _refuse_of_others(written: str, name: str) -> None:
    beginnings = (each for each in _REFUSED if name == each or each.endswith("_") and name.startswith(each))
    if (beginning := next(beginnings, None)) is not None:
        raise ConfigError(f"{written} is an option of accelerate that is not offered: {_REFUSED[beginning]}")


def _apply(options: Options, flag: Flag, value: Any, written: str) -> None:
    if flag.path is None:
        setattr(options, flag.name, str(value).lower() != "false" if flag.is_switch else value)
        return
    if flag.preset is not None:
        if str(value).lower() == "false":
            return
        value = flag.preset
    if flag.key is not None:
        options.flags.setdefault(flag.path, {})[flag.key] = _block_value(flag, value)
        return
    known = options.flags.get(flag.path)
    if flag.path == "strategy" and known not in (None, value):
        raise ConfigError(
            f"{written} asks for strategy {value!r}, and another option for {known!r}; keep one of the two"
        )
    if flag.path.startswith("fsdp.") and fsdp_dialect.is_known_key(flag.name):
        value = _own_value(flag.path, flag.name, value)
    options.flags[flag.path] = value
    _note_spelling(options, flag.path, written)


def _note_spelling(options: Options, path: str, written: str) -> None:
    name = _name(written)
    if f"--{name}" != flag_name(path):
        options.spelled[path] = f"{'--' if len(name) > 1 else '-'}{name}"


def _block_value(flag: Flag, value: Any) -> Any:
    """Return a value of the DeepSpeed block with the type that it has in a file; the block's reader checks it."""
    is_path = flag.metavar == "FILE" and os.path.exists(value)
    return os.path.abspath(value) if is_path else _typed(flag, value)


def _own_value(path: str, name: str, value: Any) -> Any:
    """Translate accelerate's spelling of a value, such as FULL_STATE_DICT, where ours does not know it."""
    try:
        coerce(field_specs()[path], value, lenient=True)
    except WrongValueError:
        settings = _fsdp_layer([Entry(name, value, f"--{name}", f"--{name}")]).settings
        return schema.thaw(settings[path].value) if path in settings else value
    return value


def _fsdp_layer(entries: list[Entry]) -> Layer:
    """Return the options that FSDP flags in accelerate's spelling set."""
    layer = Layer(SourceKind.CLI, lenient=True)
    fsdp_dialect.translate_entries(entries, layer, source_name="the command line", default_version=2)
    if layer.problems:
        raise ConfigError("; ".join(layer.problems))
    return layer
