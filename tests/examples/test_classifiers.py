"""finetune_classifier.py and native_loop.py: one result on every layout, and what they print and save."""

import functools
import re

import pytest

from tests.cells import beyond
from tests.example_runs import LAYOUTS, TINY, run_example, save_tiny_pretrained, save_tiny_texts
from tests.strategy_configs import needs_deepspeed

SNIPPETS = ["--snippets_per_package", "16", "--snippet_chars", "120"]
SCRIPTS = {
    "finetune_classifier": {"single": [], "ddp": [], "fsdp2": ["--fsdp", "full_shard"]},
    "native_loop": {layout: ["--strategy", layout] for layout in LAYOUTS},
}


def run(script, layout, folder, *options):
    argv = [*TINY, *SNIPPETS, *SCRIPTS[script][layout], "--output_dir", folder, *options]
    return run_example(script, argv, num_processes=LAYOUTS[layout])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each rank of a layout returns and prints in a run of 14 steps, and where it saves."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run_of(script, layout):
        path = folder / script / layout
        return run(script, layout, path, "--max_steps", 14), path

    return run_of


def assert_result_of_one_process(result, script, runs):
    alone = runs(script, "single")[0][0].result
    for metric in ("eval_loss", "eval_accuracy"):
        assert result[metric] == pytest.approx(alone[metric], abs=1e-4)


# Beyond the sample: under DDP accumulation is compared with one process, too.
@pytest.mark.multirank
@pytest.mark.parametrize("layout", [beyond("ddp"), "fsdp2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_strategy_does_not_change_the_result(script, layout, runs):
    assert_result_of_one_process(runs(script, layout)[0][0].result, script, runs)


@pytest.mark.multirank
@needs_deepspeed
@pytest.mark.parametrize(
    ("script", "option"), [("finetune_classifier", "--deepspeed"), beyond(("native_loop", "--strategy_config"))]
)
def test_deepspeed_gives_the_result_of_one_process(script, option, runs, tmp_path):
    argv = [*TINY, *SNIPPETS, "--output_dir", tmp_path / "zero3", "--max_steps", 14, option, "zero3"]

    finished = run_example(script, argv, num_processes=2)[0]

    assert_result_of_one_process(finished.result, script, runs)
    assert finished.table["strategy"].strip() == "deepspeed (DEEPSPEED)"
    assert "predictions are the same" in finished.table["from_pretrained"]


@pytest.mark.multirank
@pytest.mark.parametrize("script", SCRIPTS)
def test_accumulation_does_not_change_the_result(script, runs, tmp_path):
    split = run(script, "ddp", tmp_path, "--max_steps", 14, "--gradient_accumulation_steps", 2)[0].result

    assert_result_of_one_process(split, script, runs)


@pytest.mark.multirank
@pytest.mark.parametrize("script", SCRIPTS)
def test_only_the_main_process_prints(script, runs):
    (main, other), folder = runs(script, "fsdp2")

    parameters = int(main.table["parameters of the model"].replace(",", ""))
    per_rank = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", main.table["parameters per rank"])]
    assert main.table["strategy"].strip() == "fsdp2 (FSDP)"
    assert main.table["ranks"].strip() == "2 x cpu"
    assert per_rank[0] + per_rank[1] == per_rank[2] == parameters
    assert max(per_rank[:2]) < 0.6 * parameters
    assert "steps/s" in main.table["training"]
    assert main.table["saved to"].strip() == str(folder)
    assert "predictions are the same" in main.table["from_pretrained"]
    assert "14/14" in main.err
    assert other.out == ""
    assert "it/s" not in other.err
    assert "examples/s" not in other.err


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_was_saved_predicts_the_same(script, runs):
    (finished,), _ = runs(script, "single")

    same, total = map(int, re.search(r"(\d+) of (\d+) predictions", finished.table["from_pretrained"]).groups())
    assert same == total > 0


@pytest.fixture(scope="module")
def own_files(tmp_path_factory):
    """The folders of a model and of a dataset."""
    folder = tmp_path_factory.mktemp("own")
    return save_tiny_pretrained(folder / "model"), save_tiny_texts(folder / "data")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_and_a_dataset_of_your_own_do_the_same_job(script, own_files, tmp_path):
    model, dataset = own_files

    argv = ["--model", model, "--dataset", dataset, *TINY, "--output_dir", tmp_path / "out", "--epochs", 2]
    finished = run_example(script, argv)[0]

    assert finished.table["samples"].strip() == "64 for training, 21 for evaluation, 2 classes"
    assert 0 < finished.result["majority_accuracy"] < 1
    assert "predictions are the same" in finished.table["from_pretrained"]


def test_a_global_batch_that_cannot_be_shared_is_refused(tmp_path):
    options = ["--global_batch_size", 15, "--gradient_accumulation_steps", 2]

    finished = run("finetune_classifier", "single", tmp_path, *options)[0]

    assert "--global_batch_size 15 cannot be shared by 2" in finished.result
    assert "use a multiple of 2" in finished.result


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_the_options(script):
    finished = run_example(script, ["--help"])[0]

    assert finished.result == 0
    for option in ("--output_dir", "--max_steps", "--epochs", "--seed", "--model", "--dataset", "--config"):
        assert option in finished.out
