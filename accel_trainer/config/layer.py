"""One level of configuration: values by dotted path, the place each came from, and all problems with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from accel_trainer.config.document import Entry
from accel_trainer.config.schema import LOW_ENDS, field_specs
from accel_trainer.config.validation import WrongValueError, coerce, show


class SourceKind(StrEnum):
    """The levels of precedence, weakest first."""

    DEFAULT = "default"
    COMPAT = "compat"
    FILE = "file"
    ENVIRONMENT = "environment"
    CLI = "cli"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from.

    `where` is the place that a person would look for: `train.yaml:8`, `ACCELERATE_MIXED_PRECISION`,
    `--mixed_precision`, `Accelerator(mixed_precision=...)`; for a default it is `default`, or
    `compat=accelerate`.
    """

    kind: SourceKind
    where: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A checked value of one option and its source."""

    value: Any
    source: Source
    key_sources: Mapping[str, Source] = field(default_factory=dict)
    """Sources of single keys of a block, where they are known more exactly."""


@dataclass(slots=True)
class Layer:
    """Collects the settings of one level; a wrong value becomes a problem, so that all of them are reported at once."""

    kind: SourceKind
    lenient: bool = False
    settings: dict[str, Setting] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fsdp1: str = ""
    """The place that asks for FSDP1 by its number, which runs with FSDP2; empty where none does."""
    _subjects: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, entry: Entry, value: Any = None) -> None:
        """Set the option at a dotted path to the value of an entry, or to the `value` that the entry stands for."""
        value = entry.value if value is None else value
        if value is None:
            return
        if path in LOW_ENDS and isinstance(value, str) and (ends := re.fullmatch(r"(\d+):(\d+)", value)):
            self.put(LOW_ENDS[path], entry, int(ends[1]))
            value = int(ends[2])
        try:
            checked = coerce(field_specs()[path], value, lenient=self.lenient, text=entry.text)
        except WrongValueError as error:
            self.wrong(entry, error.expected, error.hint)
            return
        known = self.settings.get(path)
        if known is not None and known.value != checked:
            self.problems.append(
                f"{entry.subject} contradicts {self._subjects[path]}: they set {path} to {show(checked)} and to "
                f"{show(known.value)}; keep one of the two"
            )
            return
        self.settings[path] = Setting(checked, Source(self.kind, entry.where))
        self._subjects[path] = entry.subject

    def wrong(self, entry: Entry, expected: str, hint: str = "") -> None:
        """Add the problem of a value that fits no option."""
        self.problems.append(f"{entry.subject} is {show(entry.value)}; expected {expected}{hint}")

    def refuse(self, entry: Entry, way_out: str) -> None:
        """Add the problem of a value that is right, but asks for a feature that is not here."""
        self.problems.append(f"{entry.subject} is {show(entry.value)}, which is not offered: {way_out}")
