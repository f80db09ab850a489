"""The test scripts inside accelerate (`accelerate/test_utils/scripts`), run with this library in its place.

    python -m tests.migration.accelerate_scripts    # prints what deviates, as `differences.json` has it under "scripts"

Each check that a script's `main()` calls is recorded by itself, so that those behind one that fails run, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from accel_trainer.launch.job import STAND_IN
from tests.ranks import RankFailure, run_ranks

PROCESSES: dict[str, tuple[int, ...]] = {
    "test_cli": (1,),
    "test_distributed_data_loop": (2,),
    "test_merge_weights": (1, 2),
    "test_notebook": (2,),
    "test_ops": (1, 2),
    "test_script": (1, 2),
    "test_sync": (1, 2),
    "external_deps.test_metrics": (1, 2),
}
"""Scripts that need neither an accelerator nor the hub, and the numbers of processes that they are written for."""
HUB = (
    "checkpointing",
    "ds_alst_ulysses_sp",
    "ds_multiple_model",
    "peak_memory_usage",
    "performance",
    "zero3_integration",
)
NOT_RUN = (
    {"test_ddp_comm_hook": "its reference is a DDP with device_ids, which takes no model on a CPU"}
    | {f"external_deps.test_{name}": "it downloads a model from the hub" for name in HUB}
    | {
        "external_deps.test_pippy": "pipeline-parallel inference is not offered",
    }
)
_SCRIPTS = "accelerate.test_utils.scripts"


def find_accelerate() -> Path | None:
    """Return the directory of accelerate where it is installed."""
    spec = importlib.util.find_spec("accelerate")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


class _TestUtils(MetaPathFinder):
    """Finds accelerate's own `test_utils`, which is not among what stands in for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "accelerate" or name.partition(".")[0] != "test_utils":
            return None
        file = self._directory.joinpath(*name.split("."))
        file, inside = (file / "__init__.py", [str(file)]) if file.is_dir() else (file.with_suffix(".py"), None)
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=inside)


def run_here(script: str) -> dict[str, str]:
    """Run a script's `main()` on this rank; return, by check, "" or the error that it ended in."""
    directory = find_accelerate()
    assert directory is not None
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        del sys.modules[name]  # transformers has imported it, where another file's preload imported transformers
    sys.path.insert(0, STAND_IN)
    sys.meta_path.insert(0, _TestUtils(directory))
    found: dict[str, str] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        if script == "test_merge_weights":  # it has no main()
            _record("the whole script", found, runpy.run_module)(f"{_SCRIPTS}.{script}", run_name="__main__")
            return found
        module: Any = importlib.import_module(f"{_SCRIPTS}.{script}")
        if script == "test_notebook":
            _let_one_rank_crack(module)
        for name in module.main.__code__.co_names:
            check = getattr(module, name, None)
            if isinstance(check, FunctionType) and check.__module__ == module.__name__:
                setattr(module, name, _record(name, found, check))
        _record("main", found, module.main)()
    return found


def _let_one_rank_crack(module: Any) -> None:
    """Have both ranks join first, and rank 0 take the trials: by itself the script hangs once in some 40 runs.

    Its ranks race for the trials. One that takes the last joins the group, where the other may have found none and
    ended, or it leaves the other waiting for one more.
    """
    crack = module.tough_nut_function

    def tough_nut_function(queue: Any) -> None:
        if module.PartialState().is_main_process:
            crack(queue)

    module.tough_nut_function = tough_nut_function


def _record(name: str, found: dict[str, str], check: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(check)

    @functools.wraps(check)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments if name not in ("main", "the whole script") else {}
        plain = [f"{key}={value}" for key, value in given.items() if isinstance(value, bool | int | str)]
        label = f"{name}({', '.join(plain)})" if plain else name
        try:
            result = check(*args, **kwargs)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            text = " ".join(str(error).split())
            found[label] = f"{type(error).__name__}: {text[:300]}"
            return None
        found.setdefault(label, "")
        return result

    return recorded


def run_script(script: str, processes: int) -> dict[str, str]:
    """Return, by check, "" or the error of the first rank on which it failed; "all of it" where ranks ended or hung."""
    # The launcher for notebooks starts its processes itself.
    starts = script == "test_notebook"
    outside = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    env = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_NUM_PROCESSES": str(processes), **(outside if starts else {})}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            ranks = run_ranks(run_here, 1 if starts else processes, script, env=env, timeout=120)
        except RankFailure as failure:
            return {"all of it": str(failure)}
    found = ranks[0]
    for rank in ranks[1:]:
        found |= {check: said for check, said in rank.items() if said and not found.get(check)}
    return found


if __name__ == "__main__":
    for each, numbers in PROCESSES.items():
        for number in numbers:
            checks = run_script(each, number)
            print(f"{each} on {number}: {len(checks)} checks", flush=True)
            for check, said in checks.items():
                if said:
                    print(f"  {check}: {said}", flush=True)
    os._exit(0)
