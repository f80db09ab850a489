"""Examples that stand alone, one file each: they train what they say, in one process and in the layout they are for."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, run_example
from tests.ranks import preload

preload(
    "datasets",
    "sklearn.datasets",
    "torch._dynamo",  # of the meters, which count operations: five seconds in each rank
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.vit.modeling_vit",
    "transformers.models.wav2vec2.modeling_wav2vec2",
)

COPYABLE = (
    "distillation", "dpo", "moe", "pretrain", "qlora", "several_machines", "sft", "speech", "spot", "vision",
)  # fmt: skip


@pytest.mark.parametrize("name", COPYABLE)
def test_an_example_imports_no_module_beside_it_and_can_be_copied(name: str):
    beside = {path.stem for path in EXAMPLES.rglob("*.py")}
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    roots = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert roots & beside == set()


def test_pretraining_goes_on_where_it_has_stopped(tmp_path: Path):
    options = ["--cpu", "--max_length", 64, "--batch_size", 4, "--save_steps", 10, "--max_steps", 20]
    (whole,) = run_example("pretrain", [*options, "--output_dir", tmp_path])
    assert whole.result[-1] < whole.result[0] - 0.3

    shutil.rmtree(tmp_path / "checkpoint-20")  # as if it had been killed before it saved that one
    (resumed,) = run_example("pretrain", [*options, "--output_dir", tmp_path])
    assert resumed.result == whole.result
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.multirank
def test_a_mixture_trains_alike_on_one_process_under_tp_and_under_ep(tmp_path: Path):
    options = ["--cpu", "--max_steps", 4, "--batch_size", 8, "--output_dir", tmp_path]
    (alone,) = run_example("moe", options)
    assert "of the weights are experts" in alone.out
    for axis, file in {"tp": "tensor_parallel", "ep": "expert_parallel"}.items():
        first, second = run_example("moe", options, num_processes=2, file=file)
        assert f"{axis}_size 2" in first.out
        assert first.result == second.result
        assert first.result == pytest.approx(alone.result, rel=1e-5)


@pytest.mark.multirank
def test_a_student_comes_nearer_to_a_teacher_that_lies_in_shards_too(tmp_path: Path):
    options = ["--cpu", "--max_steps", 10, "--output_dir", tmp_path]
    first, second = run_example("distillation", options, num_processes=2, file="full_shard")
    assert first.result == second.result
    assert first.result["after"] < 0.8 * first.result["before"]


@pytest.mark.multirank
def test_two_machines_with_a_replica_in_shards_each_train_as_one_process(tmp_path: Path):
    options = ["--cpu", "--max_steps", 4, "--data_dir"]
    (alone,) = run_example("several_machines", [*options, tmp_path / "data", "--output_dir", tmp_path / "alone"])
    argv = [*options, tmp_path / "of_each", "--output_dir", tmp_path]
    ranks = run_example("several_machines", argv, num_processes=4, num_machines=2, file="hybrid_shard")
    assert "2 machines of 2" in ranks[0].out
    assert ranks[0].result == pytest.approx(alone.result, rel=1e-5)


def test_an_image_classifier_learns_digits(tmp_path: Path):
    (run,) = run_example("vision", ["--cpu", "--num_epochs", 2, "--output_dir", tmp_path])
    assert run.result > 0.3
    assert "on 360 images that were held out" in run.out


def test_a_recognizer_of_speech_learns_to_spell(tmp_path: Path):
    (run,) = run_example("speech", ["--cpu", "--max_steps", 100, "--learning_rate", 6e-3, "--output_dir", tmp_path])
    assert run.result["loss"] < 1
