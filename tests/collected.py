"""Imports the test modules that pytest has collected: in the server of the ranks, or each rank imports its own anew."""

import contextlib
import importlib
import os
import sys

from tests.ranks import COLLECTED

for name in os.environ.pop(COLLECTED, "").split():
    with contextlib.suppress(BaseException):  # one that is skipped as a whole; a rank that needs it says what is wrong
        importlib.import_module(name)

# What the first save or load of a model of transformers makes, in a tenth of a second of each rank.
if (conversions := sys.modules.get("transformers.conversion_mapping")) is not None:
    conversions.get_checkpoint_conversion_mapping("")
