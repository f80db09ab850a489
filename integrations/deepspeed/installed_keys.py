"""Keys and values that the installed DeepSpeed's own models accept."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel_trainer.config.deepspeed.keys import KNOWN_KEYS, Keys, join
from accel_trainer.config.schema import get_key
from accel_trainer.config.validation import show
from accel_trainer.integrations.deepspeed.runtime import import_deepspeed

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["SECTION_MODELS", "installed_keys", "is_installed", "model_keys", "wrong_values"]

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


def is_installed() -> bool:
    """Whether DeepSpeed can be imported."""
    return importlib.util.find_spec("deepspeed") is not None


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
        _add(get_key(known, section), model_keys(model))
    return known


def _add(known: dict[str, Any], found: Mapping[str, Any]) -> None:
    for name, inner in found.items():
        if isinstance(inner, Mapping) and isinstance(known.get(name), dict):
            _add(known[name], inner)
        else:
            known.setdefault(name, inner)


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
    path = section
    for name in item["loc"]:
        path = join(path, str(name))
    reason = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    found = f" is {show(item['input'])}, which DeepSpeed refuses" if item["loc"] else ": DeepSpeed refuses it"
    return path, f"{found}: {reason}"
