"""YAML and JSON as data only, with line numbers: no tags, no duplicate keys, no alias that expands without bound.

Scalars are read as people write them: `1e-5` is a number, `010` and `1:30` are not silently octal and sexagesimal,
dates stay text. `yes`, `no`, `on` and `off` are booleans, as every file written for YAML 1.1 expects.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import yaml

from accel_trainer.config.document import MAX_DEPTH, MAX_NODES, Document, Key, Node, document_from_mapping
from accel_trainer.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_BOOL = re.compile(r"(?i:yes|no|on|off|true|false)")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?i:inf)|\.(?i:nan)"
)
_NULL = re.compile(r"~|(?i:null)|")
# JSON is YAML, but for tabs, which stand between its tokens only, and three characters that it keeps inside of strings,
# and YAML folds to spaces.
_OTHER_THAN_YAML = str.maketrans({"\t": " ", "\x85": r"\N", "\u2028": r"\L", "\u2029": r"\P"})
_KINDS = (("bool", _BOOL), ("int", _INT), ("float", _FLOAT), ("null", _NULL))


def read_yaml(text: str, name: str) -> Document:
    """Parse YAML text; `name` stands for it in messages."""
    try:
        return _Composer(yaml.parse(text, Loader=yaml.SafeLoader), name, _scalar).compose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = str(error.problem or error.context)
        hint = (
            "; indent with spaces" if "'\\t'" in problem else "; check the indentation" if "<block" in problem else ""
        )
        raise ConfigError(f"{name}:{line} is not valid YAML: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{name} is not valid YAML: character {error.character!r} is not text") from None


def read_json(text: str, name: str) -> Document:
    """Parse JSON text; `name` stands for it in messages."""

    def refuse(constant: str) -> NoReturn:
        raise ConfigError(f"{name} holds {constant}, which is not a value of JSON; use a finite number")

    try:
        content = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno} is not valid JSON: {error.msg} (column {error.colno})") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name} is not a usable configuration: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested deeper than {MAX_DEPTH} levels; a configuration has few") from None
    try:
        events = yaml.parse(text.translate(_OTHER_THAN_YAML), Loader=yaml.SafeLoader)
        return _Composer(events, name, json.loads).compose()
    except (yaml.YAMLError, json.JSONDecodeError):
        # A colon on the line below its key, a key of 1024 characters or a control character are JSON, and no YAML.
        return document_from_mapping(content, name)


def dump_yaml(content: Any) -> str:
    """Return YAML that `read_yaml` reads back to the same value, with the keys in the given order."""

    class Dumper(yaml.SafeDumper):
        """Quotes every string that `read_yaml`, or a reader of YAML 1.1, would take for something else."""

    for kind, pattern in _KINDS:
        # PyYAML matches with match(), so each pattern has to be closed at its end.
        Dumper.add_implicit_resolver(_TAG + kind, re.compile(f"(?:{pattern.pattern})$"), None)
    # allow_unicode would write some line separators (U+0085) as they are, which a reader takes for a space. A value has
    # one line, behind which comments may stand.
    return yaml.dump(
        content, Dumper=Dumper, sort_keys=False, default_flow_style=False, allow_unicode=False, width=sys.maxsize
    )


def _scalar(text: str) -> Any:
    """Return the value of an unquoted scalar."""
    kind = next((kind for kind, pattern in _KINDS if pattern.fullmatch(text)), "str")
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    if kind == "null":
        return None
    digits = text.replace("_", "")
    if kind == "float":
        return float(digits.lower().replace(".inf", "inf").replace(".nan", "nan"))
    # Python refuses to convert integers of more than 4300 digits; such a text is no option's value anyway.
    return int(digits, 0) if kind == "int" and len(digits) < 100 else text


def _joined(text: str) -> str:
    """Return a text with the two halves as which JSON escapes a character beyond 16 bits made one again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


class _Composer:
    """Builds nodes from parser events, which arrive one by one: a bomb is seen before it has been expanded."""

    def __init__(self, events: Iterator[yaml.Event], name: str, scalar: Callable[[str], Any]) -> None:
        self.events = events
        self.name = name
        self.scalar = scalar
        self.num_nodes = 0
        self.anchors: dict[str, tuple[Node, int]] = {}
        self.problems: list[str] = []

    def compose(self) -> Document:
        root: Node | None = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                line = event.start_mark.line + 1
                raise ConfigError(f"{self.name}:{line} starts a second document; a configuration is one document")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, 0)
        return Document(self.name, root or Node(None, 1, ""), tuple(self.problems))

    def _node(self, event: Any, depth: int) -> Node:
        line = event.start_mark.line + 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self.name}:{line} is nested deeper than {MAX_DEPTH} levels; a configuration has few")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor, line)
        size_before = self.num_nodes
        self._count(1, line)
        self._check_tag(event, line)
        if isinstance(event, yaml.ScalarEvent):
            is_plain = event.style is None and event.tag is None
            node = Node(self.scalar(event.value), line, event.value) if is_plain else Node(_joined(event.value), line)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = itertools.takewhile(lambda event: not isinstance(event, yaml.SequenceEndEvent), self.events)
            node = Node([self._node(item, depth + 1) for item in items], line)
        else:
            node = Node(self._mapping(depth), line)
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, self.num_nodes - size_before)
        return node

    def _count(self, number: int, line: int) -> None:
        self.num_nodes += number
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"{self.name}:{line} brings the file to more than {MAX_NODES} values with its aliases expanded; "
                "a configuration has a few hundred"
            )

    def _alias(self, anchor: str, line: int) -> Node:
        if anchor not in self.anchors:
            raise ConfigError(
                f"alias *{anchor} at {self.name}:{line} has no finished anchor &{anchor} before it; "
                "write the value out, and note that an anchor cannot contain itself"
            )
        node, size = self.anchors[anchor]
        self._count(size, line)
        return node

    def _check_tag(self, event: Any, line: int) -> None:
        if event.tag not in (None, "!", _TAG + "str"):
            tag = event.tag.replace(_TAG, "!!")
            self.problems.append(f"tag {tag} at {self.name}:{line} is refused: a configuration holds plain values only")

    def _mapping(self, depth: int) -> dict[Key, Node]:
        content: dict[Key, Node] = {}
        for event in itertools.takewhile(lambda event: not isinstance(event, yaml.MappingEndEvent), self.events):
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise ConfigError(f"{self.name}:{line} has a key that is not a name; a key is the name of an option")
            if event.value == "<<" and event.style is None:
                raise ConfigError(f"merge key << at {self.name}:{line} is not supported; write the keys out")
            key = Key(_joined(event.value), line)
            value = self._node(next(self.events), depth + 1)
            if key in content:
                first = next(known for known in content if known == key)
                self.problems.append(
                    f"key {key.name!r} at {self.name}:{line} was already given at line {first.line}; "
                    "keep one of the two"
                )
            else:
                content[key] = value
        return content
