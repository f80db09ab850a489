"""The test scripts inside accelerate run with this library in its place, and deviate where `differences.json` says."""

from __future__ import annotations

import pytest

from tests.migration.accelerate_scripts import NOT_RUN, PROCESSES, find_accelerate, run_script
from tests.migration.names import DIFFERENCES
from tests.ranks import preload

preload("accel_trainer.accelerator")

FOLDER = find_accelerate()
pytestmark = [
    pytest.mark.beside_accelerate,
    pytest.mark.multirank,
    pytest.mark.timeout(400),
    pytest.mark.skipif(FOLDER is None, reason="Hugging Face accelerate is not installed"),
]


def test_every_script_is_run_or_has_a_reason():
    assert FOLDER is not None
    scripts = FOLDER / "test_utils" / "scripts"
    names = {".".join(path.relative_to(scripts).with_suffix("").parts) for path in scripts.rglob("test_*.py")}
    assert names == {*PROCESSES, *NOT_RUN}


@pytest.mark.parametrize(
    ("script", "processes"), [(script, number) for script, numbers in PROCESSES.items() for number in numbers]
)
def test_a_script_deviates_where_it_is_listed(script: str, processes: int):
    found = run_script(script, processes)

    listed = [
        check
        for entry in DIFFERENCES["scripts"]
        if entry["script"] == script and processes in entry["processes"]
        for check in entry["checks"]
    ]
    # A text: pytest cuts the repr of anything else after 240 characters, and the stack of a script that hung with it.
    told = "\n".join(map(": ".join, found.items()))
    assert sorted(check for check, said in found.items() if said) == sorted(listed), told
    assert found
