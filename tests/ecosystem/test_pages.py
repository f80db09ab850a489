"""The code of the documentation's pages on other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.test_docs import NEEDS, ROOT, check_python, run_pages_on_ranks


@pytest.mark.multirank
@pytest.mark.parametrize("page", NEEDS)
def test_a_page_on_another_library_runs_on_two_ranks(page: str, tmp_path: Path):
    pytest.importorskip(NEEDS[page])
    path = ROOT / "docs" / f"{page}.md"
    check_python(path, run_pages_on_ranks([path], tmp_path)[path])
