"""`accel-trainer config`: what the answers become, what is asked again, and files that are never lost."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_trainer.config import resolve
from accel_trainer.contrib import questionnaire
from accel_trainer.launch.cli import main
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
# What each question is known by, in these tests.
CPU, MACHINES, STRATEGY, PROCESSES = "on the CPU although", "How many machines", "laid out?", "How many processes"
PRECISION, STEPS = "Mixed precision?", "Micro-batches for each update"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(questionnaire, "count_devices", lambda use_cpu, gpu_ids: 0)


def answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in answers)))


def run(path: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> dict[str, Any]:
    answer(monkeypatch, *answers)
    assert main(["config", "--config_file", str(path)]) == 0
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    return content


def test_piped_answers_make_the_file_that_launch_looks_for(tmp_path: Path):
    # The CPU, one machine, FSDP, two processes, its six questions, bf16, four micro-batches, no compile, nothing more.
    answers = "yes\n\nfsdp2\n2\nno\n\nBertLayer, GPT2Block\nyes\n\n\nsharded\nbf16\n4\n\n\n"
    command = [sys.executable, "-m", "accel_trainer", "config"]
    environ = {**os.environ, "HF_HOME": str(tmp_path)}
    done = warm.run(command, cwd=ROOT, input=answers, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "accel_trainer" / "default_config.yaml"
    assert done.stdout.endswith(f"configuration written to {path}; try it with: accel-trainer test\n")
    config = resolve(file=path).config
    assert (config.use_cpu, config.strategy, config.mixed_precision) == (True, "fsdp2", "bf16")
    assert (config.launch.num_processes, config.accumulation.num_steps) == (2, 4)
    fsdp = config.fsdp
    assert (fsdp.reshard_after_forward, fsdp.wrap_classes) == (False, ("BertLayer", "GPT2Block"))
    assert (fsdp.activation_checkpointing, fsdp.offload_params, fsdp.state_dict_type) == (True, False, "sharded")
    assert list(path.parent.iterdir()) == [path]


def test_empty_answers_are_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    content = run(tmp_path / "a.yaml", monkeypatch, *[""] * 9)
    assert content == {
        "use_cpu": False,
        "launch": {"num_machines": 1, "num_processes": 1, "gpu_ids": "all"},
        "strategy": "auto",
        "mixed_precision": "no",
        "accumulation": {"num_steps": 1},
        "compile": {"backend": "no"},
    }
    shown = capsys.readouterr().out
    asked = [shown.index(question) for question in (CPU, MACHINES, STRATEGY, PROCESSES, PRECISION, STEPS)]
    assert asked == sorted(asked)
    assert "there may be a GPU? [no]: " in shown


def test_answers_that_do_not_fit_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    first, second = "ja y 0 1 fsdp fsdp2 two 2", "fp16 bf61 bf16 -3 3"
    content = run(tmp_path / "a.yaml", monkeypatch, *first.split(), *[""] * 7, *second.split(), "", "")
    assert (content["strategy"], content["mixed_precision"]) == ("fsdp2", "bf16")
    assert (content["launch"]["num_processes"], content["accumulation"]["num_steps"]) == (2, 3)
    shown = capsys.readouterr().out
    for refused in (
        "'ja' does not fit: expected true or false",
        "'0' does not fit: expected a whole number of at least 1",
        "'fsdp' does not fit: expected one of auto, ddp, fsdp2, deepspeed, single; did you mean 'fsdp2'?",
        "'two' does not fit: expected a whole number",
        "'fp16' does not fit: expected one of no, bf16",
        "'-3' does not fit: expected a whole number of at least 1",
    ):
        assert refused in shown


def test_a_question_is_explained_and_gone_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    # Back from the strategy to the machines, whose answer is the default now, and to the beginning of all.
    answers = ["<", "?", "yes", "2", "<", "", "<", "1", "single", "bf16", "", "", ""]
    content = run(tmp_path / "a.yaml", monkeypatch, *answers)
    assert content["use_cpu"] is True
    assert content["launch"] == {"num_machines": 1}
    shown = capsys.readouterr().out
    assert "  Run on the CPU even when the machine has an accelerator.\n" in shown
    assert re.findall(r"How many machines\? \[(\d)\]", shown) == ["1", "2", "2"]


def test_several_machines_are_asked_for_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    answers = ["", "2", "ddp", "2", "1", "", "10.0.0.1", "", "c10d", "0,1", "3", "16", *[""] * 4]
    content = run(tmp_path / "a.yaml", monkeypatch, *answers)
    assert content["launch"] == {
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "gpu_ids": "0,1",
        "num_processes": 16,
    }
    shown = capsys.readouterr().out
    assert "'2' does not fit: expected a number from 0 to 1" in shown
    assert "this one has no default" in shown
    assert "'3' does not fit: expected a multiple of the 2 machines" in shown


def test_every_option_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    parts = [
        ["yes", "", "fsdp2", "8", "", "size", "1000", "", "", "yes", "", "3", "2", "3", "2"],
        ["", "", "inductor", "yes", "max-autotune", "yes", "true", "none", "yes", "4", "yes", "yes"],
    ]
    content = run(tmp_path / "a.yaml", monkeypatch, *itertools.chain(*parts))
    fsdp = content["fsdp"]
    assert (fsdp["wrap_policy"], fsdp["min_num_params"]) == ("size", 1000)
    assert content["parallel"] == {"tp_size": 2, "dp_replicate_size": 2}
    shown = capsys.readouterr().out
    assert "'3' does not fit: expected a divisor of the 8 processes" in shown
    assert "'3' does not fit: expected a divisor of 4, and smaller" in shown
    assert fsdp["cpu_ram_efficient_loading"] is True
    assert content["compile"] == {"backend": "inductor", "mode": "max-autotune", "fullgraph": True, "dynamic": True}
    assert (content["launch"]["num_cpu_threads_per_process"], content["launch"]["enable_cpu_affinity"]) == (4, True)
    assert content["debug"] is True


def test_a_deepspeed_job_has_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    answers = ["yes", "", "deepspeed", "2", "", "4", "3", "nvme", "no", str(tmp_path), "", "", "", "A,B", "-1", "0.5"]
    content = run(tmp_path / "a.yaml", monkeypatch, *answers, *[""] * 4)
    assert content["deepspeed"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": str(tmp_path),
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero3_save_16bit_model": True,
        "deepspeed_moe_layer_cls_names": "A,B",
        "gradient_clipping": 0.5,
    }
    assert resolve(file=tmp_path / "a.yaml").config.strategy == "deepspeed"
    assert "zero_stage: 3  # what is sharded" in (tmp_path / "a.yaml").read_text()
    shown = capsys.readouterr().out
    assert "'4' does not fit: expected one of 1, 2, 3" in shown
    assert "'no' does not fit: expected a folder that exists" in shown
    assert "'-1' does not fit: expected a number above 0" in shown


def test_a_deepspeed_job_may_have_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n")
    answers = ["yes", "2", "deepspeed", "pdsh", str(hosts), "", "two:0", *[""] * 8]
    content = run(tmp_path / "a.yaml", monkeypatch, *answers)
    block = {"deepspeed_multinode_launcher": "pdsh", "deepspeed_hostfile": str(hosts)}
    assert content["deepspeed"].items() >= {**block, "deepspeed_exclusion_filter": "two:0"}.items()
    assert content["launch"] == {"num_machines": 2}


def test_what_a_file_of_deepspeeds_own_says_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    own = tmp_path / "zero.json"
    own.write_text('{"bf16": {"enabled": true}, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}')
    content = run(tmp_path / "a.yaml", monkeypatch, "yes", "", "deepspeed", "2", "none.json", str(own), "", "")
    assert content["deepspeed"] == {"deepspeed_config_file": str(own)}
    assert not {"mixed_precision", "accumulation"} & content.keys()
    config = resolve(file=tmp_path / "a.yaml").config
    assert (config.mixed_precision, config.accumulation.num_steps) == ("bf16", 4)
    shown = capsys.readouterr().out
    assert "'none.json' does not fit: expected a file that exists" in shown
    assert PRECISION not in shown
    assert STEPS not in shown


def test_a_file_is_replaced_only_when_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    path = tmp_path / "mine.yaml"
    path.write_text("debug: true\n")
    for answers in ([""], ["no"], ["yes", "", "", ""]):
        answer(monkeypatch, *answers)
        assert main(["config", "--config_file", str(path)]) == 2
        assert path.read_text() == "debug: true\n"
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].endswith(f" {path} exists and was left as it is; name another file with --config_file")
    assert errors[2].endswith(" the input ended before the last answer; nothing was written, start again")
    assert "debug" not in run(path, monkeypatch, "yes", *[""] * 9)
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert main(["config", "--config_file", str(tmp_path / "a.yaml")]) == 130
    assert capsys.readouterr().err == "\naccel-trainer config: stopped by ctrl-C\n"
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    (tmp_path / "file").touch()
    answer(monkeypatch, *[""] * 9)
    assert main(["config", "--config_file", str(tmp_path / "file" / "a.yaml")]) == 2
    assert "a.yaml cannot be written: " in capsys.readouterr().err


def test_the_file_may_be_named_before_and_after_default(tmp_path: Path):
    assert main(["config", "--config_file", str(tmp_path / "a.yaml"), "default"]) == 0
    assert main(["config", "default", "--config_file", str(tmp_path / "b.yaml")]) == 0
    assert (tmp_path / "a.yaml").read_text() == (tmp_path / "b.yaml").read_text()


def test_show_prints_a_file_of_accelerate_as_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    assert main(["config", "show", "--config_file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {path}\n")
    assert resolve(file=yaml.safe_load(printed)).config == resolve(file=str(path)).config
    assert "mixed_precision: bf16  # no, bf16" in printed


def test_update_writes_a_file_anew_as_one_of_ours(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    before = resolve(file=str(path)).config
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert "distributed_type" not in path.read_text()
    assert resolve(file=str(path)).config == before


def test_update_keeps_long_values_values_of_several_lines_and_the_files_mode(tmp_path: Path):
    path = tmp_path / "run.yaml"
    folder = "/mnt/shared drive/" + "very long folder name/" * 7
    path.write_text(f"strategy: ddp\nlaunch: {{log_dir: '{folder}'}}\ncompile: {{backend: \"a\\nb\"}}\n")
    path.chmod(0o600)
    before = resolve(file=str(path)).config
    assert before.compile.backend == "a\nb"
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert resolve(file=str(path)).config == before
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_update_that_leaves_something_out_says_so_and_keeps_the_file_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, kept = tmp_path / "run.yaml", tmp_path / "run.yaml.bak"
    text = (
        "distributed_type: MULTI_GPU\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    )
    path.write_text(text)
    path.chmod(0o600)
    assert main(["config", "update", "--config_file", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"- fsdp_config at {path}:3 is not used: distributed_type is MULTI_GPU\n"
    assert captured.out == f"configuration written to {path}; as it was it is in {kept}\n"
    assert kept.read_text() == text
    assert kept.stat().st_mode & 0o777 == 0o600
    path.write_text(text)
    assert main(["config", "update", "--config_file", str(path)]) == 2
    assert f"{kept} is in the way" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show"], "there is no .*default_config.yaml; make it with `accel-trainer config`"),
        (["update", "--config_file", "full_shard"], "full_shard would be written as YAML; give it the suffix .yaml"),
    ],
)
def test_a_file_that_cannot_be_shown_or_updated(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["config", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "schema"]) == 0
    assert "mixed_precision" in json.loads(capsys.readouterr().out)["properties"]
