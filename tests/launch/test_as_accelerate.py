"""`--as_accelerate`: programs that import accelerate run on this package, metadata and their own children included."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_trainer import as_accelerate
from accel_trainer.launch.job import STAND_IN, with_stand_in
from tests import warm
from tests.launches import launch

VERSION = "1.15.0"
"""The release of `tests/migration/accelerate_1_15.json`, whose names are ours."""

SCRIPT = """
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch

import accelerate
import accelerate.big_modeling
import accelerate.data_loader
import accelerate.hooks
import sitecustomize
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.operations import gather

accelerator = accelerate.Accelerator(cpu=True)
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.arange(4.0)))
found = {
    "owner": type(accelerator).__module__,
    "versions": [accelerate.__version__, importlib.metadata.version("accelerate")],
    "same": [accelerate.state is sys.modules["accel_trainer.accelerator.shared_state"], "accel_trainer" in sys.modules],
    "rows": gather(torch.cat(list(loader))).tolist(),
    "kind": accelerator.distributed_type is DistributedType.MULTI_CPU and PartialState().num_processes,
    "sitecustomize": sitecustomize.__file__,
}
if accelerator.is_main_process:
    from transformers.utils import is_accelerate_available

    found["is_available"] = is_accelerate_available()
    child = [sys.executable, "-c", "import accelerate; print(accelerate.__version__)"]
    found["version in a child"] = subprocess.run(child, capture_output=True, text=True).stdout.strip()
    found["messages"] = []
    for statement in json.loads(sys.argv[2]):
        try:
            exec(statement)
        except (ImportError, AttributeError) as error:
            found["messages"].append(f"{type(error).__name__}: {error}")
    found["has"] = [hasattr(accelerate, "no_such_name"), importlib.util.find_spec("accelerate.utils") is not None]
Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(found))
"""

MISSING = {
    "from accelerate import no_such_name": "ModuleNotFoundError: accelerate has no 'no_such_name' here",
    "from accelerate.utils import no_such_name": "ModuleNotFoundError: accelerate.utils has no 'no_such_name' here",
    "from accelerate.state import no_such_name": "ModuleNotFoundError: accelerate.state has no 'no_such_name' here",
    "import accelerate.test_utils.training": "ModuleNotFoundError: accelerate has no 'test_utils' here",
    "accelerate.no_such_name": "AttributeError: accelerate has no 'no_such_name' here",
    "from accelerate.utils import MegatronLMPlugin": "ImportError: accel_trainer.utils has no 'MegatronLMPlugin'",
}
"""Statements of a program, and how the message that it gets begins."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks of SCRIPT has found."""
    folder = tmp_path_factory.mktemp("found")
    (script := folder / "script.py").write_text(SCRIPT)
    (own := folder / "own").mkdir()
    (own / "sitecustomize.py").touch()
    env = {"PYTHONPATH": os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")])}
    words = ["--cpu", "--num_processes", "2", "--as_accelerate", str(script), str(folder), json.dumps([*MISSING])]
    code, output = launch(folder, *words, **env)
    assert code == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.multirank
def test_a_script_that_imports_accelerate_runs_on_two_ranks(found: list[dict[str, Any]]):
    for seen in found:
        assert seen["owner"].startswith("accel_trainer.")
        assert seen["versions"] == [VERSION] * 2
        assert seen["same"] == [True, True]
        assert seen["rows"] == [0.0, 2.0, 1.0, 3.0]
        assert seen["kind"] == 2
        assert Path(seen["sitecustomize"]).parent.name == "own"
    assert found[0]["is_available"] is True
    assert found[0]["version in a child"] == VERSION


def test_a_name_that_is_not_here_says_so_and_names_the_way_out(found: list[dict[str, Any]]):
    messages = found[0]["messages"]
    begins = [*MISSING.values()]
    assert [message[: len(text)] for message, text in zip(messages, begins, strict=True)] == begins
    for message in messages[:5]:
        assert "accelerate_names.md" in message
        assert "without --as_accelerate" in message
    assert found[0]["has"] == [False, True]


def test_a_program_runs_without_the_launcher(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(
        "import sys, accelerate; print(accelerate.__version__, *sys.argv[1:])"
    )
    command = [sys.executable, "-m", "accel_trainer.as_accelerate", str(script), "--lr", "1"]
    assert warm.run(command, capture_output=True, text=True, check=True).stdout == f"{VERSION} --lr 1\n"


def test_the_folder_comes_first_and_once():
    environ = with_stand_in(with_stand_in({"PYTHONPATH": "/some/folder", "OTHER": "1"}))

    assert environ == {"PYTHONPATH": os.pathsep.join([STAND_IN, "/some/folder"]), "OTHER": "1"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "usage: python -m accel_trainer.as_accelerate script.py|-m MODULE|COMMAND"),
        (["no_such.py"], "script 'no_such.py' does not exist"),
        (["no-such-command"], "program 'no-such-command' is not found or not executable"),
        (["-m", "no_such_module"], "module 'no_such_module' is not found"),
    ],
)
def test_a_program_that_is_not_there_is_named(words: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert as_accelerate.main(words) == 2
    assert text in capsys.readouterr().err
