"""`accel-trainer estimate`: the memory that a model takes, by dtype, from its configuration and without its weights.

As `accel_trainer.commands.estimate` it is where programs look for the command as functions. `--help` imports no torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_trainer.errors import CheckpointNotFoundError, ConfigError, MissingExtraError
from accel_trainer.launch.cli import as_subcommand

__all__ = [
    "add_timm_hub_prefix",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "run_estimate",
    "verify_on_hub",
]

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
_TRAINABLE = ("float32", "float16", "bfloat16")
_LIBRARIES = ("timm", "transformers")
_HEADERS = ("dtype", "Largest Layer", "Total Size", "Training using Adam")


def run_estimate(words: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        CheckpointNotFoundError: there is no such model, or it cannot be read without access rights.
        ConfigError: its configuration makes no model.
    """
    estimate_command(estimate_command_parser().parse_args(words))
    return 0


def main() -> None:
    """Run the command with the words of the command line."""
    estimate_command(estimate_command_parser().parse_args())


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accel-trainer estimate`; with `subparsers`, as their command `estimate-memory`."""
    description = (
        "Print the memory that a model takes, for each dtype: of its largest layer, of all weights and buffers, and in "
        "training with Adam (weights, gradients and two states in that dtype; activations are not in it). In mixed "
        "precision all of these stay in float32."
    )
    parser = argparse.ArgumentParser("accel-trainer estimate", description=description, allow_abbrev=False)
    parser.add_argument("model_name", metavar="MODEL", help="a directory, a config.json, or a name on the Hub")
    parser.add_argument(
        "--library_name",
        "--library-name",
        choices=_LIBRARIES,
        help="whose model it is, where its files do not say so",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "float16", "int8", "int4"],
        choices=tuple(_BITS),
        help="default: float32 float16 int8 int4",
    )
    parser.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run the code that is beside the configuration; of authors whom you trust",
    )
    return as_subcommand(parser, subparsers, "estimate-memory", estimate_command)


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table for arguments of `estimate_command_parser`.

    Raises:
        CheckpointNotFoundError: there is no such model.
        ConfigError: its configuration makes no model.
    """
    from accel_trainer.big_models.sizes import convert_bytes

    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    rows = []
    for dtype, largest, total, training in _sizes(model, args.dtypes):
        usage = training["step"]
        trained = "N/A" if usage < 0 else convert_bytes(usage)
        rows.append([dtype, convert_bytes(largest), convert_bytes(total), trained])
    title = f"Memory usage of {type(model).__name__}, loaded from `{args.model_name}`"
    print(create_ascii_table(list(_HEADERS), rows, title))


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each of `args.dtypes`: dtype, bytes of the largest layer, of all, and in training by purpose."""
    return _sizes(create_empty_model(args.model_name, args.library_name, args.trust_remote_code), args.dtypes)


def _sizes(model: Any, dtypes: Sequence[str]) -> list[list[Any]]:
    from accel_trainer.big_models.sizes import calculate_maximum_sizes

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


# --- the model --------------------------------------------------------------------------------------------------------


def _find_library(model_name: str, library_name: str | None, access_token: str | None) -> tuple[str, str | None]:
    """Return where a model is found, and its library: the given one, or what its files or the Hub say."""
    local = Path(model_name).expanduser()
    if local.exists():
        config = local / "config.json" if local.is_dir() else local
        return str(config.parent if config.name == "config.json" else config), library_name or _library_of(config)
    if library_name is None:
        info = verify_on_hub(model_name, access_token)
        if isinstance(info, str):
            raise CheckpointNotFoundError(_HUB_ERRORS[info].format(name=model_name))
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


_HUB_ERRORS = {
    "gated": "{name} is gated: log in with `hf auth login` as a user who has access, or pass a directory",
    "repo": "{name} is neither a directory nor a model on the Hub; one that is private asks for `hf auth login`",
}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the Hub says about a model; "gated" without access to it, and "repo" where there is none.

    Raises:
        CheckpointNotFoundError: the Hub cannot be reached.
    """
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

    from accel_trainer.checkpoint.weights.meta_device import init_empty_weights

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
    from accel_trainer.checkpoint.weights.meta_device import init_empty_weights

    with init_empty_weights():
        return library.create_model(f"local-dir:{name}" if Path(name).is_dir() else add_timm_hub_prefix(name))


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a name on the Hub as timm wants it, `hf-hub:NAME`; names of its architectures and others stay."""
    return model_name if ":" in model_name or "/" not in model_name else f"hf-hub:{model_name}"
