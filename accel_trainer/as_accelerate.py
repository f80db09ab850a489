"""`python -m accel_trainer.as_accelerate PROGRAM ...` runs a program in which `import accelerate` gives this package.

PROGRAM is a script, `-m` and a module, or a command such as `trl`; `torchrun` starts it like any other module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from accel_trainer.errors import AccelTrainerError
from accel_trainer.launch.flags import Options
from accel_trainer.launch.job import find_command, with_stand_in

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program in the place of this process; return 2 where there is none."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print("usage: python -m accel_trainer.as_accelerate script.py|-m MODULE|COMMAND ...", file=sys.stderr)
        return 2
    is_module = words[0] == "-m"
    is_script = words[0].endswith(".py") or os.path.exists(words[0])
    options = Options(module=is_module, no_python=not is_module and not is_script, rest=tuple(words[is_module:]))
    try:
        command = find_command(options, os.environ)
    except AccelTrainerError as error:
        print(f"accel_trainer.as_accelerate: {error}", file=sys.stderr)
        return 2
    os.execvpe(command[0], command, with_stand_in(os.environ))


if __name__ == "__main__":
    sys.exit(main())
