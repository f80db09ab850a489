"""What several of the Trainer's test files need."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def info_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Caplog at INFO, of transformers' loggers, too: those do not propagate."""
    library = logging.getLogger("transformers")
    level, propagates = library.level, library.propagate
    library.addHandler(caplog.handler)
    library.setLevel(logging.INFO)
    library.propagate = False
    caplog.set_level(logging.INFO)
    yield caplog
    library.removeHandler(caplog.handler)
    library.setLevel(level)
    library.propagate = propagates
