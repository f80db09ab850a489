"""The configuration from its sources, each option by itself: Python > command line > environment > file > default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from accel_trainer.config.config_source import ConfigSource, FileProblemsError, problem_report
from accel_trainer.config.deepspeed_block import KEY_PREFIX, block_sources, leaves, merge_levels, put_block, read_block
from accel_trainer.config.dialects.environment import read_environment_layers, read_launch_variable
from accel_trainer.config.document import Entry
from accel_trainer.config.files import FileConfig, read_file
from accel_trainer.config.layer import Layer, Setting, Source, SourceKind
from accel_trainer.config.parallel import SIZE_PATHS, fsdp1_problems, size_for_shards
from accel_trainer.config.schema import (
    COMPAT_DEFAULTS,
    Compat,
    LossImplementation,
    RunConfig,
    field_specs,
    get_value,
    section_names,
    set_key,
)
from accel_trainer.config.validation import cross_problems, show_plain, unused_notes
from accel_trainer.errors import ConfigError, did_you_mean

_RENAMED = {"use_cpu": "cpu", "accumulation.num_steps": "gradient_accumulation_steps"}
_SIZES = {path: path.replace("parallel.", "parallelism_config.") for path in field_specs() if "parallel." in path}
_ACCELERATOR_KEYWORDS = {**_RENAMED, **_SIZES, "data.split_batches": "split_batches"}
_FLAGS = {**_RENAMED, "launch.monitor_interval_seconds": "monitor_interval"}
"""Flags whose names do not follow from the path."""

_DEFAULT = Source(SourceKind.DEFAULT, "default")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration that is complete and checked."""

    config: RunConfig
    sources: Mapping[str, Source]
    """For every dotted path, and for each key of the DeepSpeed block."""
    notes: tuple[str, ...] = ()
    """One-line remarks that a run should log once, such as keys of FSDP1 that were mapped."""

    def source(self, path: str) -> Source:
        """Return where the value at a dotted path came from."""
        if path not in field_specs():
            raise ConfigError(f"unknown option {path!r}{did_you_mean(path, field_specs())}")
        return self.sources[path]

    def value(self, path: str) -> Any:
        """Return the value at a dotted path."""
        self.source(path)  # refuses unknown ones
        return get_value(self.config, path)

    def is_set(self, path: str) -> bool:
        """Return whether any source gave the option, even if it gave its default."""
        return self.source(path).kind is not SourceKind.DEFAULT

    def describe(self, path: str) -> str:
        """Return `mixed_precision=bf16 (from train.yaml:8)`, for messages."""
        source = self.source(path)
        origin = "default" if source.kind is SourceKind.DEFAULT else f"from {source.where}"
        text = "the DeepSpeed configuration" if path == "deepspeed" else f"{path}={show_plain(self.value(path))}"
        return f"{text} ({origin})"

    def spell(self, path: str, value: str, *, argument: str) -> str:
        """Return an option with another value, spelled as where it is set: `--on_changed_run warn`, for messages.

        Args:
            argument: that which sets it, where nothing has yet: `TrainingArguments(on_changed_run=...)`.
        """
        source = self.source(path)
        match source.kind:
            case SourceKind.FILE:
                return f"{path}: {value} in {source.where}"
            case SourceKind.ENVIRONMENT:
                return f"{source.where}={value}"
            case SourceKind.CLI:
                return f"{source.where} {value}"
            case SourceKind.DEFAULT | SourceKind.COMPAT:
                return argument.replace("...", repr(value))
        return source.where.replace("...", repr(value))

    def block_origins(self) -> dict[str, str]:
        """Return the origin of each key of the DeepSpeed block, for messages."""
        named = ((path, source) for path, source in self.sources.items() if path.startswith(KEY_PREFIX))
        return {path.removeprefix(KEY_PREFIX): source.where for path, source in named}

    def explain(self) -> list[tuple[str, Any, Source]]:
        """Return (dotted path, value, source) of every option, in the order of the tree."""
        return [(path, get_value(self.config, path), self.sources[path]) for path in field_specs()]

    def explain_block(self) -> list[tuple[str, Any, Source]]:
        """Return (dotted path, value, source) of every value of the DeepSpeed configuration, those of its file too."""
        if not self.config.deepspeed:
            return []
        origins, default = self.block_origins(), self.sources["deepspeed"]
        block = read_block(self.config.deepspeed, origins=origins)
        rows = []
        for key, value in leaves({**block.data, **block.launch}):
            where = block.origins.get(key) or origins.get(key) or default.where
            rows.append((f"{KEY_PREFIX}{key}", value, Source(default.kind, where)))
        return rows


def _choose_by_sizes(config: RunConfig, settings: dict[str, Setting]) -> RunConfig:
    """Return the configuration with the strategy that alone has an axis whose size is given, where it is left open."""
    path = size_for_shards(config)
    if config.strategy != "auto" or path is None:
        return config
    settings["strategy"] = Setting("fsdp2", settings[path].source)
    return dataclasses.replace(config, strategy="fsdp2")


def _choose_recomputation(config: RunConfig, settings: dict[str, Setting]) -> RunConfig:
    """Return the configuration with the stronger of two levels that ask for activation checkpointing, each its way."""
    paths = ("activation_checkpointing", "fsdp.activation_checkpointing")
    if config.strategy != "fsdp2" or any(path not in settings for path in paths):
        return config
    strengths = {path: list(SourceKind).index(settings[path].source.kind) for path in paths}
    weaker, stronger = sorted(paths, key=lambda path: strengths[path])
    # accelerate's launcher always sets this variable, to "false" without a choice.
    is_unasked = settings[stronger].source.where == "FSDP_ACTIVATION_CHECKPOINTING" and not settings[stronger].value
    if strengths[weaker] == strengths[stronger] or is_unasked:
        return config
    del settings[weaker]
    return build_config({path: setting.value for path, setting in settings.items()})


def _choose_loss(config: RunConfig, settings: dict[str, Setting]) -> RunConfig:
    """Return the configuration with the loss that alone has chunks of the size that is given, where it is left open."""
    if "loss" in settings or config.loss_chunk_tokens is None:
        return config
    settings["loss"] = Setting(LossImplementation.CHUNKED, settings["loss_chunk_tokens"].source)
    return dataclasses.replace(config, loss=LossImplementation.CHUNKED)


def resolve(
    *,
    explicit: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    flags_spelled: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    file: ConfigSource | FileConfig | None = None,
    surroundings: Layer | None = None,
    explicit_name: str = "Accelerator",
    explicit_keywords: Mapping[str, str] = _ACCELERATOR_KEYWORDS,
    explicit_objects: Mapping[str, str] = MappingProxyType({}),
) -> Resolved:
    """Return the configuration that all sources make together.

    Args:
        explicit: Python arguments by dotted path; None values count as not given. Under `deepspeed` a block, or the
            name of one; under `deepspeed.zero_optimization.stage` and the like a single key of it.
        flags: command-line flags by dotted path; values may still be text.
        flags_spelled: the flag that was given for an option, by dotted path, where it is not the option's own.
        environ: environment variables, usually all; `ACCEL_TRAINER_LAUNCH` brings the launcher's file and flags.
        file: a path, a packaged name, JSON text, a mapping, or a result of `read_file`; replaces the launcher's, but
            for what that says of the launch: a file of the script does not know with how many processes a job began.
        surroundings: options that a scheduler's variables describe; our own variables stand above them.
        explicit_name: the receiver of the `explicit` arguments, for messages.
        explicit_keywords: the receiver's own keyword for an option, where it is not the path.
        explicit_objects: the keyword of the object that holds an option, such as a plugin.

    Raises:
        ConfigError: everything that is wrong in any of the sources, all at once.
    """
    environ = environ or {}
    problems: list[str] = []

    def explicit_source(path: str) -> str:
        return f"{explicit_name}({explicit_keywords.get(path) or explicit_objects.get(path, path)}=...)"

    launched = read_launch_variable(environ, problems)
    spelled = {**launched.spelled, **(flags_spelled or {})}
    layers = [
        *_file_layers(file, launched.config_file),
        *([] if surroundings is None else [surroundings]),
        *read_environment_layers(environ, launched.exported),
        _named_layer(
            {**launched.flags, **(flags or {})}, SourceKind.CLI, lambda path: spelled.get(path) or flag_name(path)
        ),
        _named_layer(
            explicit or {}, SourceKind.PYTHON, explicit_source, explicit_objects.keys() - explicit_keywords.keys()
        ),
    ]
    settings = _merge(layers, problems)
    settings = _compat_settings(settings) | settings
    config = _choose_by_sizes(build_config({path: setting.value for path, setting in settings.items()}), settings)
    config = _choose_recomputation(config, settings)
    config = _choose_loss(config, settings)
    resolved = Resolved(config, _sources_of(settings))
    problems.extend(cross_problems(resolved.config, resolved.describe))
    problems.extend(_problems_of_fsdp1(layers, resolved))
    if problems:
        raise ConfigError(problem_report(problems, "the configuration"))
    notes = [note for layer in layers for note in layer.notes]
    notes += unused_notes(resolved.config, settings.keys(), resolved.describe)
    notes += _notes_of_compat(resolved)
    return dataclasses.replace(resolved, notes=tuple(notes))


def _compat_settings(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the defaults that `compat` puts in the place of ours, where it is set."""
    if "compat" not in settings:
        return {}
    compat = settings["compat"].value
    source = Source(SourceKind.COMPAT, f"compat={compat}")
    return {path: Setting(value, source) for path, value in COMPAT_DEFAULTS[compat].items()}


def _notes_of_compat(resolved: Resolved) -> list[str]:
    if resolved.config.compat is not Compat.ACCELERATE:  # the block of a Trainer's run says what is in force there
        return []
    paths = [path for path, source in resolved.sources.items() if source.kind is SourceKind.COMPAT]
    return [f"{resolved.describe('compat')} sets {', '.join(f'{p}={show_plain(resolved.value(p))}' for p in paths)}"]


def _problems_of_fsdp1(layers: Sequence[Layer], resolved: Resolved) -> list[str]:
    sizes = {resolved.describe(path): get_value(resolved.config, path) for path in SIZE_PATHS}
    return [problem for layer in layers for problem in fsdp1_problems(layer.fsdp1, sizes)]


def _sources_of(settings: Mapping[str, Setting]) -> dict[str, Source]:
    """Return who gave each option its value, and each key of a DeepSpeed block."""
    sources = dict.fromkeys(field_specs(), _DEFAULT) | {path: setting.source for path, setting in settings.items()}
    if "deepspeed" in settings:
        sources |= {f"{KEY_PREFIX}{name}": source for name, source in block_sources(settings["deepspeed"]).items()}
    return sources


def _merge(layers: Sequence[Layer], problems: list[str]) -> dict[str, Setting]:
    """Return the settings in force, of which a stronger level, further behind, gave each."""
    settings: dict[str, Setting] = {}
    for layer in layers:
        problems.extend(layer.problems)
        settings |= layer.settings
    # Only keys of the DeepSpeed block, and options that it fixes, are not decided one by one.
    block = [path for path in settings if path == "deepspeed" or path.startswith(KEY_PREFIX)]
    if block or "strategy" in settings and settings["strategy"].value == "deepspeed":
        settings = {path: setting for path, setting in settings.items() if path not in block}
        merge_levels(settings, layers, problems)
    return settings


def build_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the tree that has these values at these dotted paths and defaults elsewhere; checks nothing."""
    content: dict[str, Any] = {}
    for path, value in values.items():
        set_key(content, path, value)
    config = RunConfig()
    for name in content.keys() & set(section_names()):
        content[name] = dataclasses.replace(getattr(config, name), **content[name])
    return dataclasses.replace(config, **content)


def _file_layer(file: ConfigSource | FileConfig | None) -> Layer:
    if file is None:
        return Layer(SourceKind.FILE)
    try:
        content = file if isinstance(file, FileConfig) else read_file(file)
    except FileProblemsError as error:
        return Layer(SourceKind.FILE, problems=list(error.problems))
    return Layer(SourceKind.FILE, settings=dict(content.settings), notes=list(content.notes), fsdp1=content.fsdp1)


def _file_layers(file: ConfigSource | FileConfig | None, launch_file: ConfigSource | FileConfig | None) -> list[Layer]:
    """Return the script's file above the launch options of the launcher's, or all of the latter."""
    launched = _file_layer(launch_file)
    if file is None:
        return [launched]
    options = {path: setting for path, setting in launched.settings.items() if path.startswith("launch.")}
    return [Layer(launched.kind, settings=options), _file_layer(file)]


def flag_name(path: str) -> str:
    """Return the flag of `accel-trainer launch` for an option: `fsdp.wrap_classes` is `--fsdp_wrap_classes`."""
    section, _, name = path.rpartition(".")
    return f"--{_FLAGS.get(path) or (name if section in ('', 'launch') else f'{section}_{name}')}"


def _named_layer(
    values: Mapping[str, Any],
    kind: SourceKind,
    name_of: Callable[[str], str],
    objects: Collection[str] = (),
) -> Layer:
    """Return the layer of options that have names; those in `objects` share the name of the object that holds them."""
    layer = Layer(kind, lenient=kind is SourceKind.CLI)
    for path, value in values.items():
        if path.startswith(KEY_PREFIX):
            if value is not None:
                layer.settings[path] = Setting(value, Source(kind, name_of(path)))
        elif path == "deepspeed":
            # A flag sets one key of the block, and the block is the flags that were given.
            is_cli = kind is SourceKind.CLI and isinstance(value, Mapping)
            origins = {key: f"--{key}" for key in value} if is_cli else {}
            name = ", ".join(origins.values()) or name_of(path)
            put_block(layer, Entry(path, value, name, name), origins=origins)
        elif path in field_specs():
            name = name_of(path)
            layer.put(path, Entry(path, value, name, f"{path} of {name}" if path in objects else name))
        else:
            layer.problems.append(f"unknown option {path!r}{did_you_mean(path, field_specs())}")
    return layer
