"""A script's lines against this package: its syntax tree is read, and nothing of it is run or imported.

Names that are not here have a reason in `differences.json`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import accel_trainer
from accel_trainer.contrib.check.changes import CHANGES, Change, Verdict
from accel_trainer.errors import did_you_mean
from accel_trainer.unsupported import REFUSED_OPTIONS

_SCHEDULER = re.compile(r"(LR|Scheduler|ReduceLROnPlateau)$|^get_\w*sched")
_SCHEDULE = "schedule"
"""The class, for us, of anything that is one."""
_OWN_ATTRIBUTES = {("Accelerator", "state"): "AcceleratorState", ("Accelerator", "gradient_state"): "GradientState"}
_OTHER_TRAINERS = ("trl", "sentence_transformers", "setfit", "peft", "optimum")


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict on a line."""

    file: str
    line: int
    verdict: Verdict
    words: str
    instead: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.verdict}: {self.words}" + f" -> {self.instead}" * bool(self.instead)


class Script:
    """One file, its names and the classes of its variables, as far as assignments tell."""

    def __init__(self, file: str, text: str, *, compat: bool = False) -> None:
        self.file = file
        self.tree = ast.parse(text, file)
        self.compat = compat
        self.findings: list[Finding] = []
        self.origins: dict[str, str] = {}
        """Dotted names of other packages, by the script's own."""
        self.classes: dict[str, str] = {}
        """Names of our classes by the expression that is an instance, or a subclass, of one."""
        self._is_made: dict[str, bool] = {}
        """Whether calls' results are all that a variable is given."""
        self._prepared: set[str] = set()
        """Variables that a `prepare` gets, or that hold what it gets; `*` where it gets a list's items."""
        for node in ast.walk(self.tree):
            self._take_import(node)
        for node in ast.walk(self.tree):
            self._take_class(node)
        self.is_concerned = any(belongs_here(origin) for origin in self.origins.values())

    # --- names -----------------------------------------------------------------------------------------------------

    def _take_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.origins[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self.origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _take_class(self, node: ast.AST) -> None:
        """Note the class of a variable, an argument or a subclass."""
        if isinstance(node, ast.ClassDef):
            found = next(filter(None, map(self._class_named, node.bases)), "")
            if found:
                self.classes[node.name] = found
        elif isinstance(node, ast.arg) and node.annotation is not None:
            self._note(node.arg, self._class_named(node.annotation))
        elif isinstance(node, ast.AnnAssign):
            self._note(ast.unparse(node.target), self._class_named(node.annotation))
        elif isinstance(node, ast.Assign):
            self._take_assignment(node)
        elif isinstance(node, ast.Call) and _is_prepare(node.func):
            for each in [*node.args, *node.keywords]:
                self._prepared |= {"*"} if isinstance(each, ast.Starred) else _variables(each)

    def _take_assignment(self, node: ast.Assign) -> None:
        functions = [each.func if isinstance(each, ast.Call) else None for each in _alternatives(node.value)]
        for target in node.targets:
            name = ast.unparse(target)
            self._is_made[name] = self._is_made.get(name, True) and None not in functions
            for function in functions:
                if not isinstance(target, ast.Tuple):
                    self._note(name, "" if function is None else self._class_named(function))
                elif isinstance(function, ast.Attribute) and function.attr == "prepare":
                    for each in target.elts:  # a DummyScheduler comes back as another thing
                        self._note(ast.unparse(each), "")

    def _note(self, expression: str, cls: str) -> None:
        """Note the class of a variable; of one that gets several, schedules and the Accelerator are told apart."""
        if self.classes.get(expression, cls) == cls or cls in (_SCHEDULE, "Accelerator"):
            self.classes[expression] = cls
        elif self.classes[expression] not in (_SCHEDULE, "Accelerator"):
            self.classes[expression] = ""

    def _class_named(self, node: ast.expr) -> str:
        """Return our class, or `schedule`, that an expression names; empty where it names neither."""
        origin = self.origin(node)
        name = origin.rpartition(".")[2] or ast.unparse(node).rpartition(".")[2]
        if belongs_here(origin):
            return name if isinstance(find(origin), type) else ""
        return self.classes.get(name, "") or (_SCHEDULE if _SCHEDULER.search(name) else "")

    def origin(self, node: ast.expr) -> str:
        """Return the dotted name of an imported object that an expression names; empty for others."""
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, "")
        if isinstance(node, ast.Attribute):
            before = self.origin(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def class_of(self, node: ast.expr) -> str:
        """Return the class of ours that an expression is an instance of, by name; empty where nothing tells."""
        text = ast.unparse(node)
        if text in self.classes and self.classes[text] != text:
            return self.classes[text]
        if text.rpartition(".")[2] == "accelerator" and self.is_concerned and not self.origin(node):
            return "Accelerator"
        if isinstance(node, ast.Attribute):
            return _OWN_ATTRIBUTES.get((self.class_of(node.value), node.attr), "")
        return ""

    # --- verdicts --------------------------------------------------------------------------------------------------

    def judge(self) -> list[Finding]:
        """Return a verdict for each line that has to do with this package, in the order of the lines."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self._judge_import(node)
            elif isinstance(node, ast.ImportFrom):
                self._judge_names(node)
            elif isinstance(node, ast.Call):
                self._judge_call(node)
            elif isinstance(node, ast.Attribute):
                self._judge_attribute(node)
            elif isinstance(node, ast.ClassDef):
                self._judge_class(node)
        unique = dict.fromkeys(self.findings)
        failing = {each.line for each in unique if each.verdict is Verdict.REPLACE}
        # A line that fails does not work besides.
        kept = [each for each in unique if not (each.verdict is Verdict.WORKS and each.line in failing)]
        return sorted(kept, key=lambda each: each.line)

    def _add(self, node: ast.AST, verdict: Verdict, words: str, instead: str = "") -> None:
        self.findings.append(Finding(self.file, getattr(node, "lineno", 1), verdict, words, instead))

    def _judge_import(self, node: ast.Import) -> None:
        for alias in node.names:
            root, _, rest = alias.name.partition(".")
            if root == "accelerate":
                name = alias.asname or (alias.name if not rest else "")
                own = f"import accel_trainer{'.' * bool(rest)}{rest}"
                self._add(node, Verdict.IMPORT, f"import {alias.name}", f"{own} as {name}" if name else own)

    def _judge_names(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        root, _, rest = module.partition(".")
        if node.level or root not in ("accelerate", "accel_trainer", "transformers", *_OTHER_TRAINERS):
            return
        names = [alias for alias in node.names if self._judge_name(node, module, alias)]
        if not names:
            return
        words = ast.unparse(ast.ImportFrom(module, names, 0))
        if root == "accel_trainer":
            self._add(node, Verdict.WORKS, words)
            return
        target = ".".join(["accel_trainer", *([rest] if rest and root != "transformers" else [])])
        self._add(node, Verdict.IMPORT, words, ast.unparse(ast.ImportFrom(target, names, 0)))

    def _judge_name(self, node: ast.AST, module: str, alias: ast.alias) -> bool:
        """Whether an imported name is one of ours; one that is not here gets its verdict."""
        origin = f"{module}.{alias.name}"
        if module.partition(".")[0] in _OTHER_TRAINERS:
            if alias.name.endswith("Trainer"):
                own = f"class {alias.name}({origin}, accel_trainer.Trainer)"
                self._add(node, Verdict.IMPORT, f"{origin} runs on transformers' own Trainer", own)
            return False
        if not belongs_here(origin):
            return False
        if alias.name == "*":
            return True
        found = find(origin)
        if isinstance(found, Missing):
            self._add(node, Verdict.REPLACE, f"{origin} is not here: {found.reason}")
            return False
        return True

    def _judge_call(self, node: ast.Call) -> None:
        key, found, is_method = self._called(node.func)
        if not key or isinstance(found, Missing | ModuleType):
            return
        refused = found is not None and [
            *self._refused(node, key, found, is_method=is_method),
            *self._never_prepared(node, key),
        ]
        for words in refused or ():
            self._add(node, Verdict.REPLACE, words)
        changed = self._changes_of(node, key)
        for change in changed:
            self._add_change(node, key, change)
        if not refused and not changed and found is not None:
            self._add(node, Verdict.WORKS, f"{key}()")

    def _changes_of(self, node: ast.Call, key: str) -> list[Change]:
        calls = _keys(key)
        if key == "Accelerator.prepare" and any(self._class_named_or_of(each) == _SCHEDULE for each in node.args):
            calls.add("Accelerator.prepare_scheduler")
        return [change for change in CHANGES if change.call in calls and _applies(change, node)]

    def _class_named_or_of(self, node: ast.expr) -> str:
        return self.class_of(node) or (self._class_named(node.func) if isinstance(node, ast.Call) else "")

    def _add_change(self, node: ast.AST, key: str, change: Change) -> None:
        if change.by_compat and self.compat:
            self._add(node, Verdict.WORKS, f"{key}(): {change.by_compat} as there, by compat")
            return
        ways = [change.instead, "compat"] if change.by_compat else [change.instead]
        self._add(node, change.verdict, f"{key}(): {change.words}", ", or ".join(ways))

    def _called(self, function: ast.expr) -> tuple[str, Any, bool]:
        """Return a call's name, our object for it, and whether it is a method of an instance."""
        origin = self.origin(function)
        if belongs_here(origin):
            owner, _, name = origin.rpartition(".")
            cls = find(owner) if belongs_here(owner) else None
            return (f"{cls.__name__}.{name}" if isinstance(cls, type) else name), find(origin), False
        if origin:
            name = origin.rpartition(".")[2]
            return (name, None, False) if any(change.call == name for change in CHANGES) else ("", None, False)
        if isinstance(function, ast.Name) and function.id in self.classes:
            return self.classes[function.id], None, False  # a subclass, whose arguments are its own
        if not isinstance(function, ast.Attribute):
            return "", None, False
        owner = self.class_of(function.value)
        cls = _class(owner)
        if cls is None:
            return "", None, False
        found = getattr(cls, function.attr, None)
        return (
            f"{owner}.{function.attr}",
            found,
            not isinstance(inspect.getattr_static(cls, function.attr, None), staticmethod),
        )

    def _refused(self, node: ast.Call, key: str, found: Any, *, is_method: bool) -> Iterator[str]:
        """Yield the arguments of a call that our object does not take."""
        own = parameters_of(found, is_method=is_method)
        if own is None:
            return
        yield from _refused_keywords(node, key, own)
        positional = [each for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        takes_many = any(each.kind is each.VAR_POSITIONAL for each in own)
        has_star = any(isinstance(each, ast.Starred) for each in node.args)
        if len(node.args) > len(positional) and not takes_many and not has_star:
            yield f"{key}() takes {len(positional)} positional arguments, and {len(node.args)} are given"

    def _never_prepared(self, node: ast.Call, key: str) -> Iterator[str]:
        """Yield the models of an `accumulate` that this file makes, and gives to no `prepare`."""
        names = {each.id for each in node.args if isinstance(each, ast.Name)} if key == "Accelerator.accumulate" else ()
        for name in sorted(names):
            if self._is_made.get(name) and not self._prepared & {name, "*"}:
                yield f"{key}({name}): no prepare() of this file gets {name}, and prepared models are what it takes"

    def _judge_attribute(self, node: ast.Attribute) -> None:
        origin = self.origin(node)
        if belongs_here(origin):
            self._judge_dotted(node, origin)
            return
        owner = self.class_of(node.value)
        cls = _class(owner)
        if cls is None or isinstance(node.ctx, ast.Store) or takes_any(cls) or node.attr in attributes_of(cls):
            return
        if self._defines(ast.unparse(node.value), node.attr):
            return
        reasons = [
            reason for path, reason in differences()["attributes"].items() if path.endswith(f".{owner}.{node.attr}")
        ]
        reason = reasons[0] if reasons else f"there is no such name{did_you_mean(node.attr, attributes_of(cls))}"
        self._add(node, Verdict.REPLACE, f"{owner}.{node.attr} is not here: {reason}")

    def _defines(self, owner: str, name: str) -> bool:
        """Whether the script itself gives an attribute to objects of that kind: by assignment, or in a subclass."""
        is_subclass = any(
            isinstance(node, ast.ClassDef) and node.name in self.classes and name in _names_in(node)
            for node in ast.walk(self.tree)
        )
        return is_subclass or any(
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
            for node in ast.walk(self.tree)
        )

    def _judge_dotted(self, node: ast.Attribute, origin: str) -> None:
        """Judge `accelerate.utils.name`, or `transformers.Trainer`, where it is written out."""
        if origin.partition(".")[0] == "transformers":
            self._add(node, Verdict.IMPORT, origin, f"accel_trainer.{node.attr}")
            return
        before, found = find(origin.rpartition(".")[0]), find(origin)
        is_of_class = isinstance(before, type) and node.attr in attributes_of(before)
        if isinstance(found, Missing) and not isinstance(before, Missing) and not is_of_class:
            self._add(node, Verdict.REPLACE, f"{origin} is not here: {found.reason}")

    def _judge_class(self, node: ast.ClassDef) -> None:
        """Judge the methods of a subclass of our Trainer that take the place of ours."""
        if self.classes.get(node.name) not in trainer_names():
            return
        cls = _class(self.classes[node.name])
        assert cls is not None
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            owners = [base.__module__.partition(".")[0] for base in cls.__mro__ if method.name in vars(base)]
            if owners[:1] != ["accel_trainer"] or _extends(method):
                continue
            name = f"{node.name}.{method.name}"
            if owners[-1] == "accel_trainer" and not method.name.startswith("__"):
                self._add(method, Verdict.REPLACE, f"{name}: the Trainer here has that name for itself", "another name")
            elif method.name == "_build_accelerator_args":
                self._add(method, Verdict.REPLACE, f"{name}: nobody calls it here", "options of TrainingArguments")
            else:
                words = f"{name} takes the place of the Trainer's own, which does more: docs/trainer_overrides.md"
                self._add(method, Verdict.CHANGES, words, f"what it adds around super().{method.name}()")


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return what `a if condition else b` may give; for other expressions themselves."""
    return [*_alternatives(node.body), *_alternatives(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _refused_keywords(node: ast.Call, key: str, own: Sequence[inspect.Parameter]) -> Iterator[str]:
    names = [each.name for each in own if each.kind is not each.POSITIONAL_ONLY]
    takes_any_keyword = any(each.kind is each.VAR_KEYWORD for each in own)
    for keyword in node.keywords:
        is_none = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
        if key == "Accelerator" and keyword.arg in REFUSED_OPTIONS and not is_none:
            yield f"Accelerator({keyword.arg}=...) is {REFUSED_OPTIONS[keyword.arg]}, which is not offered"
        elif keyword.arg and keyword.arg not in names and not takes_any_keyword:
            yield f"{key}() takes no argument {keyword.arg}{did_you_mean(keyword.arg, names)}"


def _class(name: str) -> Any:
    """Return our class of that name; None for others, and for schedules."""
    if not name or name == _SCHEDULE:
        return None
    found = find(f"accel_trainer.{name}")
    found = find(f"accel_trainer.utils.{name}") if isinstance(found, Missing) else found
    found = find(f"accel_trainer.tracking.{name}") if isinstance(found, Missing) else found
    return found if isinstance(found, type) else None


def _keys(key: str) -> set[str]:
    """Return the names under which changes of a call are listed: those of a subclass's base, too."""
    owner, dot, method = key.rpartition(".")
    return {key, key.replace("Seq2Seq", "")} | ({f"{owner.replace('Seq2Seq', '')}.{method}"} if dot else set())


def _applies(change: Change, node: ast.Call) -> bool:
    name, _, value = change.keyword.partition("=")
    if not name:
        return True
    given = next((keyword.value for keyword in node.keywords if keyword.arg == name), None)
    return given is not None and (not value or ast.unparse(given) == value)


def _is_prepare(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in ("prepare", "prepare_model")


def _variables(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _extends(method: ast.FunctionDef) -> bool:
    """Whether a method calls the one that it overrides."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == method.name and ast.unparse(node.value).startswith("super(")
        for node in ast.walk(method)
    )


def _names_in(node: ast.ClassDef) -> set[str]:
    return {name for each in node.body if (name := getattr(each, "name", None))} | {
        ast.unparse(target) for each in node.body if isinstance(each, ast.Assign) for target in each.targets
    }


# --- our objects by the names that scripts have for them --------------------------------------------------------------


DIFFERENCES_FILE = Path(__file__).with_name("differences.json")
PEERS = ("accelerate", "transformers")
_NOT_PUBLIC = {
    "test_utils.*": "they are for accelerate's own tests; a library whose tests use them installs accelerate for that"
}


@functools.cache
def differences() -> dict[str, dict[str, str]]:
    """Return our reasons: by `absent`, `different` or `attributes`, then by `module.name` of accelerate."""
    content: dict[str, dict[str, str]] = json.loads(DIFFERENCES_FILE.read_text(encoding="utf-8"))
    return content


@functools.cache
def trainer_names() -> frozenset[str]:
    """Return the names of transformers that have a class of ours in their place."""
    names = vars(accel_trainer)["__all__"]  # its stub has none
    return frozenset(name for name in names if name.endswith(("Trainer", "TrainingArguments")))


def belongs_here(origin: str) -> bool:
    """Whether a dotted name of a script, `accelerate.utils.set_seed`, is of a package that ours takes the place of."""
    root, _, rest = origin.partition(".")
    if root == "transformers":
        return rest.rpartition(".")[2] in trainer_names()
    return root in ("accelerate", "accel_trainer")


@dataclass(frozen=True, slots=True)
class Missing:
    """A name that is not here, and why."""

    reason: str


@functools.cache
def find(origin: str) -> Any:
    """Return our object for a dotted name, or a `Missing`."""
    root, _, rest = origin.partition(".")
    if root == "transformers":
        return getattr(accel_trainer, rest.rpartition(".")[2])
    found: Any = accel_trainer
    parts = rest.split(".") if rest else []
    for index, name in enumerate(parts):
        path = ".".join(parts[: index + 1])
        try:
            found = getattr(found, name)
            continue
        except (AttributeError, ImportError) as error:
            hint = str(error).partition(f"has no {name!r}: ")[2]
        try:
            found = importlib.import_module(f"accel_trainer.{path}")
        except ImportError as error:
            if not (error.name or "").startswith("accel_trainer"):
                return object()  # a module of ours, for a library that this environment lacks
            return Missing(hint or reason_of(path) or _not_known(found, name))
    return found


def reason_of(path: str) -> str:
    """Return why a name of accelerate's is not here, by itself or with its whole module."""
    known = differences()["absent"] | _NOT_PUBLIC
    if path in known:
        return known[path]
    while path and f"{path}.*" not in known:
        path = path.rpartition(".")[0]
    return known.get(f"{path}.*", "")


def _not_known(owner: Any, name: str) -> str:
    names = dir(owner) if isinstance(owner, ModuleType) else attributes_of(owner)
    return f"there is no such name here{did_you_mean(name, names)}"


@functools.cache
def attributes_of(cls: Any) -> frozenset[str]:
    """Return the attributes of a class and of its instances, those that its methods assign included."""
    names = set(dir(cls))
    for base in getattr(cls, "__mro__", ()):
        names |= set(getattr(base, "__annotations__", ()))
        if base.__module__.partition(".")[0] in ("accel_trainer", *PEERS):
            names |= _assigned(base)
    return frozenset(names)


def _assigned(cls: type) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made at run time
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def takes_any(cls: Any) -> bool:
    """Whether attributes of an object are those of another one, which its class does not show."""
    return any("__getattr__" in vars(base) for base in getattr(cls, "__mro__", ()))


def parameters_of(function: Any, *, is_method: bool = False) -> list[inspect.Parameter] | None:
    """Return the parameters of a call, without `self`; None where Python does not know them."""
    try:
        own = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return own[1:] if is_method and own else own
