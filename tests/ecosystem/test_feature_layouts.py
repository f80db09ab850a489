"""Features of docs/compatibility.md that need a library around transformers, on each layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import crossed
from tests.conformance.test_conformance import mark
from tests.conformance.test_features import COLUMNS, FEATURES, check

pytest.importorskip("peft")
pytest.importorskip("torchao")


@pytest.mark.multirank
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("feature", "layout"),
    crossed([name for name, each in FEATURES.items() if each.in_ecosystem], [mark(name) for name in COLUMNS]),
)
def test_a_feature_is_as_on_one_process_or_refused_by_name(feature: str, layout: str, tmp_path: Path):
    check(layout, feature, tmp_path / "run")
