"""JSON with line numbers: duplicate keys and NaN are errors, and every value remembers its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from accel_trainer.config.readers.document import MAX_DEPTH, MAX_NODES, Document, Key, Node, duplicate_key_problem
from accel_trainer.errors import ConfigError

__all__ = ["read_json"]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+|\n')


def read_json(text: str, name: str) -> Document:
    """Parse JSON text; `name` stands for it in messages.

    Raises:
        ConfigError: not valid JSON, a key that occurs twice, NaN or Infinity, or more values than a configuration has.
    """
    try:
        # The standard parser decides what is valid; the second pass only adds lines to what it accepted.
        json.loads(text, parse_constant=lambda constant: _refuse_constant(constant, name))
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno} is not valid JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not a usable configuration: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested deeper than {MAX_DEPTH} levels; a configuration has few") from None
    builder = _Builder(text, name)
    root = builder.value(next(builder.tokens), 0)
    return Document(name, root, tuple(builder.problems))


def _refuse_constant(constant: str, name: str) -> NoReturn:
    raise ConfigError(f"{name} holds {constant}, which is not a value of JSON; use a finite number")


class _Builder:
    """Second pass over text that is known to be valid JSON."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.line = 1
        self.num_nodes = 0
        self.problems: list[str] = []
        self.tokens = self._tokens(text)

    def _tokens(self, text: str) -> Iterator[str]:
        for match in _TOKEN.finditer(text):
            if match.group() == "\n":
                self.line += 1
            else:
                yield match.group()

    def value(self, token: str, depth: int) -> Node:
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{self.name}:{self.line} is nested deeper than {MAX_DEPTH} levels; a configuration has few"
            )
        if self.num_nodes > MAX_NODES:
            raise ConfigError(f"{self.name} holds more than {MAX_NODES} values; a configuration has a few hundred")
        line = self.line
        if token == "{":
            return Node(self._object(depth), line)
        if token == "[":
            items = iter(lambda: next(self.tokens), "]")
            return Node([self.value(item, depth + 1) for item in items if item != ","], line)
        value = json.loads(token)
        return Node(value, line, None if isinstance(value, str) else token)

    def _object(self, depth: int) -> dict[Key, Node]:
        content: dict[Key, Node] = {}
        for token in iter(lambda: next(self.tokens), "}"):
            if token == ",":
                continue
            key = Key(json.loads(token), self.line)
            next(self.tokens)  # the colon
            value = self.value(next(self.tokens), depth + 1)
            if key in content:
                self.problems.append(duplicate_key_problem(self.name, key, content))
            else:
                content[key] = value
        return content
