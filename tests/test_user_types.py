"""A user's script under a type checker: mistakes are found, and names have the types that they have."""

from __future__ import annotations

import ast
import fcntl
import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import transformers

import accel_trainer

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".mypy_cache" / "user_script"  # reading transformers takes mypy half a minute the first time

# Behind `#`: a part of the error that mypy reports on that line, or of the type that it reveals.
SCRIPT = """\
from accel_trainer import Accelerator, Seq2SeqTrainer, Trainer, TrainingArguments
from accel_trainer import Acelerator  # error: has no attribute "Acelerator"
from accel_trainer.state import PartialStat  # error: has no attribute "PartialStat"
from accel_trainer.utils import DeepSpeedPlugin, ProjectConfiguration, gather, set_seed
from accel_trainer.utils import gahter  # error: has no attribute "gahter"
from accel_trainer.utils.dataclasses import KwargsHandler, PrecisionType
from accel_trainer.utils.environment import check_os_kernel
from accel_trainer.utils.imports import is_torch_version
from accel_trainer.utils.imports import is_torch_verson  # error: has no attribute "is_torch_verson"

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
Accelerator(mixed_precison="bf16")  # error: Unexpected keyword argument "mixed_precison"
Accelerator(mixed_precision="bf17")  # error: incompatible type "Literal['bf17']"
accelerator.bakward(1)  # error: has no attribute "bakward"
accelerator.wait_for_everyone(1)  # error: Too many arguments
reveal_type(accelerator)  # type: accel_trainer.accelerator.accelerator.Accelerator
reveal_type(accelerator.num_processes)  # type: int
reveal_type(accelerator.clip_grad_norm_)  # type: Tensor

arguments = TrainingArguments(output_dir="run", fsdp="full_shard", fsdp_config="fsdp.yaml", on_save_error="warn")
TrainingArguments(output_dir="run", fdsp="full_shard")  # error: Unexpected keyword argument "fdsp"
TrainingArguments(output_dir="run", on_save_error="ignore")  # error: incompatible type "Literal['ignore']"
reveal_type(arguments)  # type: TrainingArguments
reveal_type(arguments.learning_rate)  # type: float

trainer = Trainer(model="path/or/name", args=arguments, train_dataset=[], compute_metrics=None)
Trainer(args=arguments, train_datset=[])  # error: Unexpected keyword argument "train_datset"
Seq2SeqTrainer(args=arguments, train_datset=[])  # error: Unexpected keyword argument "train_datset"
reveal_type(trainer)  # type: accel_trainer.trainer.trainer.Trainer
reveal_type(trainer.accelerator)  # type: accel_trainer.accelerator.accelerator.Accelerator
trainer.trian()  # error: has no attribute "trian"

ProjectConfiguration(totl_limit=1)  # error: Unexpected keyword argument "totl_limit"
DeepSpeedPlugin(zero_stag=2)  # error: Unexpected keyword argument "zero_stag"
set_seed("zero")  # error: incompatible type "str"; expected "int"
reveal_type(set_seed)  # type: def (seed: int
reveal_type(gather)  # type: def (
"""


def read_script() -> str:
    """Return mypy's report on the script; transformers and torch are followed, as at a user's."""
    CACHE.mkdir(parents=True, exist_ok=True)
    options = ("--config-file=", "--ignore-missing-imports", f"--cache-dir={CACHE}")
    # One reads transformers, whichever process of the tests begins; the others find it in the cache.
    with open(CACHE / "lock", "w") as lock, tempfile.TemporaryDirectory() as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(folder, "script.py").write_text(SCRIPT)
        check = subprocess.run(
            [sys.executable, "-m", "mypy", *options, "script.py"],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    return check.stdout + check.stderr


@pytest.fixture(scope="module")
def reported() -> dict[int, list[str]]:
    """Everything that mypy says of the script, by line."""
    output = read_script()
    said: dict[int, list[str]] = {}
    for line in output.splitlines():
        if found := re.match(r"script\.py:(\d+): (?:error|note): (.*)", line):
            said.setdefault(int(found[1]), []).append(found[2])
    assert said, output
    return said


@pytest.mark.timeout(400)  # the first run of mypy reads transformers
@pytest.mark.parametrize(("number", "line"), list(enumerate(SCRIPT.splitlines(), 1)))
def test_a_type_checker_reports_each_mistake_and_nothing_else(number: int, line: str, reported: dict[int, list[str]]):
    _, _, expected = line.partition("  # ")
    kind, _, text = expected.partition(": ")
    said = reported.get(number, [])
    if not expected:
        assert said == []
    elif kind == "type":
        assert any(text in each and each.startswith("Revealed type") for each in said), said
        assert not any(each == 'Revealed type is "Any"' for each in said)
    else:
        assert any(text in each for each in said), said


def test_what_type_checkers_see_is_what_is_exported():
    stub = ast.parse(Path(accel_trainer.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == accel_trainer._EXPORTS


def test_the_trainers_typed_signature_is_upstreams():
    """What type checkers are told is not run: it is compared with the class that it stands for."""
    (trainer,) = (
        node
        for node in ast.parse((ROOT / "accel_trainer/trainer/trainer.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    typed, _ = (node for node in ast.walk(trainer) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    upstream = inspect.signature(transformers.Trainer.__init__).parameters
    assert [argument.arg for argument in typed.args.args] == list(upstream)
    defaults = [parameter.default for parameter in upstream.values() if parameter.default is not parameter.empty]
    assert [ast.literal_eval(default) for default in typed.args.defaults] == defaults
