"""`--as_accelerate`: programs that import accelerate run on this package, metadata and their own children included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel_trainer import as_accelerate
from accel_trainer.launch.job import STAND_IN, with_stand_in
from tests.launches import launch

VERSION = "1.15.0"
"""The release of `tests/migration/accelerate_1_15.json`, whose names are ours."""

SCRIPT = """
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers.utils import is_accelerate_available

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
child = subprocess.run([sys.executable, "-c", "import accelerate; print(accelerate.__version__)"], capture_output=True)
found = {
    "owner": type(accelerator).__module__,
    "versions": [accelerate.__version__, importlib.metadata.version("accelerate"), child.stdout.decode().strip()],
    "is_available": is_accelerate_available(),
    "same": [accelerate.state is sys.modules["accel_trainer.accelerator.shared_state"], "accel_trainer" in sys.modules],
    "rows": gather(torch.cat(list(loader))).tolist(),
    "kind": accelerator.distributed_type is DistributedType.MULTI_CPU and PartialState().num_processes,
    "sitecustomize": sitecustomize.__file__,
}
Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(found))
"""

MISSING = """
import importlib.util

import accelerate

for statement in {statements!r}:
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error, sep=": ")
print([hasattr(accelerate, "no_such_name"), importlib.util.find_spec("accelerate.utils") is not None])
"""


@pytest.mark.multirank
def test_a_script_that_imports_accelerate_runs_on_two_ranks(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(SCRIPT)
    (own := tmp_path / "own").mkdir()
    (own / "sitecustomize.py").touch()
    env = {"PYTHONPATH": os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")])}

    code, output = launch(
        tmp_path, "--cpu", "--num_processes", "2", "--as_accelerate", str(script), str(tmp_path), **env
    )

    assert code == 0, output
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["owner"].startswith("accel_trainer.")
        assert found["versions"] == [VERSION] * 3
        assert found["is_available"] is True
        assert found["same"] == [True, True]
        assert found["rows"] == [0.0, 2.0, 1.0, 3.0]
        assert found["kind"] == 2
        assert found["sitecustomize"] == str(own / "sitecustomize.py")


def test_a_name_that_is_not_here_says_so_and_names_the_way_out(tmp_path: Path):
    statements = {
        "from accelerate import no_such_name": "ModuleNotFoundError: accelerate has no 'no_such_name' here",
        "from accelerate.utils import no_such_name": "ModuleNotFoundError: accelerate.utils has no 'no_such_name' here",
        "from accelerate.state import no_such_name": "ModuleNotFoundError: accelerate.state has no 'no_such_name' here",
        "import accelerate.test_utils.training": "ModuleNotFoundError: accelerate has no 'test_utils' here",
        "accelerate.no_such_name": "AttributeError: accelerate has no 'no_such_name' here",
        "from accelerate.utils import MegatronLMPlugin": "ImportError: accel_trainer.utils has no 'MegatronLMPlugin'",
    }
    (script := tmp_path / "script.py").write_text(MISSING.format(statements=list(statements)))
    command = [sys.executable, "-m", "accel_trainer.as_accelerate", str(script)]

    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert [line[: len(text)] for line, text in zip(lines, statements.values(), strict=False)] == [*statements.values()]
    assert [
        line for line in lines[:5] if "accelerate_names.md" not in line or "without --as_accelerate" not in line
    ] == []
    assert lines[6:] == ["[False, True]"]


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
