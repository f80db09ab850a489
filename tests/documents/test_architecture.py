"""docs/architecture.md is true: its paths and names exist, and a traced run passes them in the order that it lists."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import accel_trainer
from accel_trainer import Accelerator, Trainer, TrainingArguments
from accel_trainer.config import resolve

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(accel_trainer.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()

# `data/loader.py`, `data/loader.py:PreparedDataLoader.__iter__`, `checkpoint/`, `docs/checkpoints.md`
_REFERENCE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+(?:\.(?:py|md|toml|yaml)|/))(?::([\w.]+))?`")
_STEP = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.M)


def find(path: str) -> Path | None:
    """A path of the page is relative to the package or to the repository."""
    return next((folder / path for folder in (PACKAGE, ROOT) if (folder / path).exists()), None)


def names_in(file: Path) -> set[str]:
    """Every class, function and method of a file by its qualified name, and the names assigned at its top."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield prefix + node.name
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield prefix + node.target.id

    return set(walk(ast.parse(file.read_text()).body, ""))


@pytest.mark.parametrize(("path", "name"), sorted(set(_REFERENCE.findall(PAGE))))
def test_what_the_page_names_exists(path: str, name: str):
    file = find(path)
    assert file is not None, f"docs/architecture.md names {path}, which does not exist"
    if name:
        assert name in names_in(file), f"docs/architecture.md names {name} in {path}, which has no such name"


def test_every_room_is_on_the_page():
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    rooms |= {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "integrations").rglob("__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    named = {path.rstrip("/") for path, _ in _REFERENCE.findall(PAGE)}
    assert sorted(rooms - named) == []
    assert sorted(modules - named) == []


def traced(function: Callable[[], object]) -> list[tuple[str, str]]:
    """The functions of the package that a call runs, in order: path below the package, and qualified name."""
    prefix, calls = f"{PACKAGE}{os.sep}", []

    def note(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            calls.append((frame.f_code.co_filename.removeprefix(prefix), frame.f_code.co_qualname))

    outer = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(outer)
    return calls


def steps(heading: str) -> list[tuple[str, str]]:
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return _STEP.findall(section)


def assert_in_order(listed: list[tuple[str, str]], calls: list[tuple[str, str]]) -> None:
    assert len(listed) >= 5
    position = 0
    for step in listed:
        assert step in calls, f"{step} does not run"
        assert step in calls[position:], f"{step} does not run after the step before it"
        position += calls[position:].index(step) + 1


class Run:
    """A small run on one process."""

    def __init__(self, folder: Path) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=folder)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.loader = DataLoader(TensorDataset(torch.arange(64.0).view(16, 4)), batch_size=2, shuffle=True)

    def prepare(self) -> None:
        prepared = self.accelerator.prepare(self.model, self.optimizer, self.loader, self.scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self) -> None:
        for (batch,) in self.loader:
            with self.accelerator.accumulate(self.model):
                outputs = self.model(batch)
                self.accelerator.backward(outputs.mean())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.accelerator.gather_for_metrics(outputs)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_prepare_passes_the_listed_files_in_order(run: Run):
    assert_in_order(steps("One `prepare`"), traced(run.prepare))


def test_a_batch_passes_the_listed_files_in_order(run: Run):
    run.prepare()
    assert_in_order(steps("One batch"), traced(run.train))


def test_a_save_and_a_load_pass_the_listed_files_in_order(run: Run, tmp_path: Path):
    run.prepare()
    run.train()
    assert_in_order(steps("One save"), traced(lambda: run.accelerator.save_state(tmp_path / "state")))
    assert_in_order(steps("One load"), traced(lambda: run.accelerator.load_state(tmp_path / "state")))


def test_a_configuration_file_passes_the_listed_files_in_order():
    file = ROOT / "fsdp_configs" / "accelerate_fsdp_bert.yaml"
    assert_in_order(steps("One configuration file"), traced(lambda: resolve(file=file)))


class _Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.linear(x)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def test_an_update_of_the_trainer_passes_the_listed_files_in_order(tmp_path: Path):
    samples = [{"x": torch.full((4,), float(index)), "labels": torch.ones(1)} for index in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, save_steps=1, report_to="none", disable_tqdm=True,
        gradient_accumulation_steps=2, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = Trainer(model=_Toy(), args=arguments, train_dataset=samples)
    assert_in_order(steps("One update of the Trainer"), traced(trainer.train))
