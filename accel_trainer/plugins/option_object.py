"""Base of the objects that options are passed to `Accelerator(...)` in."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

__all__ = ["OptionObject"]


class OptionObject:
    """Holds options; a dataclass inherits it and says where they go."""

    def given(self) -> dict[str, Any]:
        """Return the options that were set, the ones set to a default value included; None means not set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}  # type: ignore[arg-type]

    def explicit(self) -> dict[str, Any]:
        """Return the options that were set, by dotted path of the configuration."""
        return {}

    def objects(self) -> dict[str, Any]:
        """Return those that no configuration file can hold, by the name of a field of AcceleratorOptions."""
        return {}
