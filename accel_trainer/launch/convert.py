"""`accel-trainer convert-config`: a DeepSpeed configuration as one for FSDP2, and back."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from accel_trainer.config import resolve, to_file_dict
from accel_trainer.config.deepspeed.to_fsdp import to_deepspeed, to_fsdp
from accel_trainer.config.readers.yaml_reader import dump_yaml
from accel_trainer.errors import ConfigError

__all__ = ["run_convert_config"]

_SUFFIXES = (".json", ".yaml", ".yml")


def run_convert_config(words: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the file is wrong or cannot be converted, or the result cannot be written.
    """
    parser = argparse.ArgumentParser(
        "accel-trainer convert-config",
        description="Turn a DeepSpeed configuration, or an accelerate file for DeepSpeed, into one for FSDP2; turn one "
        "for FSDP2 or DDP into DeepSpeed's. What has no counterpart is listed.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="IN", help="a file, or a packaged name such as zero3 or full_shard")
    parser.add_argument("target", metavar="OUT", nargs="?", help="file to write, .json or .yaml; else it is printed")
    arguments = parser.parse_args(words)
    config = resolve(file=arguments.source).config
    if config.strategy == "deepspeed":
        converted, lost = to_fsdp(config)
        content = to_file_dict(converted)
        suffix = ".yaml"
    else:
        content, lost = to_deepspeed(config)
        suffix = ".json"
    if arguments.target is None:
        print(_text(content, suffix), end="")
    else:
        _write(Path(arguments.target), content)
        print(f"{arguments.source} -> {arguments.target}")
    for line in lost:
        print(f"- {line}", file=sys.stderr if arguments.target is None else sys.stdout)
    return 0


def _text(content: dict[str, object], suffix: str) -> str:
    return json.dumps(content, indent=2) + "\n" if suffix == ".json" else dump_yaml(content)


def _write(path: Path, content: dict[str, object]) -> None:
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path} has the suffix {path.suffix!r}; expected one of {', '.join(_SUFFIXES)}")
    try:
        with open(path, "x", encoding="utf-8") as target:
            target.write(_text(content, path.suffix))
    except FileExistsError:
        raise ConfigError(f"{path} exists, and is left as it is; give another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
