"""The text of the examples: halves without a common file or snippet, the same on every rank, and its tokenizer."""

import sys

import pytest

from tests.example_runs import EXAMPLES
from tests.ranks import run_ranks


def stdlib_text():
    sys.path.insert(0, str(EXAMPLES))
    import stdlib_text

    return stdlib_text


def describe_sources():
    sources = stdlib_text().load_sources()
    return [(source.split, source.package, source.path) for source in sources]


def describe_snippets():
    texts = stdlib_text().load_snippets(200, 30)
    return {split: (texts[split]["text"][:], texts[split]["label"][:]) for split in texts}


def train_twice_and_read_back(folder):
    from transformers import AutoTokenizer

    module = stdlib_text()
    texts = module.load_snippets(200, 30)["train"]["text"][:]
    one, other = (module.train_tokenizer(texts, 500, 16) for _ in range(2))
    one.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder)
    sample = "def naïve(x):\n\treturn '→' # \x00"
    decoded = again.decode(again(sample, truncation=False)["input_ids"], skip_special_tokens=True)
    pair = again("a", "b")["input_ids"]
    return (
        one.get_vocab() == other.get_vocab(),
        sample == decoded,
        pair.count(again.sep_token_id),
        again.model_max_length,
    )


def load_unknown_packages():
    with pytest.raises(
        SystemExit, match=r"of the packages asyncio, no_such_package have sources below .* 8 are needed"
    ):
        stdlib_text().load_sources(["asyncio", "no_such_package"])


def test_no_file_is_in_both_halves():
    (sources,) = run_ranks(describe_sources, 1)

    halves = {split: {path for kind, _, path in sources if kind == split} for split in ("train", "eval")}
    assert not halves["train"] & halves["eval"]
    assert {package for kind, package, _ in sources if kind == "train"} == {
        package for kind, package, _ in sources if kind == "eval"
    }
    assert len({package for _, package, _ in sources}) >= 8


def test_no_snippet_is_in_both_halves_or_twice():
    (snippets,) = run_ranks(describe_snippets, 1)

    train, evaluation = snippets["train"][0], snippets["eval"][0]
    assert not set(train) & set(evaluation)
    assert len(set(train)) == len(train)
    assert max(snippets["train"][1].count(label) for label in range(8)) <= 30


def test_every_rank_reads_the_same():
    first, second = run_ranks(describe_snippets, 2, env=lambda rank: {"PYTHONHASHSEED": str(rank)})

    assert first == second


def test_the_tokenizer_is_reproducible_and_loses_no_byte(tmp_path):
    (result,) = run_ranks(train_twice_and_read_back, 1, str(tmp_path))

    assert result == (True, True, 2, 16)


def test_a_machine_without_the_sources_is_told_what_to_do():
    run_ranks(load_unknown_packages, 1)
