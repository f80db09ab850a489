"""finetune_causal_lm.py: it learns more than token frequencies, and saves what `from_pretrained` loads."""

import pytest

from tests.example_runs import LAYOUTS, TINY, run_example

SMALL = ["--train_blocks", "256", "--eval_blocks", "32", "--learning_rate", "1e-2"]


@pytest.mark.multirank
def test_the_strategy_does_not_change_the_result(tmp_path):
    options = {"single": [], "ddp": [], "fsdp2": ["--fsdp", "full_shard"]}
    results = {
        layout: run_example(
            "finetune_causal_lm",
            [*TINY, *SMALL, *options[layout], "--max_steps", 4, "--output_dir", tmp_path / layout],
            num_processes=LAYOUTS[layout],
        )[0].result
        for layout in LAYOUTS
    }

    for layout in ("ddp", "fsdp2"):
        assert results[layout]["eval_loss"] == pytest.approx(results["single"]["eval_loss"], abs=1e-4)
        assert results[layout]["eval_accuracy"] == pytest.approx(results["single"]["eval_accuracy"], abs=1e-3)


def test_it_beats_the_frequencies_of_tokens(tmp_path):
    finished = run_example("finetune_causal_lm", [*TINY, *SMALL, "--epochs", 4, "--output_dir", tmp_path])[0]

    assert finished.result["eval_perplexity"] < finished.result["unigram_perplexity"]
    assert finished.result["eval_accuracy"] > finished.result["unigram_accuracy"]
    assert "100.0%" in finished.table["from_pretrained"]


def test_help_names_the_options():
    finished = run_example("finetune_causal_lm", ["--help"])[0]

    assert finished.result == 0
    assert "--train_blocks" in finished.out
