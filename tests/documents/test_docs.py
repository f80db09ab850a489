"""Our own pages: their code runs, their files are read, their commands parse, their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.config import field_specs, read_file
from accel_trainer.config.config_source import packaged_names
from accel_trainer.launch import cli
from accel_trainer.launch.flags import parse_options
from tests.documents import commands_page
from tests.documents.options_table import PAGE, replace_tables
from tests.ranks import preload, run_ranks

preload("accel_trainer.trainer", "accel_trainer.utils", "evaluate", "transformers.models.bert.modeling_bert")

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NEEDS = {"fp8": "torchao", "peft": "peft", "sentence_transformers": "sentence_transformers", "trl": "trl"}
"""Pages whose code needs a library that `make test` has not; tests/ecosystem runs them."""
HINDI = sorted((ROOT / "docs" / "hi").glob("*.md"))
WRITTEN_BY_TESTS = {"accelerate_names", "cli", "compatibility", "configuration"}
"""Pages of tables, to be looked up and not read."""
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES, *HINDI]


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(match[1], match[2], page.read_text()[: match.start()].count("\n") + 2) for match in found]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks and code in backticks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def given_names() -> dict[str, Any]:
    """Return what docs/index.md says that the blocks take as given."""
    import torch
    from torch.utils.data import DataLoader

    from tests.trainer_jobs import TokenDataset, build_model

    model = build_model("bert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_dataset, eval_dataset = TokenDataset(24, kind="class"), TokenDataset(11, kind="class", seed=1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "train_dataset": train_dataset,
        "eval_dataset": eval_dataset,
        "train_dataloader": DataLoader(train_dataset, batch_size=4, shuffle=True),
        "eval_dataloader": DataLoader(eval_dataset, batch_size=4),
    }


def given_to(page: str, folder: str) -> dict[str, Any]:
    """Return what a page on another library takes as given besides."""
    from tests.ecosystem import text_jobs

    if page == "trl":
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(text_jobs.save_llama(f"{folder}/llama"))
        return {
            "language_model": model, "tokenizer": text_jobs.build_tokenizer(), "text_dataset": text_jobs.texts(16)
        }  # fmt: skip
    if page == "sentence_transformers":
        embedder = text_jobs.build_embedder(text_jobs.save_bert(f"{folder}/bert"))
        return {"embedder": embedder, "pair_dataset": text_jobs.pairs(16)}
    return {}


def run_pages(pages: list[str], folder: str) -> list[tuple[int, str]]:
    """Run the Python blocks of pages on this rank, each page in a folder of its own."""
    return [run_blocks(page, f"{folder}/{Path(page).stem}") for page in pages]


def run_blocks(page: str, folder: str) -> tuple[int, str]:
    """Run the Python blocks of a page on this rank, each with fresh names; return how many ran, and what went wrong."""
    os.chdir(folder)
    os.environ["HF_HOME"] = f"{folder}/hf"
    num_run = 0
    for block in blocks(Path(page)):
        if block.language != "python":
            continue
        script = types.ModuleType("__main__")  # as a script's own: classes in it can be pickled
        sys.modules["__main__"] = script
        if Path(page).parent.name == "docs":
            vars(script).update(given_names() | given_to(Path(page).stem, f"{folder}/{os.environ['RANK']}"))
        code = "\n" * (block.line - 1) + block.text
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                exec(compile(code, page, "exec"), vars(script))
        except Exception:
            # The other rank may be waiting in a collective of this block: the page ends here.
            return num_run, traceback.format_exc()
        num_run += 1
    return num_run, ""


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the configuration files that a page shows, under the name in their first line; return the names."""
    names = []
    for block in blocks(page):
        if block.language in ("yaml", "json"):
            named = re.match(r"# (\S+\.ya?ml)\n", block.text)
            names.append(named[1] if named else f"line_{block.line}.{block.language}")
            (folder / names[-1]).write_text(block.text)
    return names


def with_python(pages: list[Path]) -> list[Path]:
    return [page for page in pages if any(block.language == "python" for block in blocks(page))]


@pytest.mark.multirank
@pytest.mark.timeout(280)  # the first one waits for all of them
@pytest.mark.parametrize("page", with_python(PAGES), ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_on_two_ranks(page: Path, ran: dict[Path, list[tuple[int, str]]], tmp_path: Path):
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
        check_python(page, run_pages_on_ranks([page], tmp_path)[page])
    else:
        check_python(page, ran[page])


@pytest.mark.multirank
def test_the_python_of_the_readme_takes_nothing_as_given(ran: dict[Path, list[tuple[int, str]]]):
    check_python(ROOT / "README.md", ran[ROOT / "README.md"])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[tuple[int, str]]]:
    """What the ranks have to say of each page: a job costs as much as most pages."""
    pages = [ROOT / "README.md", *(page for page in with_python(PAGES) if page.stem not in NEEDS)]
    pages.sort(key=lambda page: "end_training()" in page.read_text())  # of a job that is left the others are no part
    return run_pages_on_ranks(pages, tmp_path_factory.mktemp("pages"))


def run_pages_on_ranks(pages: list[Path], folder: Path) -> dict[Path, list[tuple[int, str]]]:
    """Run the Python of pages on two ranks; return, by page and rank, how many blocks ran, and what went wrong."""
    for page in pages:
        own = folder / page.stem
        own.mkdir()
        write_files(page, own)
        shutil.copytree(ROOT / "examples" / "metrics", own / "metrics")
    quiet = {"ACCEL_TRAINER_USE_CPU": "true", "DISABLE_TELEMETRY": "1", "CI": "1"}
    ranks = run_ranks(run_pages, 2, [str(page) for page in pages], str(folder), env=quiet, timeout=250)
    return dict(zip(pages, zip(*ranks, strict=True), strict=True))


def check_python(page: Path, ranks: list[tuple[int, str]]) -> None:
    expected = page.read_text().count("```python\n")
    for num_run, problem in ranks:
        assert not problem, problem
        assert num_run == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_files_of_a_page_are_configurations(page: Path, tmp_path: Path):
    for name in write_files(page, tmp_path):
        assert read_file(tmp_path / name).settings


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_taken(page: Path):
    for block in blocks(page):
        for line in block.text.splitlines() if block.language == "bash" else []:
            words = shlex.split(line, comments=True)
            if words[:1] != ["accel-trainer"]:
                continue
            assert words[1] in cli.COMMANDS, line
            if words[1] in ("launch", "explain"):
                options = parse_options(words[2:], "accel-trainer")
                assert bool(options.rest) == (words[1] == "launch"), line
                assert not options.rest or not options.rest[0].startswith("-"), line


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_relative_links_lead_to_files_and_headings(page: Path):
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}; {found.name} has {anchors}"


def test_the_map_names_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked >= {page.name for page in PAGES} - {"index.md"}


@pytest.mark.parametrize("page", [*PAGES, *HINDI], ids=lambda page: page.stem)
def test_a_page_is_not_too_long_and_has_a_way_on(page: Path):
    lines = page.read_text().splitlines()
    assert len(lines) <= 300 or page.stem in WRITTEN_BY_TESTS
    assert page.stem == "index" or re.match(r"(Next|आगे): \[[^\]]+\]\((\.\./)?\w+\.md\)", lines[-1])


@pytest.mark.parametrize("page", HINDI, ids=lambda page: page.stem)
def test_the_code_of_a_page_in_hindi_is_that_of_the_english_one(page: Path):
    translated, original = blocks(page), blocks(page.parents[1] / page.name)
    assert [(block.language, block.text) for block in translated] == [(b.language, b.text) for b in original]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a newer argparse sets its help otherwise")
def test_the_page_of_commands_is_their_help():
    assert commands_page.PAGE.read_text() == commands_page.build_page(), "run: python -m tests.documents.commands_page"


def test_every_option_stands_in_the_tables_as_the_schema_has_it_and_every_packaged_file():
    text = PAGE.read_text()
    assert text == replace_tables(text), "run: python -m tests.documents.options_table"
    named = [*(f"| `{path}` |" for path in field_specs()), *(f"`{name}`" for name in packaged_names())]
    assert [each for each in named if each not in text] == []


def test_a_file_with_mistakes_is_answered_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from accel_trainer.config import resolve
    from accel_trainer.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text("strategy: ddp\nmixed_precison: bf16\naccumulation:\n  num_steps: 0\n")
    (shown,) = [block.text.strip() for block in blocks(PAGE) if block.language == "text"]
    with pytest.raises(ConfigError) as error:
        resolve(file="train.yaml")
    assert str(error.value) == shown
