"""`python -m accel_trainer` is the command `accel-trainer`."""

from __future__ import annotations

import sys

from accel_trainer.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
