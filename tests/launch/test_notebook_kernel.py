"""`notebook_launcher` in a real kernel: `make test-notebook` has what that takes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("nbclient") and find_spec("ipykernel")), reason="nbclient or ipykernel is missing"
    ),
]

CELLS = [
    """\
from accel_trainer import Accelerator, notebook_launcher
import torch

def train(scale):
    accelerator = Accelerator()
    for line in range(50):
        print("rank", accelerator.process_index, "line", line, "." * 40)
    values = accelerator.gather(torch.tensor([accelerator.process_index + 1.0]))
    return {"sum": float(values.sum()) * scale}
""",
    "print(notebook_launcher(train, (10,), num_processes=2, use_cpu=True))",
    """\
def fail():
    if Accelerator().process_index == 1:
        raise ValueError("this is rank 1")

notebook_launcher(fail, num_processes=2, use_cpu=True)
""",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, after a run of the notebook."""
    import nbformat.v4
    from nbclient import NotebookClient

    folder: Path = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True, resources=resources).execute()
    return [cell.outputs for cell in notebook.cells]


def text(outputs: list[dict[str, Any]]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def test_a_cell_shows_whole_lines_of_each_rank_and_the_value_of_rank_0(outputs: list[list[dict[str, Any]]]) -> None:
    lines = text(outputs[1]).splitlines()
    assert lines.pop() == "{'sum': 30.0}"
    expected = [f"rank {rank} line {line} {'.' * 40}" for rank in range(2) for line in range(50)]
    assert sorted(lines) == sorted(expected)


def test_the_traceback_of_a_failing_rank_is_in_the_cell(outputs: list[list[dict[str, Any]]]) -> None:
    [error] = [output for output in outputs[2] if output["output_type"] == "error"]
    assert error["ename"] == "ProcessGroupError"
    assert re.search(r"rank 1 of 2 failed, which ended the job.*ValueError: this is rank 1", error["evalue"], re.DOTALL)
