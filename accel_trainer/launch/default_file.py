"""The configuration file that is used by default: our own, else the one that `accelerate config` has written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["accelerate_config_path", "default_config_path", "find_default_config"]


def _cache(environ: Mapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.path.expanduser(environ.get("HF_HOME") or os.path.join(cache, "huggingface")))


def default_config_path(environ: Mapping[str, str]) -> Path:
    """Return the place of our own default file: in the cache of Hugging Face's libraries."""
    return _cache(environ) / "accel_trainer" / "default_config.yaml"


def accelerate_config_path(environ: Mapping[str, str]) -> Path | None:
    """Return the default file of Hugging Face accelerate, where there is one."""
    paths = (_cache(environ) / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "yml", "json"))
    return next((path for path in paths if path.is_file()), None)


def find_default_config(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the file that is used by default, and a line that says which one and why; None and "" without any."""
    own, other = default_config_path(environ), accelerate_config_path(environ)
    if own.is_file():
        ignored = "" if other is None else f"; that of Hugging Face accelerate, {other}, is not used"
        return own, f"configuration from {own}{ignored}"
    if other is None:
        return None, ""
    return other, (
        f"configuration from {other}, the default of Hugging Face accelerate; `accel-trainer config` makes one of your "
        "own, --config_file names another"
    )
