"""The environment level, from a mapping: our own `ACCEL_TRAINER_*` variables, and those of accelerate's launcher."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_trainer.config.deepspeed_block import CONFIG_FILE, FIELDS, KEY_PREFIX, put_block
from accel_trainer.config.dialects.accelerate_file import DYNAMO, FP8, PARALLEL_COMM, PARALLEL_SIZES, put_parallelism
from accel_trainer.config.dialects.fsdp import is_known_key, translate_entries
from accel_trainer.config.document import Entry
from accel_trainer.config.layer import Layer, Setting, Source, SourceKind
from accel_trainer.config.schema import FieldSpec, field_specs
from accel_trainer.config.validation import WrongValueError, coerce, show
from accel_trainer.errors import did_you_mean
from accel_trainer.logging import LEVEL_VARIABLE

PREFIX = "ACCEL_TRAINER_"
LAUNCH_VARIABLE = "ACCEL_TRAINER_LAUNCH"
ATTEMPT_VARIABLE = "ACCEL_TRAINER_ATTEMPT"
RETURNS_VARIABLE = "ACCEL_TRAINER_RETURNS_AS"
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""The one of accelerate's that our launcher writes, too: scripts read it."""

RESERVED_VARIABLES = {
    LAUNCH_VARIABLE: "the configuration file and the flags of `accel-trainer launch`, as JSON",
    ATTEMPT_VARIABLE: "how often the workers of a job on several machines were started again, and the job's name",
    RETURNS_VARIABLE: "number of a process that is started in the place of a lost rank, of those started at first, and "
    "of ranks of a replica",
    LEVEL_VARIABLE: "level of the package's log messages: debug, info, warning, ...",
}
"""Variables with our prefix that are not options of the tree."""

_DIRECT = {
    PRECISION_VARIABLE: "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "accumulation.num_steps",
    "ACCELERATE_CPU_AFFINITY": "launch.enable_cpu_affinity",
    **{f"ACCELERATE_DYNAMO_{name.upper()}": path for name, path in DYNAMO.items()},
}
# Written with accelerate's launcher's defaults, too, whatever the precision is.
_FP8 = {f"ACCELERATE_{path.upper().replace('.', '_')}": path for path in FP8.values()}
# Its launcher writes a variable for each field of the block, without the words that only the fields have.
_DEEPSPEED = {
    f"ACCELERATE_DEEPSPEED_{name.removeprefix('deepspeed_').removesuffix('_flag').upper()}": name
    for name in (CONFIG_FILE, *FIELDS)
} | {"ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping"}
_ENGINES = {"ACCELERATE_USE_FSDP": "fsdp2", "ACCELERATE_USE_DEEPSPEED": "deepspeed"}


def variable_name(path: str) -> str:
    """Return our own variable for an option: `fsdp.wrap_classes` is `ACCEL_TRAINER_FSDP__WRAP_CLASSES`."""
    return PREFIX + path.upper().replace(".", "__")


class Launched(NamedTuple):
    """The options that our launcher gives its workers."""

    config_file: str | None = None
    flags: Mapping[str, Any] = MappingProxyType({})
    """By dotted path."""
    spelled: Mapping[str, str] = MappingProxyType({})
    """Flags as they were written, by dotted path."""
    exported: Mapping[str, str] = MappingProxyType({})
    """Variables that it wrote for scripts; to us its file and its flags say it, each in its own place of precedence."""


def read_environment_layers(environ: Mapping[str, str], exported: Mapping[str, str]) -> tuple[Layer, Layer]:
    """Return the options that accelerate's variables set, and above them ours; empty variables count as not set.

    Args:
        exported: variables that say nothing to us, as of `Launched`, unless the script has changed them.
    """
    given = {name: value for name, value in environ.items() if value.strip() and value != exported.get(name)}
    return _read_accelerate(given), _read_own(given)


def _variable(name: str, value: Any) -> Entry:
    return Entry(name, value, name, f"environment variable {name}")


def _read_own(given: Mapping[str, str]) -> Layer:
    layer = Layer(SourceKind.ENVIRONMENT, lenient=True)
    paths = {variable_name(path): path for path in field_specs()}
    for name, value in given.items():
        if name == variable_name("deepspeed"):
            put_block(layer, _variable(name, value))
        elif name.startswith(variable_name(KEY_PREFIX)):
            path = name.removeprefix(PREFIX).lower().replace("__", ".")
            layer.settings[path] = Setting(_parsed(value), Source(layer.kind, name))
        elif name in paths:
            layer.put(paths[name], _variable(name, value))
        elif name.startswith(PREFIX) and name not in RESERVED_VARIABLES:
            hint = did_you_mean(name, [*paths, *RESERVED_VARIABLES])
            layer.problems.append(f"unknown environment variable {name!r}{hint}")
    return layer


def _read_accelerate(given: Mapping[str, str]) -> Layer:
    layer = Layer(SourceKind.ENVIRONMENT, lenient=True)
    for name, path in _DIRECT.items():
        if name in given and not _is_launcher_default(name, given):
            layer.put(path, _variable(name, given[name]))
    _read_fp8(given, layer)
    engines = [name for name in _ENGINES if _is_true(given, name, layer)]
    if len(engines) > 1:
        layer.problems.append(f"environment variables {' and '.join(engines)} are both true; a run has one strategy")
        return layer
    if _is_true(given, "ACCELERATE_USE_MEGATRON_LM", layer):
        layer.problems.append(
            "environment variable ACCELERATE_USE_MEGATRON_LM is true, which is not offered: use FSDP, with "
            "PARALLELISM_CONFIG_TP_SIZE for tensor parallelism, or DeepSpeed"
        )
    for name in engines:
        (_read_fsdp if _ENGINES[name] == "fsdp2" else _read_deepspeed)(given, layer)
        if "strategy" not in layer.settings:
            layer.put("strategy", _variable(name, _ENGINES[name]))
    if _is_true(given, "ACCELERATE_USE_PARALLELISM_CONFIG", layer):
        _read_parallelism(given, layer)
    return layer


def _read_fp8(given: Mapping[str, str], layer: Layer) -> None:
    if given.get(PRECISION_VARIABLE, "").strip().lower() == "fp8":
        for name in _FP8.keys() & given.keys():
            layer.put(_FP8[name], _variable(name, given[name]))


def _is_launcher_default(name: str, given: Mapping[str, str]) -> bool:
    """Return whether accelerate's launcher wrote this: always all five of DYNAMO (1.15, `prepare_multi_gpu_env`)."""
    if name == "ACCELERATE_GRADIENT_ACCUMULATION_STEPS":
        return given[name].lower() in ("auto", "none")
    backend = "ACCELERATE_DYNAMO_BACKEND"
    is_off = given.get(backend, "").strip().lower() == "no"
    return is_off and name.startswith("ACCELERATE_DYNAMO_") and name != backend


def _read_deepspeed(given: Mapping[str, str], layer: Layer) -> None:
    names = {key: name for name, key in _DEEPSPEED.items() if given.get(name, "none").strip().lower() != "none"}
    if names:
        where = ", ".join(names.values())
        block = {key: _parsed(given[name]) for key, name in names.items()}
        put_block(layer, Entry(where, block, where, f"environment variables {where}"), origins=names)


def _parsed(text: str) -> Any:
    """Return the number, boolean, list or object that a text is, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False}.get(text.strip().lower(), text)


def _is_true(given: Mapping[str, str], name: str, layer: Layer) -> bool:
    try:
        return bool(coerce(FieldSpec(name, bool, False), given.get(name, "false"), lenient=True))
    except WrongValueError as error:
        layer.wrong(_variable(name, given[name]), error.expected)
        return False


def _read_fsdp(given: Mapping[str, str], layer: Layer) -> None:
    names = [name for name in given if name.startswith("FSDP_") and is_known_key(name)]
    entries = {name.removeprefix("FSDP_").lower(): _variable(name, given[name]) for name in names}

    def word(key: str) -> str:
        return str(entries[key].value).strip().lower() if key in entries else ""

    # accelerate's launcher exports defaults beside the one option that its user gave.
    if word("sharding_strategy") in ("full_shard", "1") and "reshard_after_forward" in entries:
        del entries["sharding_strategy"]
    elif "sharding_strategy" in entries and word("reshard_after_forward") == "true":
        del entries["reshard_after_forward"]
    if not word("auto_wrap_policy").startswith("size"):
        entries.pop("min_num_params", None)
    if word("version") == "2":
        entries.pop("use_orig_params", None)
        entries.pop("sync_module_states", None)
    if word("forward_prefetch") == "false":
        del entries["forward_prefetch"]
    translate_entries(entries.values(), layer, source_name="the environment (FSDP_*)", default_version=1)


def _read_parallelism(given: Mapping[str, str], layer: Layer) -> None:
    sizes = {}
    for size in (*PARALLEL_SIZES, PARALLEL_COMM):
        name = f"PARALLELISM_CONFIG_{size.upper()}"
        if name in given:
            value = given[name].strip()
            sizes[size] = _variable(name, int(value) if value.isdecimal() and int(value) else value)
    put_parallelism(sizes, layer)


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables but for those that a launcher around this process has set for its own script."""
    exported = read_launch_variable(environ, []).exported
    return {name: item for name, item in environ.items() if name != LAUNCH_VARIABLE and exported.get(name) != item}


def read_launch_variable(environ: Mapping[str, str], problems: list[str]) -> Launched:
    """Return the options of our launcher; problems are added to `problems`."""
    text = environ.get(LAUNCH_VARIABLE, "")
    if not text.strip():
        return Launched()
    try:
        # In base64 where it had to pass a remote shell; that alphabet writes no object and no list.
        is_encoded = re.fullmatch(r"[\w-]{4,}=*", text) is not None
        content = json.loads(base64.urlsafe_b64decode(text) if is_encoded else text)
    except ValueError as error:
        problems.append(
            f"environment variable {LAUNCH_VARIABLE} is not valid JSON: {error}; `accel-trainer launch` sets it"
        )
        return Launched()
    is_known = isinstance(content, dict) and content.keys() <= set(Launched._fields)
    launched = Launched(**content) if is_known else Launched()
    if not is_known or not isinstance(launched[0], str | None) or not all(isinstance(x, Mapping) for x in launched[1:]):
        problems.append(
            f"environment variable {LAUNCH_VARIABLE} is {show(text)}; expected a JSON object with 'config_file' and "
            "'flags', as `accel-trainer launch` sets it"
        )
        return Launched()
    return launched
