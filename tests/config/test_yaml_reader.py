"""YAML and JSON as they are read: scalars, lines, and what is refused before it can do harm."""

from __future__ import annotations

import contextlib
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.config.document import MAX_DEPTH, MAX_NODES, Key, document_from_mapping
from accel_trainer.config.yaml_reader import dump_yaml, read_json, read_yaml
from accel_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("2.5e-3", 2.5e-3),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("1_000_000", 1_000_000),
        ("0o17", 15),
        ("0x1F", 31),
        ("0", 0),
        ("yes", True),
        ("NO", False),
        ("On", True),
        ("off", False),
        ("true", True),
        ("y", "y"),
        ("~", None),
        ("null", None),
        ("", None),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'no'", "no"),
        ('"1e-5"', "1e-5"),
        ("!!str 1e-5", "1e-5"),
        ("9" * 200, "9" * 200),
        ("[a, b]", ["a", "b"]),
    ],
)
def test_a_yaml_scalar_is_what_a_person_means(text, value):
    read = read_yaml(f"key: {text}\n", "x.yaml").root.plain()["key"]

    assert (type(read), read) == (type(value), value)


def test_nodes_remember_line_and_spelling():
    content = read_yaml("a: 1\n\nb:\n  c: no\n", "x.yaml").root.value

    inner = content[Key("b")].value
    assert next(iter(inner)).line == 4
    assert (inner[Key("c")].value, inner[Key("c")].text) == (False, "no")


def test_json_remembers_lines():
    document = read_json('{"a": 1,\n\n "b": {"x,\\"y":\n  [true, "{"]}}', "x.json")

    keys = list(document.root.value)
    inner = document.root.value[Key("b")].value
    assert [key.line for key in keys] == [1, 3]
    assert document.root.plain() == {"a": 1, "b": {'x,"y': [True, "{"]}}
    assert inner[Key('x,"y')].line == 4


def test_an_alias_of_modest_size_is_read():
    assert read_yaml("a: &x [1, 2]\nb: *x\n", "x.yaml").root.plain() == {"a": [1, 2], "b": [1, 2]}


def test_an_alias_bomb_is_refused_without_being_expanded():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]

    message = f"^bomb.yaml:4 brings the file to more than {MAX_NODES} values with its aliases expanded; a configurat"
    with pytest.raises(ConfigError, match=message):
        read_yaml("\n".join(lines), "bomb.yaml")


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_too_many_values_are_refused(read):
    with pytest.raises(ConfigError, match=f"more than {MAX_NODES} values"):
        read(json.dumps({"a": list(range(MAX_NODES))}), "big")


@pytest.mark.parametrize("read", [read_yaml, read_json])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 100_000])
def test_deep_nesting_is_refused(read, depth):
    with pytest.raises(ConfigError, match=f"^deep(:1)? is nested deeper than {MAX_DEPTH} levels; a configuration has"):
        read('{"a": ' + "[" * depth + "]" * depth + "}", "deep")


def test_a_mapping_that_contains_itself_is_refused():
    content = {}
    content["a"] = content

    with pytest.raises(ConfigError, match="the config dict is nested deeper"):
        document_from_mapping(content, "the config dict")


def test_a_key_of_a_mapping_is_text():
    with pytest.raises(ConfigError, match="key 3 in the config dict is not a string"):
        document_from_mapping({3: "x"}, "the config dict")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: \x07", "x.yaml is not valid YAML: character 7 is not text"),
        ("? [a]\n: b", "x.yaml:1 has a key that is not a name; a key is the name of an option"),
        (
            "a: *b",
            "alias *b at x.yaml:1 has no finished anchor &b before it; write the value out, "
            "and note that an anchor cannot contain itself",
        ),
    ],
)
def test_unusable_yaml_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yaml")

    assert str(caught.value) == message


def test_an_endless_integer_in_json_is_refused():
    with pytest.raises(ConfigError, match=r"x\.json is not a usable configuration: Exceeds the limit"):
        read_json('{"a": ' + "9" * 5000 + "}", "x.json")


SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=12)
WORDS = st.sampled_from(["no", "1e5", "010", "0o7", "~", "", "null", "1:30", "2020-01-01", "<<", "=", "!!str x", "- a"])
CONTENT = st.dictionaries(
    st.text(min_size=1, max_size=6) | st.sampled_from(["<<", "=", "no", "~"]),
    st.recursive(SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    max_size=4,
)


@given(CONTENT)
def test_dumped_yaml_is_read_back(content):
    assert read_yaml(dump_yaml(content), "x.yaml").root.plain() == content


@given(CONTENT)
def test_what_we_dump_means_the_same_to_a_standard_reader(content):
    assert yaml.safe_load(dump_yaml(content)) == content


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_read_or_refused_as_a_configuration(text):
    for read in (read_yaml, read_json):
        with contextlib.suppress(ConfigError):
            read(text, "x")


@given(CONTENT.filter(lambda content: "inf" not in repr(content)), st.booleans(), st.sampled_from([None, "\t", 1]))
def test_json_is_read_as_the_standard_parser_reads_it(content, ensure_ascii, indent):
    text = json.dumps(content, ensure_ascii=ensure_ascii, indent=indent)

    assert read_json(text, "x").root.plain() == json.loads(text)


@pytest.mark.parametrize("text", ['{"a"\n: {"b": [1]}}', '{"a": "\x7f"}', '{"' + "a" * 2000 + '": 1}'])
def test_json_that_is_no_yaml_is_read_without_lines(text):
    document = read_json(text, "x")

    assert (document.root.plain(), document.root.line) == (json.loads(text), None)


@pytest.mark.parametrize("text", [r'{"a": "\ud83d\ude00 \/"}', '{"a": "x\u2028y\x85"}', '{\n\t"a":\t1e2}'])
def test_json_that_yaml_would_read_otherwise_keeps_its_values_and_lines(text):
    document = read_json(text, "x")

    assert document.root.plain() == json.loads(text)
    assert next(iter(document.root.value)).line == text.count("\n") + 1
