"""Configuration of the engine: every "auto" of a DeepSpeed block is filled, and all problems are reported at once.

Nothing here needs DeepSpeed to be installed; where it is, its own models say which keys and values it knows.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_trainer.config.config_source import problem_report
from accel_trainer.config.deepspeed_block import ZERO3_INIT, EngineBlock, leaves, read_block
from accel_trainer.config.deepspeed_keys import (
    KNOWN_KEYS,
    OPTIMIZER_PARAMS,
    OPTIMIZER_TYPES,
    SCHEDULER_PARAMS,
    Keys,
    join,
    unknown_keys,
)
from accel_trainer.config.schema import get_key, set_key
from accel_trainer.config.validation import show
from accel_trainer.errors import ConfigError, did_you_mean
from accel_trainer.integrations.deepspeed.runtime import import_deepspeed
from accel_trainer.runtime.availability import is_deepspeed_available

if TYPE_CHECKING:
    from pydantic import BaseModel

AUTO = "auto"
_MEANINGFUL_AUTOS = (
    "data_types.keep_in_fp32_modules", "zero_optimization.zenflow.", "expert_parallel.", "pipeline.", "autotuning.",
)  # fmt: skip
"""Where DeepSpeed itself gives "auto" a meaning."""
_LEFT_OUT_AUTOS = ("communication_data_type", "seq_parallel_communication_data_type")
"""Where "auto" means the same as an absent key: the type follows the precision."""
_SIZES: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "param_persistence_threshold": lambda width: 10 * width,
}
"""Sizes in elements that suit a model of a hidden size, as Hugging Face's configurations leave them to "auto"."""
_SECTIONS = {
    "": ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"),
    "zero_optimization": ("offload_optimizer", "offload_param", "leaf_module"),
    "optimizer": ("params",),
    "scheduler": ("params",),
}
_TYPES: Mapping[str, tuple[Sequence[str], ModuleType]] = {
    "optimizer": (OPTIMIZER_TYPES, torch.optim),
    "scheduler": (tuple(SCHEDULER_PARAMS), torch.optim.lr_scheduler),
}
_STAND_INS = {
    "optimizer": ("DummyOptim", "a torch optimizer"),
    "scheduler": ("DummyScheduler", "a torch scheduler or DummyScheduler(lr_scheduler_callable=...)"),
}
"""Of an object that the configuration describes: the class to pass for it, and alternatives that need no section."""
_DEVICES = ("none", "cpu", "nvme")
_MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, slots=True)
class Fact:
    """A value of the run, which fills an "auto" of the configuration or is compared with its value."""

    value: Any
    where: str
    """Its source, for messages: `TrainingArguments(learning_rate=...)`."""
    is_default: bool = False
    """Nobody chose it: a value in the configuration is not compared with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Values of the run. None is unknown: an "auto" that needs it is an error."""

    world_size: int
    micro_batch_size: Fact | None = None
    """Rows of one batch on one rank."""
    accumulation_steps: Fact | None = None
    max_grad_norm: Fact | None = None
    """None and 0 do not clip."""
    precision: Fact | None = None
    """no, bf16 or fp16."""
    optimizer: Mapping[str, Fact] = field(default_factory=dict)
    """lr, betas, eps, weight_decay, ... of the optimizer that the configuration describes."""
    scheduler: Mapping[str, Fact] = field(default_factory=dict)
    """total_num_steps, warmup_num_steps, warmup_min_lr, warmup_max_lr."""
    hidden_size: Fact | None = None
    given_optimizer: Literal["none", "torch", "dummy"] = "none"
    """Kind of the prepared optimizer: torch's, a DummyOptim, or none (evaluation, or not known yet)."""
    given_scheduler: Literal["none", "torch", "dummy"] = "none"
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where keys of the block came from, as `Resolved.block_origins` has it: {"zero_stage": "train.yaml:7"}."""


def hidden_size_of(config: Any, where: str = "model.config") -> Fact | None:
    """Return `hidden_size`, the largest of `hidden_sizes`, the text model's, or the largest of nested ones."""
    own: Mapping[str, Any] = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name in ("hidden_size", "hidden_sizes"):
        size = own.get(name) or getattr(config, name, None)
        if size and isinstance(size, int | list | tuple):
            return Fact(size if isinstance(size, int) else max(size), f"{where}.{name}")
    nested = {name: hidden_size_of(item, f"{where}.{name}") for name, item in own.items() if _is_config(name, item)}
    found = [fact for fact in nested.values() if fact is not None]
    return nested.get("text_config") or max(found, key=lambda fact: fact.value, default=None)


def _is_config(name: str, item: Any) -> bool:
    return (isinstance(item, Mapping) or hasattr(item, "to_dict")) and not name.startswith("_")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A DeepSpeed configuration with nothing left open."""

    stage: int
    """0 (no sharding) to 3."""
    data: dict[str, Any]
    """For `deepspeed.initialize(config=...)`; plain dicts and lists, a copy of its own."""
    builds_in_pieces: bool = False
    """Whether models are to be built under `deepspeed.zero.Init` (stage 3 only)."""

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of `data`."""
        return get_key(self.data, path, default)

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch on one rank."""
        return int(self.data[_MICRO_BATCH])

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one update."""
        return int(self.data["gradient_accumulation_steps"])

    @property
    def gradient_clipping(self) -> float:
        """Bound of the gradient norm in the engine's step; 0 does not clip."""
        return float(self.data["gradient_clipping"])

    @property
    def precision(self) -> str:
        """bf16, fp16, or no."""
        return next((kind for kind in ("bf16", "fp16") if self.value(f"{kind}.enabled")), "no")

    @property
    def leaf_classes(self) -> tuple[str, ...]:
        """Class names of the modules whose parameters are gathered together (mixtures of experts)."""
        classes = self.value("zero_optimization.leaf_module.classes", ())
        return (classes,) if isinstance(classes, str) else tuple(classes)


def resolve_engine_config(block: Mapping[str, Any], *, facts: Facts, partial: bool = False) -> EngineConfig:
    """Fill every "auto" of a DeepSpeed configuration and check the rest of it.

    Where nobody asks for clipping, `gradient_clipping` becomes 0: DeepSpeed clips at 1.0 when its configuration is
    silent. Where a torch optimizer is given, DeepSpeed is set to take it, under CPU offload too, where it would
    otherwise insist on an optimizer of its own.

    Args:
        block: `RunConfig.deepspeed`, in DeepSpeed's spelling or with fields of accelerate's; not changed.
        facts: values of the run.
        partial: for a look before the model and the data exist: an "auto" that nothing fills yet is left out instead of
            being an error, and a batch size that nobody gave is 1.

    Raises:
        ConfigError: unknown keys, values that cannot be, autos that nothing fills, and conflicts, all at once.
    """
    resolver = _Resolver(read_block(block, origins=facts.origins), facts, partial=partial)
    resolver.resolve()
    if resolver.problems:
        raise ConfigError(problem_report(resolver.problems, "the DeepSpeed configuration"))
    stage = int(get_key(resolver.data, "zero_optimization.stage", 0))
    return EngineConfig(stage, resolver.data, stage == 3 and resolver.builds_in_pieces)


def _complete(micro: int | None, steps: int | None, world_size: int, total: int | None) -> tuple[int, int]:
    """Return the rows of a micro-batch and the accumulation steps; of an unknown one, as many as `total` needs."""
    if total is None:
        return micro or 1, steps or 1
    if micro is None:
        return max(1, total // ((steps or 1) * world_size)), steps or 1
    return micro, steps or max(1, total // (micro * world_size))


class _Resolver:
    """One resolution: after `resolve`, `data` is the engine's configuration, unless there are `problems`."""

    def __init__(self, block: EngineBlock, facts: Facts, *, partial: bool) -> None:
        self.data = block.data
        self.facts = facts
        self.origins = block.origins
        self.partial = partial
        self.problems: list[str] = []
        self.builds_in_pieces = self.data.pop(ZERO3_INIT, None) is not False

    def resolve(self) -> None:
        """Run every check, in an order in which each finds the sections that it reads."""
        self._keys()
        self._zero()
        self._batch()
        self._clipping()
        self._precision()
        self._optimizer()
        self._scheduler()  # behind the optimizer, whose learning rate it takes
        self._open_autos()
        # DeepSpeed's own models come last, where nothing else is wrong: their words are less plain.
        if not self.problems and is_deepspeed_available():
            self.problems.extend(f"{path}{self._at(path)}{rest}" for path, rest in wrong_values(self.data))

    def _at(self, path: str) -> str:
        """Return where the value at a dotted path came from, in parentheses."""
        where = self.origins.get(path)
        return f" ({where})" if where else ""

    def _wrong(self, path: str, expected: str) -> None:
        self.problems.append(f"{path}{self._at(path)} is {show(get_key(self.data, path))}; expected {expected}")

    def _unresolved(self, path: str, way_out: str) -> None:
        if not self.partial:
            self.problems.append(f"{path}{self._at(path)} is 'auto', and nothing tells its value: {way_out}")

    def _conflict(self, path: str, fact: Fact) -> None:
        value = show(get_key(self.data, path))
        self.problems.append(
            f"{path}{self._at(path)} is {value}, and {fact.where} says {show(fact.value)}; DeepSpeed would go by "
            f'{value}: give both the same value, or write "auto"'
        )

    def _section(self, path: str) -> dict[str, Any]:
        """Return the section at a dotted path, "" for all; an empty one when there is none."""
        found = get_key(self.data, path) if path else self.data
        return found if isinstance(found, dict) else {}

    def _fill(self, path: str, fact: Fact | None, way_out: str) -> None:
        """Put a fact where "auto" stands, and compare it with a value that stands there."""
        section, _, name = path.rpartition(".")
        node = self._section(section)
        if fact is None:
            if node.get(name) == AUTO:
                self._unresolved(path, way_out)
                del node[name]
            return
        value = list(fact.value) if isinstance(fact.value, tuple) else fact.value
        if node.get(name) == AUTO:
            node[name] = value
        elif node.get(name) not in (None, value) and not fact.is_default:
            self._conflict(path, fact)

    def _refuse_unknown(self, section: str, keys: Mapping[str, Any]) -> None:
        for path, start, end in unknown_keys(self._section(section), keys, section):
            self.problems.append(f"{start} {path!r}{self._at(path)}{end}")

    def _keys(self) -> None:
        """Refuse unknown keys and values in place of sections, drop null sections, use the newer of two spellings."""
        if any(unknown_keys(self.data)):
            # A newer release may know more than the tables; it is asked only here, since its import takes seconds.
            self._refuse_unknown("", installed_keys() if is_deepspeed_available() else KNOWN_KEYS)
        if "bfloat16" in self.data:
            self.data.setdefault("bf16", self.data.pop("bfloat16"))
        for section, names in _SECTIONS.items():
            node = self._section(section)
            for name in [name for name in names if name in node]:
                if node[name] is None:
                    del node[name]
                elif not isinstance(node[name], dict):
                    self._wrong(join(section, name), "a section of keys")
                    del node[name]

    def _zero(self) -> None:
        zero = self._section("zero_optimization")
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.pop(old, False) is True:
                zero.setdefault(new, {"device": "cpu"})
        # No model and no data tells stage or devices: "auto" is refused in a look before them, too.
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            self._wrong("zero_optimization.stage", "0, 1, 2 or 3")
            zero["stage"] = 0
        else:
            self._offload("offload_optimizer", stage, needs=1)
            self._offload("offload_param", stage, needs=3)

    def _offload(self, name: str, stage: int, needs: int) -> None:
        section = self._section(f"zero_optimization.{name}")
        path = f"zero_optimization.{name}.device"
        device = section.get("device", "none")
        needs = 3 if device == "nvme" else needs
        if device not in _DEVICES:
            self._wrong(path, f"one of {', '.join(map(repr, _DEVICES))}")
            section["device"] = "none"
        elif device != "none" and stage < needs:
            self._wrong(path, f"'none', since the stage is {stage}, or stage {'3' if needs == 3 else '1 or higher'}")
        has_path = section.get("nvme_path") not in (None, "", "none", AUTO)
        if device == "nvme" and not has_path:
            self.problems.append(
                f"{path}{self._at(path)} is 'nvme', and zero_optimization.{name}.nvme_path is not given; write the "
                "directory of a local disk"
            )
        elif not has_path:
            section.pop("nvme_path", None)

    def _count(self, path: str, fact: Fact | None) -> int | None:
        """Return a number of the block, or the run's; None when neither is known."""
        value = self.data.get(path)
        if value not in (None, AUTO):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self._wrong(path, 'a whole number of at least 1, or "auto"')
                return None
            if fact is not None and not fact.is_default and fact.value != value:
                self._conflict(path, fact)
            return int(value)
        return int(fact.value) if fact is not None else None

    def _batch(self) -> None:
        """Complete the three batch sizes: rows of an update = rows of a micro-batch x accumulation x ranks."""
        # Ranks that share a batch are refused: DeepSpeed takes it for granted that they read the same; here none do.
        for path, size in (("tensor_parallel.autotp_size", "tp_size"), ("sequence_parallel_size", "sp_size")):
            if get_key(self.data, path) not in (None, 0, 1, AUTO):
                self._wrong(path, f"1: ranks read different data under DeepSpeed; use {size} of strategy 'fsdp2'")
        before, world, fact = len(self.problems), self.facts.world_size, self.facts.micro_batch_size
        micro = self._count(_MICRO_BATCH, fact if fact and not fact.is_default else None)
        steps = self._count("gradient_accumulation_steps", self.facts.accumulation_steps)
        total = self._count("train_batch_size", None)
        if len(self.problems) > before:
            total = None  # the rest of the checks can go on
        elif micro is None and total is None:
            micro = self._rows_of_loader()
        micro, steps = _complete(micro, steps, world, total)
        product = micro * steps * world
        if total not in (None, product):
            self.problems.append(
                f"train_batch_size{self._at('train_batch_size')} is {total}, and {micro} rows x {steps} accumulation "
                f'steps x {world} processes make {product}: write {product}, or "auto"'
            )
        self.data[_MICRO_BATCH] = micro
        self.data["gradient_accumulation_steps"] = steps
        self.data["train_batch_size"] = product

    def _rows_of_loader(self) -> int:
        if self.facts.micro_batch_size is not None:
            return int(self.facts.micro_batch_size.value)
        if not self.partial:
            found = show(self.data[_MICRO_BATCH]) if _MICRO_BATCH in self.data else "not given"
            self.problems.append(
                f"{_MICRO_BATCH}{self._at(_MICRO_BATCH)} is {found}, and no data loader tells the batch size: write "
                "the number of rows that one process takes at a time, or prepare a loader with the model"
            )
        return 1

    def _clipping(self) -> None:
        fact = self.facts.max_grad_norm
        if fact is not None:
            fact = replace(fact, value=fact.value or 0.0)
        value = self.data.setdefault("gradient_clipping", AUTO)
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            self._wrong("gradient_clipping", 'a number of at least 0 (0 does not clip), or "auto"')
            return
        self._fill("gradient_clipping", fact or Fact(0.0, "nobody", is_default=True), "")

    def _precision(self) -> None:
        fact = self.facts.precision
        chosen = fact.value if fact is not None else None
        if all(get_key(self.data, f"{kind}.enabled") is True for kind in ("fp16", "bf16")):
            self.problems.append("fp16.enabled and bf16.enabled are both true; keep one of the two")
            return
        for kind in ("fp16", "bf16"):
            if kind not in self.data and chosen != kind:
                continue
            section = self.data.setdefault(kind, {})
            enabled = section.get("enabled", AUTO)
            if enabled == AUTO:
                section["enabled"] = chosen == kind
            elif not isinstance(enabled, bool):
                self._wrong(f"{kind}.enabled", 'true, false or "auto"')
            elif fact is not None and not fact.is_default and enabled != (chosen == kind):
                self._conflict(f"{kind}.enabled", fact)

    def _optimizer(self) -> None:
        given = self.facts.given_optimizer
        if self._is_described("optimizer", given):
            kind = str(self.data["optimizer"].get("type")).lower()
            self._fill_params("optimizer", OPTIMIZER_PARAMS.get(kind), self.facts.optimizer)
        elif given == "torch" and self._section("zero_optimization").get("stage", 0):
            self.data.setdefault("zero_allow_untested_optimizer", True)
            if get_key(self.data, "zero_optimization.offload_optimizer.device", "none") != "none":
                self.data.setdefault("zero_force_ds_cpu_optimizer", False)

    def _is_described(self, section: str, given: str) -> bool:
        """Whether there is a section that describes an object; it is checked against the object that the user gives."""
        dummy, alternatives = _STAND_INS[section]
        if section not in self.data:
            if given == "dummy":
                self.problems.append(
                    f"a {dummy} was given, and the DeepSpeed configuration has no {section!r} section for it to stand "
                    f"for; add the section, or pass {alternatives}"
                )
            return False
        if given == "torch":
            self.problems.append(
                f"the DeepSpeed configuration has a section {section!r}{self._at(section)}, and a torch {section} was "
                f"given too; remove the section, or pass {dummy} instead"
            )
        kind = self.data[section].get("type")
        own, torchs = _TYPES[section]
        if not isinstance(kind, str):
            self._wrong(f"{section}.type", f"the name of the {section}")
        elif kind.lower() not in map(str.lower, own) and not hasattr(torchs, kind):
            hint = did_you_mean(kind, [*own, *(name for name in dir(torchs) if name[:1].isupper())])
            self._wrong(f"{section}.type", f"one of {', '.join(own)}, or one of {torchs.__name__}{hint}")
        return True

    def _fill_params(self, section: str, keys: Mapping[str, Any] | None, facts: Mapping[str, Fact]) -> None:
        path, (dummy, _) = f"{section}.params", _STAND_INS[section]
        if keys is not None:
            self._refuse_unknown(path, keys)
        params = self.data[section].setdefault("params", {})
        known = self._names_of(section) if keys is None else keys
        # What was given, and the section does not have: else DeepSpeed's own defaults would hold, without a word.
        params |= {name: AUTO for name, fact in facts.items() if name in known and not fact.is_default} | params
        for name in list(self._section(path)):
            self._fill(f"{path}.{name}", facts.get(name), f"write a value, or pass {dummy} with it")

    def _names_of(self, section: str) -> Collection[str]:
        """Return the parameters of torch's class that a section names."""
        _, torchs = _TYPES[section]
        made = getattr(torchs, str(self.data[section].get("type")), None)
        return () if made is None else inspect.signature(made).parameters.keys()

    def _scheduler(self) -> None:
        if not self._is_described("scheduler", self.facts.given_scheduler):
            return
        known = {"warmup_min_lr": Fact(0, "nobody", is_default=True), **self.facts.scheduler}
        rate = get_key(self.data, "optimizer.params.lr")
        if "lr" in self.facts.optimizer:
            known.setdefault("warmup_max_lr", self.facts.optimizer["lr"])
        elif isinstance(rate, float):
            known.setdefault("warmup_max_lr", Fact(rate, "optimizer.params.lr", is_default=True))
        if (steps := known.get("warmup_num_steps")) is not None:
            known["warmup_num_steps"] = replace(steps, value=max(1, steps.value))  # DeepSpeed refuses 0
        self._fill_params("scheduler", SCHEDULER_PARAMS.get(str(self.data["scheduler"].get("type"))), known)

    def _open_autos(self) -> None:
        """Derive the sizes that follow from the model's width, as Hugging Face's files expect; refuse others."""
        zero = self._section("zero_optimization")
        width = self.facts.hidden_size
        for name in [name for name, value in zero.items() if value == AUTO]:
            size = _SIZES.get(name.removeprefix("stage3_"))
            if name.startswith("stage3_") and zero.get("stage") != 3:
                del zero[name]  # without effect at this stage
            elif size is not None and width is not None:
                zero[name] = size(width.value)
            elif size is not None:
                self._unresolved(
                    f"zero_optimization.{name}", "the model has no config with a hidden_size; write a number"
                )
                del zero[name]
        for name in _LEFT_OUT_AUTOS:
            if self.data.get(name) == AUTO:
                del self.data[name]
        for path, name, node in list(_autos(self.data, "")):
            self._unresolved(path, "write a value, or remove the key for DeepSpeed's default")
            del node[name]


def _autos(node: dict[str, Any], section: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, value in node.items():
        path = join(section, name)
        if value == AUTO and not path.startswith(_MEANINGFUL_AUTOS):
            yield path, name, node
        elif isinstance(value, dict):
            yield from _autos(value, path)


SECTION_MODELS: Mapping[str, str] = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "compile": "compile.config:CompileConfig",
    "tensor_parallel": "runtime.tensor_parallel.config:TPTrainingConfig",
    "hybrid_engine": "runtime.config:HybridEngineConfig",
    "comms_logger": "comm.config:CommsLoggerConfig",
    "timers.throughput": "utils.config:DeepSpeedThroughputTimerConfig",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "wandb": "monitor.config:WandbConfig",
    "comet": "monitor.config:CometConfig",
}
"""The sections that DeepSpeed checks with a model, and where that is below its package."""


def _models() -> Iterator[tuple[str, type[BaseModel]]]:
    import_deepspeed()
    for section, target in SECTION_MODELS.items():
        module, _, name = target.partition(":")
        try:
            yield section, getattr(importlib.import_module(f"deepspeed.{module}"), name)
        except (ImportError, AttributeError):
            continue  # an older or a newer release has it elsewhere; the tables serve


def model_keys(model: type[BaseModel]) -> dict[str, Any]:
    """Return the keys of a model, under their names and their aliases, with those of the models inside."""
    keys: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        inner = next((kind for kind in (info.annotation, *typing.get_args(info.annotation)) if _is_model(kind)), None)
        for spelling in filter(None, (name, info.alias)):
            keys[spelling] = model_keys(inner) if inner is not None else None
    return keys


def _is_model(kind: Any) -> bool:
    from pydantic import BaseModel  # DeepSpeed depends on it, we do not

    return isinstance(kind, type) and issubclass(kind, BaseModel)


def installed_keys() -> Keys:
    """Return the tables of known keys with the installed release's own ones."""
    known: dict[str, Any] = copy.deepcopy(dict(KNOWN_KEYS))
    for section, model in _models():
        for path, value in leaves(model_keys(model), section):
            if get_key(known, path) is None:
                set_key(known, path, value)
    return known


def wrong_values(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the rest of the message of every value that DeepSpeed's models refuse."""
    from pydantic import ValidationError

    for section, model in _models():
        content = get_key(data, section)
        if not isinstance(content, Mapping):
            continue
        try:
            model(**copy.deepcopy(dict(content)))
        except ValidationError as error:
            for item in error.errors():
                if item["type"] != "extra_forbidden":
                    yield _refusal(section, item)
        except (AssertionError, TypeError, ValueError) as error:
            yield section, f": DeepSpeed refuses it: {error}"


def _refusal(section: str, item: Mapping[str, Any]) -> tuple[str, str]:
    path = ".".join([section, *map(str, item["loc"])])
    reason = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    found = f" is {show(item['input'])}, which DeepSpeed refuses" if item["loc"] else ": DeepSpeed refuses it"
    return path, f"{found}: {reason}"
