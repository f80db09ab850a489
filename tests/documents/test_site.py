"""What the site of `make docs` is made of: its navigation, its reference, its picture and its table of the tests."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import accel_trainer
from accel_trainer.config import field_specs
from accel_trainer.config.config_source import packaged_names
from accel_trainer.registry import strategy_names
from tests.documents import compatibility, reference
from tests.documents.site import list_versions

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_the_navigation_has_every_page_once():
    listed = re.findall(r"^\s+- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(DOCS)) for folder in (DOCS, DOCS / "hi") for path in folder.glob("*.md")]
    pages += [f"reference/{page}.md" for page in reference.PAGES]
    assert sorted(listed) == sorted(pages)


def test_every_public_module_is_in_the_reference():
    listed = {module for _, modules in reference.PAGES.values() for module in modules}
    at_the_root = {path.stem for path in Path(accel_trainer.__file__).parent.glob("*.py") if path.stem[0] != "_"}
    not_for_users = {"aliases", "as_accelerate", "tree", "unsupported"}  # as_accelerate is started, and not imported
    assert (at_the_root | set(accel_trainer._MODULES)) - listed == not_for_users


def test_every_public_name_has_one_entry():
    names = [name for entries in reference.public_names().values() for known in entries.values() for name in known]
    assert len(names) == len(set(names))
    assert {*accel_trainer.__all__, *accel_trainer.utils.__all__} - set(names) == set()


def test_the_picture_names_strategies_and_options_that_exist():
    text = " ".join(ElementTree.parse(DOCS / "layouts.svg").getroot().itertext())
    assert set(re.findall(r"strategy: (\w+)", text)) == set(strategy_names()) | {"deepspeed"}
    options = re.findall(r"fsdp\.\w+", text)
    assert len(options) == 3
    assert set(options) <= set(field_specs())


def test_the_glossary_has_every_strategy_and_axis_once():
    text = (DOCS / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    words = [word for row in rows if row not in ("word", "---") for word in row.split(", ")]
    assert len(words) == len(set(words))
    (strategies,) = re.findall(r"^\| strategy \| .*: (.*) \|$", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", strategies)) == set(strategy_names()) | {"deepspeed"}
    (axes,) = re.findall(r"^\| mesh, axis \| .*: (.*) \|$", text, re.MULTILINE)
    sizes = {f"{axis}_size" for axis in re.findall(r"`(\w+)`", axes)}
    assert sizes == {path.partition(".")[2] for path in field_specs() if re.fullmatch(r"parallel\.\w+_size", path)}


def test_the_files_of_the_front_page_are_packaged():
    table = (DOCS / "index.md").read_text().split("## Choose your layout")[1].split("The names are")[0]
    names = re.findall(r"`(\w+)`", table)
    assert len(names) == 6
    assert set(names) <= set(packaged_names())


def test_the_table_of_what_works_is_that_of_the_tests():
    text = compatibility.PAGE.read_text()
    assert compatibility.replace_tables(text) == text, "run `python -m tests.documents.compatibility`"
    assert text.count("✓") > 100


def test_the_newest_of_the_versions_that_are_there_is_the_latest(tmp_path: Path):
    for name in ("0.2.0", "0.10.0", "0.9.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "objects.inv").touch()
    (tmp_path / "built").mkdir()  # of a build that has failed
    list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    aliases = {each["version"]: each["aliases"] for each in listed}
    assert list(aliases.items()) == [("0.10.0", ["latest"]), ("0.9.1", []), ("0.2.0", [])]
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()
