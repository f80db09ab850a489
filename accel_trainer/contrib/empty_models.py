"""A model of which only the configuration is read, without memory: from a directory or the Hub."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accel_trainer.errors import CheckpointNotFoundError, ConfigError, MissingExtraError

LIBRARIES = ("timm", "transformers")


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
    if library_name not in LIBRARIES:
        raise ConfigError(
            f"{model_name} is of the library {library_name or 'that nothing names'}; models of "
            f"{' and '.join(LIBRARIES)} are built: pass --library_name"
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


def add_adapters(model: Any, rank: int, *, in_4_bits: bool) -> Any:
    """Return a frozen model with PEFT's LoRA on all linear layers but the head (`target_modules="all-linear"`).

    Args:
        in_4_bits: whether these layers are packed as bitsandbytes packs them (blocks of 64, one fp32 scale for each),
            and compute in bf16: QLoRA.

    Raises:
        ConfigError: PEFT finds no such layers.
        MissingExtraError: PEFT is not installed.
    """
    import torch

    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise MissingExtraError("adapters are those of PEFT, which is not installed: pip install peft") from None
    try:
        config = peft.LoraConfig(r=rank, target_modules="all-linear")
        model = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"PEFT adapts no {type(model).__name__}: {_first_line(error)}") from error
    for module in model.modules() if in_4_bits else ():
        layer = getattr(module, "base_layer", None)
        if isinstance(layer, torch.nn.Linear):
            weight, count = layer.weight, layer.weight.numel()
            state = SimpleNamespace(shape=weight.shape, absmax=weight.new_empty(count // 64, dtype=torch.float32))
            packed = weight.new_empty((count // 2, 1), dtype=torch.uint8)
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)
            vars(layer).update(quant_state=state, compute_dtype=torch.bfloat16)
            vars(module)["_cast_input_dtype"] = partial(_cast_outside_autocast, module._cast_input_dtype)
    return model


def _cast_outside_autocast(cast: Callable[[Any, Any], Any], x: Any, dtype: Any) -> Any:
    """Leave the input of an adapter to autocast, as PEFT's layers over bitsandbytes do and its others do not."""
    import torch

    return x if torch.is_autocast_enabled() else cast(x, dtype)


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
            return getattr(library, known)(config).float()  # parts may have a dtype of their own
        # Without a dtype it would be the one in the configuration.
        build = getattr(library, own_code or "AutoModel").from_config
        return build(config, dtype=torch.float32, trust_remote_code=trusts_code).float()


def _build_timm(library: Any, name: str, trusts_code: bool, token: str | None) -> Any:
    from accel_trainer.checkpoint.weights.into_model import init_empty_weights

    with init_empty_weights():
        return library.create_model(f"local-dir:{name}" if Path(name).is_dir() else add_timm_hub_prefix(name))


def add_timm_hub_prefix(model_name: str) -> str:
    """Return a name on the Hub as timm wants it, `hf-hub:NAME`; names of its architectures and others stay."""
    return model_name if ":" in model_name or "/" not in model_name else f"hf-hub:{model_name}"
