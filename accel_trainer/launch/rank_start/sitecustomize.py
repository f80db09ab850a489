"""How ctrl-C ends a rank before the script has imported anything of this package: at once, and without a traceback.

Python itself imports a module of this name when it starts. The launcher puts the folder first on PYTHONPATH; here it is
taken off again, for the script, the processes that it starts, and a `sitecustomize` of the environment's own.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType, TracebackType

__all__: list[str] = []


def _leave_path() -> None:
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != folder]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def _import_own() -> None:
    """Import the `sitecustomize` of the environment, which this one has hidden."""
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)  # whoever imports this one looks for it there


def _interrupt(number: int, frame: FrameType | None) -> None:
    # An interrupt within an import is not sure to get out: extensions turn it into an ImportError, callbacks of the
    # import system swallow it. No code of the script could catch it there, so that nothing is lost.
    if _imports_for_script(frame):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    raise KeyboardInterrupt


def _imports_for_script(frame: FrameType | None) -> bool:
    """Whether an import runs that the script's own first level has asked for, or Python to find the script."""
    files: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename != "<frozen runpy>":  # below the script of `python -m`
            files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return any(file.startswith("<frozen importlib") for file in files[-2:])


def _print_no_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if __name__ == "sitecustomize":
    _leave_path()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as below nohup
        signal.signal(signal.SIGINT, _interrupt)
        # asyncio and a run that saves at a signal take ctrl-C over where its handler is this very object.
        signal.default_int_handler = _interrupt  # type: ignore[assignment]
    sys.excepthook = _print_no_interrupt
    _import_own()
