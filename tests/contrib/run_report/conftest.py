"""What the tests of a run's log need."""

from tests.trainer.conftest import info_log

__all__ = ["info_log"]
