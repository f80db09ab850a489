"""No branch outside the engines' own rooms asks which engine runs: it asks for a capability, or calls the contract."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_ENGINE = re.compile(r"deepspeed|fsdp|ddp|DistributedDataParallel|zero[_-]?[123]", re.IGNORECASE)
# The engines, what was asked of them, who starts them, and what plans or converts what is asked for.
_ROOMS = re.compile(r"config/|launch/|contrib/|.*(deepspeed|fsdp|ddp|comm_hooks)")

# Facts about a model or an option under an engine's name, by file and function, each with its reason.
ALLOWED = {
    ("checkpoint/weights/into_model.py", "_copy_of"): "FSDP2 puts a class of its own before the module's",
    ("runtime/model_wrappers.py", "_holds_replica"): "models that the user has wrapped",
    ("trainer/preparation.py", "_resolve_for_model"): "transformers' default of ddp.find_unused_parameters",
}


def conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def branches(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The name of the function, and the text, of every condition that names an engine."""
    owners: dict[ast.AST, str] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            owners.update(dict.fromkeys(ast.walk(function), function.name))  # the innermost one comes last
    for node in ast.walk(tree):
        for test in conditions(node):
            if _ENGINE.search(text := ast.unparse(test)):
                yield owners.get(node, ""), text


def found() -> dict[tuple[str, str], str]:
    package = ROOT / "accel_trainer"
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    return {
        (name, function): text
        for name, path in files.items()
        if not _ROOMS.match(name) and not name.startswith(("integrations/", "fsdp_configs/"))
        if _ENGINE.search(source := path.read_text())
        for function, text in branches(ast.parse(source))
    }


def test_branches_on_an_engine_stand_in_its_room_and_every_exception_is_still_needed():
    places = found()
    unexpected = {place: text for place, text in places.items() if place not in ALLOWED}
    assert unexpected == {}, "ask for a fact of `Capabilities`, or add a method to the contract in strategies/api.py"
    assert sorted(set(ALLOWED) - set(places)) == []


def test_a_branch_on_an_engine_is_seen():
    tree = ast.parse("def f(x):\n    def g():\n        return 1 if x.is_deepspeed_enabled else 2\n    return g\n")
    assert list(branches(tree)) == [("g", "x.is_deepspeed_enabled")]
