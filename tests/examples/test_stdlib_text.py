"""The text of the examples: halves without a common file or snippet, the same on every rank, and its tokenizer."""

import os
import sys

import pytest

from tests.example_runs import EXAMPLES
from tests.ranks import run_ranks


def stdlib_text():
    sys.path.insert(0, str(EXAMPLES))
    import stdlib_text

    return stdlib_text


def describe(folder):
    """Return sources and snippets, and on rank 0 what a tokenizer that is trained twice and read back does."""
    from transformers import AutoTokenizer

    module = stdlib_text()
    sources = [(source.split, source.package, source.path) for source in module.load_sources()]
    texts = module.load_snippets(200, 30)
    snippets = {split: (texts[split]["text"][:], texts[split]["label"][:]) for split in texts}
    if os.environ["RANK"] != "0":
        return sources, snippets, None
    one, other = (module.train_tokenizer(snippets["train"][0], 500, 16) for _ in range(2))
    one.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    sample = "def naïve(x):\n\treturn '→' # \x00"
    decoded = again.decode(again(sample, truncation=False)["input_ids"], skip_special_tokens=True)
    num_separators = again("a", "b")["input_ids"].count(again.sep_token_id)
    is_equal = one.get_vocab() == other.get_vocab()
    return sources, snippets, (is_equal, sample == decoded, num_separators, again.model_max_length)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """What two ranks have described, whose hashes of texts differ."""
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    return run_ranks(describe, 2, folder, env=lambda rank: {"PYTHONHASHSEED": str(rank)})


def load_unknown_packages():
    with pytest.raises(
        SystemExit, match=r"of the packages asyncio, no_such_package have sources below .* 8 are needed"
    ):
        stdlib_text().load_sources(["asyncio", "no_such_package"])


def test_no_file_is_in_both_halves(described):
    sources, _, _ = described[0]

    halves = {split: {path for kind, _, path in sources if kind == split} for split in ("train", "eval")}
    assert not halves["train"] & halves["eval"]
    assert {package for kind, package, _ in sources if kind == "train"} == {
        package for kind, package, _ in sources if kind == "eval"
    }
    assert len({package for _, package, _ in sources}) >= 8


def test_no_snippet_is_in_both_halves_or_twice(described):
    _, snippets, _ = described[0]

    train, evaluation = snippets["train"][0], snippets["eval"][0]
    assert not set(train) & set(evaluation)
    assert len(set(train)) == len(train)
    assert max(snippets["train"][1].count(label) for label in range(8)) <= 30


def test_every_rank_reads_the_same(described):
    first, second = described

    assert first[:2] == second[:2]


def test_the_tokenizer_is_reproducible_and_loses_no_byte(described):
    assert described[0][2] == (True, True, 2, 16)


def test_a_machine_without_the_sources_is_told_what_to_do():
    run_ranks(load_unknown_packages, 1)
