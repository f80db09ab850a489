"""No method of the installed transformers that we leave as it is may need Hugging Face accelerate.

Walks the source of trainer.py, trainer_seq2seq.py and training_args.py. A method that reads a name which exists only
with accelerate, imports accelerate, or calls a function that does, must be overridden here or be excused below.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import transformers

from accel_trainer.trainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

pytestmark = pytest.mark.beside_accelerate

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES_PAGE = ROOT / "docs" / "trainer_overrides.md"

# Why a method may stay upstream's although it names something of accelerate.
EXCUSED = {
    "Trainer": {
        "train": "our train() hides auto_find_batch_size; without it find_executable_batch_size only binds arguments",
        "_hp_search_setup": "only under is_deepspeed_enabled, for which our hyperparameter_search() refuses",
        "_load_from_checkpoint": "our override calls it for one process and DDP only",
        "_load_best_model": "our override calls it for one process and DDP only",
        "_load_optimizer_and_scheduler": "our override calls it for one process and DDP only",
        "_evaluate": "our override hides auto_find_batch_size, under which should_reduce_batch_size is named",
    },
    "Seq2SeqTrainer": {},
    "TrainingArguments": {
        "__post_init__": "our override hides DeepSpeed from it, and builds the AcceleratorConfig itself",
        "to_dict": "our override turns an AcceleratorConfig into a dict",
        "_apply_legacy_fsdp_to_config": "called by upstream's _process_fsdp_args only, which we replace",
    },
    "Seq2SeqTrainingArguments": {},
}

OWN_METHODS = {
    "arguments_class", "_resuming",
    "begin_decisions", "end_decisions", "is_preempted_in_evaluation", "save_and_call_back", "save_and_end",
    "_finish_boundary",
    "_signals_to_note", "_check_run", "_update_batch", "order_batch",
    "begin_local_updates", "end_local_updates", "mean_of_replicas", "averaged_weights", "resume_running_loss",
    "roll_back", "finish_save", "_end_save", "_call_back",
}  # fmt: skip

PAIRS = [
    (Trainer, transformers.Trainer),
    (Seq2SeqTrainer, transformers.Seq2SeqTrainer),
    (TrainingArguments, transformers.TrainingArguments),
    (Seq2SeqTrainingArguments, transformers.Seq2SeqTrainingArguments),
]


@functools.cache
def tree_of(module: Any) -> ast.Module:
    return ast.parse(Path(inspect.getsourcefile(module)).read_text(encoding="utf-8"))


def is_accelerate(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").split(".")[0] == "accelerate"
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "accelerate" for alias in node.names)


def imported_names(nodes: list[ast.AST]) -> set[str]:
    return {alias.asname or alias.name for node in nodes for alias in getattr(node, "names", [])}


def conditional_names(module: Any) -> set[str]:
    """Names that the module has only where accelerate is installed."""
    guarded: set[str] = set()
    for node in tree_of(module).body:
        if isinstance(node, ast.If) and "is_accelerate_available" in ast.unparse(node.test):
            only_with = imported_names(
                [item for item in ast.walk(node) if isinstance(item, (ast.ImportFrom, ast.Import))]
            )
            without = {
                target.id
                for item in node.orelse
                if isinstance(item, ast.Assign)
                for target in item.targets
                if isinstance(target, ast.Name)
            }
            guarded |= only_with - without
    # transformers' own AcceleratorConfig does not need accelerate; training_args only imports it beside.
    return guarded


@functools.cache
def needs_accelerate(function: ast.AST) -> bool:
    """Whether a function imports accelerate, or says that it requires it."""
    for node in ast.walk(function):
        if is_accelerate(node):
            return True
        if (
            isinstance(node, ast.Call)
            and "requires_backends" in ast.unparse(node.func)
            and "accelerate" in ast.unparse(node)
        ):
            return True
    return False


@functools.cache
def helpers_that_need_accelerate(module: Any) -> set[str]:
    """Functions of transformers, imported by the module, whose own body reaches for accelerate."""
    found = set()
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        try:
            source = importlib.import_module("." * node.level + (node.module or ""), module.__package__)
            functions = {item.name: item for item in tree_of(source).body if isinstance(item, ast.FunctionDef)}
        except (ImportError, OSError, TypeError):
            continue
        found |= {a.asname or a.name for a in node.names if a.name in functions and needs_accelerate(functions[a.name])}
    return found


@functools.cache
def offenders(upstream: type) -> dict[str, set[str]]:
    """Methods of `upstream` by name, each with what it needs of accelerate."""
    module = importlib.import_module(upstream.__module__)
    suspicious = conditional_names(module) | helpers_that_need_accelerate(module)
    body = next(
        node for node in tree_of(module).body if isinstance(node, ast.ClassDef) and node.name == upstream.__name__
    )
    found: dict[str, set[str]] = {}
    for method in [node for node in body.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        names = {n.id for part in method.body for n in ast.walk(part) if isinstance(n, ast.Name)} & suspicious
        if needs_accelerate(method):
            names.add("accelerate")
        if names:
            found[method.name] = names
    return found


def is_overridden(ours: type, name: str) -> bool:
    owner = next(cls for cls in ours.__mro__ if name in vars(cls))
    return owner.__module__.startswith("accel_trainer.")


@pytest.mark.parametrize(("ours", "upstream"), PAIRS, ids=[pair[1].__name__ for pair in PAIRS])
def test_every_method_that_needs_accelerate_is_overridden_or_excused(ours, upstream):
    needing = offenders(upstream)

    left = {
        name: sorted(needs)
        for name, needs in needing.items()
        if not is_overridden(ours, name) and name not in EXCUSED[upstream.__name__]
    }

    assert not left, f"transformers {transformers.__version__}: override or excuse {left}"


def test_the_walk_finds_what_it_is_for():
    needing = offenders(transformers.Trainer)

    assert {
        "create_accelerator_and_postprocess",
        "_build_accelerator_args",
        "_run_epoch",
        "training_step",
    } <= needing.keys()
    assert {"_setup_devices", "_process_fsdp_args", "parallel_mode"} <= offenders(transformers.TrainingArguments).keys()


def super_calls(module: Any) -> set[str]:
    """Methods that our code calls on `super()`."""
    return {
        node.func.attr
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "super()"
    }


def test_an_override_that_calls_what_needs_accelerate_is_excused():
    import accel_trainer.trainer.arguments.training_arguments as arguments_module
    import accel_trainer.trainer.checkpoint.resuming as resuming_module
    import accel_trainer.trainer.checkpoint.saving as saving_module
    import accel_trainer.trainer.trainer as trainer_module

    for module, upstream in (
        (resuming_module, transformers.Trainer),
        (saving_module, transformers.Trainer),
        (trainer_module, transformers.Trainer),
        (arguments_module, transformers.TrainingArguments),
    ):
        reached = offenders(upstream).keys() & super_calls(module)
        assert reached <= EXCUSED[upstream.__name__].keys(), f"super() reaches accelerate in {reached}"


def test_every_override_is_a_method_of_the_installed_class():
    ours = {
        name
        for mixin in Trainer.__mro__[1:3]
        for name, value in vars(mixin).items()
        if callable(value) and not name.startswith("__")
    }

    missing = {name for name in ours if not hasattr(transformers.Trainer, name)}

    assert not missing - OWN_METHODS, f"transformers {transformers.__version__} has no {missing}: nobody calls them"


def methods_of(classes: list[type]) -> set[str]:
    kinds = (FunctionType, property, classmethod, staticmethod)
    return {name for each in classes for name, value in vars(each).items() if isinstance(value, kinds)}


def test_the_page_of_overrides_is_the_class():
    text = OVERRIDES_PAGE.read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    rows = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    ours = methods_of([each for each in Seq2SeqTrainer.__mro__ if each.__module__.startswith("accel_trainer.")])
    upstream = methods_of([each for each in transformers.Seq2SeqTrainer.__mro__ if each is not object])

    assert len(rows) == len(set(rows))
    assert not ours & upstream - set(rows), "give each a row: why, and which public hook there is"
    # A release may lack some of upstream's, which the test above names: a row needs a method of ours in any case.
    assert not set(rows) - ours, "rows of methods that are gone"
    assert f"{len(rows)} methods, {sum(name.startswith('_') and name != '__init__' for name in rows)} of them" in text


def test_overrides_take_what_upstream_passes():
    for name in (
        "train",
        "_run_epoch",
        "_prepare_for_training",
        "_init_training_state",
        "set_initial_training_values",
        "evaluation_loop",
        "save_model",
        "training_step",
        "_evaluate",
    ):
        ours = list(inspect.signature(getattr(Trainer, name)).parameters)
        theirs = list(inspect.signature(getattr(transformers.Trainer, name)).parameters)
        assert ours == theirs, name


def test_our_code_never_imports_accelerate():
    imports = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "accel_trainer").rglob("*.py")
        if re.search(r"(from|import)\b.*\baccelerate\b", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if is_accelerate(node)
    ]

    assert not imports
