"""`python -m tests.release.floors`: the lowest releases that pyproject.toml accepts, as constraints for pip."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]

COMPANIONS = {"pyarrow": "15.0"}
"""Of datasets, whose own floor it is: newer releases want NumPy 2, and do not say so to pip."""


def floors(*extras: str) -> dict[str, str]:
    """Return the lowest accepted release of each requirement and of those of the extras, by its name."""
    named = [*PROJECT["dependencies"], *(item for extra in extras for item in PROJECT["optional-dependencies"][extra])]
    return dict(item.split(">=") for item in named if not item.startswith(PROJECT["name"]))


if __name__ == "__main__":
    lowest = floors(*PROJECT["optional-dependencies"]) | COMPANIONS
    print(*(f"{name}=={version}" for name, version in sorted(lowest.items())), sep="\n")
