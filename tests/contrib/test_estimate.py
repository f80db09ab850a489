"""`accel-trainer estimate`, against models that are built, and the figures of accelerate 1.15's own tests."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import LlamaConfig, LlamaForCausalLM

from accel_trainer.commands.estimate import (
    create_empty_model,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)
from accel_trainer.config import resolve
from accel_trainer.contrib import empty_models, estimate, layouts
from accel_trainer.contrib.planner import PARTS, Cluster, Workload, plan_layout
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, MissingExtraError, size_in_words
from accel_trainer.launch.cli import main

SMALL: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip
CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(8, 4)
        self.post_init()
"""


def write(directory: Path, content: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return str(directory)


def row(words: list[str]) -> list[Any]:
    return gather_data(estimate_command_parser().parse_args(words))[0]


@pytest.mark.parametrize("is_tied", [False, True])
def test_sizes_are_those_of_the_model_that_the_configuration_names(is_tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, tie_word_embeddings=is_tied, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    built = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=is_tied))
    own = [*built.parameters(), *built.buffers()]
    num_bytes = sum(4 * each.numel() for each in own)
    layer = sum(4 * each.numel() for each in built.model.layers[0].parameters())
    training = {"model": num_bytes, "gradients": num_bytes, "optimizer": 2 * num_bytes, "step": 4 * num_bytes}

    model = create_empty_model(str(tmp_path), None)
    assert isinstance(model, LlamaForCausalLM)
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert row([str(tmp_path), "--dtypes", "float32"]) == ["float32", layer, num_bytes, training]
    half = {name: size / 2 for name, size in training.items()}
    assert row([str(tmp_path / "config.json"), "--dtypes", "bfloat16"]) == ["bfloat16", layer / 2, num_bytes / 2, half]


def test_parts_with_a_dtype_of_their_own_are_measured_alike(tmp_path: Path) -> None:
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision, text = {**part, "image_size": 16, "patch_size": 8}, {**part, "vocab_size": 64, "model_type": "llama"}
    rows = []
    for dtype in ("float32", "bfloat16"):
        parts = {"text_config": {**text, "dtype": dtype}, "vision_config": {**vision, "dtype": dtype}}
        content = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "dtype": dtype, **parts}
        rows.append(row([write(tmp_path / dtype, content), "--dtypes", "float32"]))
    assert rows[0] == rows[1]


def test_without_a_class_it_is_the_body_as_with_accelerate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = write(tmp_path / "bert", {"model_type": "bert", "vocab_size": 28996})  # bert-base-cased
    assert row([name])[1:3] == [90669056, 433249280]  # of test_cli.py there
    for command in ("estimate", "estimate-memory"):
        assert main([command, name, "--dtypes", "float32", "int4"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"Memory usage of BertModel, loaded from `{name}`",
            "  dtype  Largest Layer  Total Size  Training using Adam",
            "float32      86.47 MiB  413.18 MiB             1.61 GiB",
            "   int4      10.81 MiB   51.65 MiB                  N/A",
        ]


def test_code_beside_the_configuration_runs_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    name = write(tmp_path / "own", {"model_type": "own", "auto_map": auto})
    (tmp_path / "own" / "own_code.py").write_text(CODE)
    with pytest.raises(ConfigError, match="--trust_remote_code"):
        row([name])
    assert row([name, "--trust_remote_code"])[2] == 4 * (8 * 4 + 4)


def test_what_is_not_trained_has_no_training() -> None:
    assert set(estimate_training_usage(100, "int8").values()) == {-1}


def refused(kind: type[Exception]) -> Any:
    error = kind.__new__(kind)

    def ask(*args: Any, **kwargs: Any) -> None:
        raise error

    return ask


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "some/model is gated: log in with `hf auth login`"),
        (RepositoryNotFoundError, "some/model is neither a directory nor a model on the Hub"),
        (
            ConnectionError,
            "the Hub cannot be asked for some/model .ConnectionError.*pass a directory, or --library_name",
        ),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named(
    error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.model_info", refused(error))
    with pytest.raises(CheckpointNotFoundError, match=message):
        row(["some/model"])


def test_the_hub_says_which_library_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = argparse.Namespace(library_name="diffusers")
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: said)
    assert verify_on_hub("some/model") is said
    with pytest.raises(ConfigError, match=r"some/model is of the library diffusers; .*pass --library_name"):
        row(["some/model"])


def test_files_that_are_no_configuration_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointNotFoundError, match=r"notes.txt cannot be read .*give a directory with the config"):
        row([str(tmp_path / "notes.txt")])
    with pytest.raises(ConfigError, match=r"transformers makes no model from the configuration of .*unknown"):
        row([write(tmp_path / "unknown", {"model_type": "no-such-model"})])
    monkeypatch.setattr(empty_models.importlib, "import_module", refused(ImportError))
    with pytest.raises(MissingExtraError, match="is a model of timm, which is not installed: pip install timm"):
        row([write(tmp_path / "timm", {"architecture": "resnet18"})])


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(**SMALL, max_position_embeddings=64, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def llama(saved_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no default configuration
    return saved_llama


_plans: dict[Any, Any] = {}


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan once, in this process, what comparisons of the layouts of one model and one job ask for again."""
    plan_of = layouts.plan_of

    def plan_once(args: argparse.Namespace, options: Any, flags: dict[str, Any]) -> Any:
        key = (args.model_name, args.sequence, *sorted({**options.flags, **flags}.items()))
        if key not in _plans:
            _plans[key] = plan_of(args, options, flags)
        return _plans[key]

    monkeypatch.setattr(layouts, "plan_of", plan_once)
    monkeypatch.setattr(layouts, "_ALONE_SECONDS", float("inf"))  # others import torch for longer than this takes


def test_a_rank_of_a_job_is_planned(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("strategy: fsdp2\nlaunch:\n  num_processes: 4\n")
    picture = tmp_path / "plan.svg"
    assert main(["estimate", llama, "--config", str(tmp_path / "job.yaml"), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "A rank of dp_shard 4 (fsdp2), 1 x 64 for each of 4 reader(s), AdamW" in text
    for words in ("parameters", "Policies; this plan has off", "computed again", "peak", "all_gather", "not hidden"):
        assert words in text
    bars = ElementTree.parse(picture).getroot().findall("{*}rect")
    assert len(bars) == 2 * len(PARTS)  # the legend's and the plan's
    assert main(["estimate", llama, "--num_processes", "8", "--json", "--parallel_tp_size", "2", "--batch", "3"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {axis: size for axis, size in plan["sizes"].items() if size > 1} == {"dp_shard": 4, "tp": 2}
    assert (plan["rows"], plan["peak"]) == (12, sum(plan["peak_parts"].values()))
    assert {each["kind"] for each in plan["exchanges"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_a_job_on_the_cpu_is_planned_with_a_cpus_kernels(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for words in ([], ["--cpu"]):
        estimate.run_estimate([llama, "--num_processes", "1", "--sequence", "2", "--json", *words])
        found.append(json.loads(capsys.readouterr().out))
    gpu, cpu = found
    # One parameter after the other is updated there; here all at once, with as many temporaries.
    assert cpu["peak"] < gpu["peak"]
    config = LlamaConfig(**SMALL)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    workload = Workload(sequence=2, is_on_gpu=False)
    assert cpu["peak"] == plan_layout(model, resolve(file={}, environ={}), 1, workload, Cluster()).peak


def test_layouts_that_fit_are_ranked(llama: str, remembered: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", llama, "--num_processes", "2", "--compare", "--sequence", "32"]
    assert main([*words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    layouts = {(*(axis for axis, size in plan["sizes"].items() if size > 1), plan["recomputes"]) for plan in plans}
    assert layouts == {("dp_replicate", False), *itertools.product(("dp_shard", "sp", "tp"), (False, True))}
    assert plans == sorted(plans, key=lambda plan: plan["seconds_per_row"])
    limit = sorted(plan["peak"] for plan in plans)[2]
    assert main([*words, "--memory", f"{limit}B"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 + 2
    assert lines[-2].startswith(f"4 more need above {limit}B: ")
    fastest = next(plan for plan in plans if plan["peak"] <= limit)
    assert lines[-1].startswith("The first: accel-trainer launch --use_fsdp --parallel_")
    for axis in ("tp", "sp"):
        assert (f"{axis}_size {fastest['sizes'][axis]}" in lines[-1]) == (fastest["sizes"][axis] > 1)


def test_processes_that_share_out_layouts_find_the_same_plans(
    llama: str, remembered: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["estimate", llama, "--num_processes", "2", "--compare", "--sequence", "32", "--json"]
    assert main(words) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(layouts, "_ALONE_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "usable_cores", lambda: 2)
    assert main(words) == 0
    assert capsys.readouterr().out == expected


def test_a_mixture_is_planned_as_if_its_experts_got_as_many_tokens_each(tmp_path: Path, capsys: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2, "vocab_size": 64}))
    words = ["estimate", str(tmp_path), "--num_processes", "4", "--sequence", "32", "--parallel_ep_size", "2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "A rank of dp_shard 4, ep 2 (fsdp2), 1 x 32 for each of 4 reader(s), AdamW" in text
    assert "all_to_all" in text
    assert text.splitlines()[-1] == "Routing is assumed to be balanced: each expert gets as many tokens as the others"


def test_comparisons_go_by_the_machines_that_are_configured(
    llama: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def note(args: argparse.Namespace, layouts: Any, plan: Any) -> Any:
        asked.extend(layouts)
        raise ConfigError("enough")

    monkeypatch.setattr(estimate, "outcomes", note)
    assert main(["estimate", llama, "--num_processes", "8", "--num_machines", "4", "--compare"]) == 2
    # Two ranks a machine: nothing but shards of the state goes over more.
    assert {flags["parallel.tp_size"] for flags in asked} == {1, 2}
    assert main(["estimate", llama, "--num_processes", "8", "--num_machines", "4", "--sequence", "2"]) == 0
    assert "between machines of 2," in capsys.readouterr().out.replace("\n", " ")


def test_layouts_have_shards_over_all_ranks_or_a_machines(llama: str) -> None:
    words = [llama, "--num_processes", "32", "--ranks_per_node", "8"]
    args = estimate._with_defaults(estimate_command_parser().parse_args(words))
    found = list(layouts.candidates(args, estimate._layout_options(args)))
    axes = ("dp_replicate", "dp_shard", "tp", "sp", "ep")
    sizes = [tuple(flags[f"parallel.{axis}_size"] for axis in axes) for flags in found]
    assert sizes[0] == (32, 1, 1, 1, 1)
    assert sizes[1::2] == sizes[2::2]  # twice each, without and with checkpointing
    by_parts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for replicas, shards, *parts in sizes[1::2]:
        by_parts.setdefault(tuple(parts), []).append((replicas, shards))
    assert {parts[:2]: layouts for parts, layouts in by_parts.items() if parts[2] == 1} == {
        (1, 1): [(1, 32), (4, 8)],
        (2, 1): [(1, 16), (4, 4), (16, 1)],
        (4, 1): [(1, 8), (4, 2), (8, 1)],
        (8, 1): [(1, 4), (4, 1)],
        (1, 2): [(1, 16), (4, 4)],
        (1, 4): [(1, 8), (4, 2)],
        (1, 8): [(1, 4), (4, 1)],
        (2, 2): [(1, 8), (4, 2)],
        (2, 4): [(1, 4), (4, 1)],
        (4, 2): [(1, 4), (4, 1)],
    }
    # Experts over neighbours of a machine; beside slices of sequences, over all of it; beside layers' parts, nowhere.
    assert {parts for parts in by_parts if parts[2] > 1} == {
        (1, 1, 2),
        (1, 1, 4),
        (1, 1, 8),
        *((1, n, 8) for n in (2, 4, 8)),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "full_shard"], "needs the number of processes; add --num_processes N"),
        (["--num_processes", "4", "bf16"], "bf16 belongs to no option; the model comes first"),
        (["--num_processes", "4", "--use_fsdp", "--parallel_tp_size", "3"], "makes 3 process.es., and this job has 4"),
        (["--num_processes", "1", "--optimizer", "LBFGS"], "LlamaForCausalLM cannot take a step .*closure"),
        (["--num_processes", "1", "--optimizer", "Muon"], r"LlamaForCausalLM cannot take a step .*\(ValueError: Muon"),
        (["--num_processes", "1", "--batch", "-1"], "--batch is -1; give a number above 0"),
        (["--num_processes", "1", "--sequence", "0"], "--sequence is 0; give a number above 0"),
        (["--num_processes", "1", "--ranks_per_node", "0"], "--ranks_per_node is 0; give a number above 0"),
        (["--num_processes", "1", "--teraflops", "nan"], "--teraflops is nan; give a number above 0"),
        (["--num_processes", "1", "--picture", "gone/plan.svg"], "plan.svg cannot be written: there is no gone; name"),
        (
            ["--num_processes", "1", "--fit", "1GiB", "--global_batch", "1", "--write", "gone/run.yaml"],
            "--write gone/run.yaml cannot be written: there is no gone; name another file",
        ),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused(llama: str, words: list[str], message: str, capsys: Any) -> None:
    assert main(["estimate", llama, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("words", ["--batch 1 --lora 16", "--fit 80GiB", "--json", "--load-in-4bit --optimizer SGD"])
def test_options_of_a_rank_need_a_job(llama: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word.replace("-in-", "_in_") for word in words.split() if word.startswith("--")]
    assert main(["estimate", llama, *words.split()]) == 2
    printed = capsys.readouterr()
    assert re.search(f"{', '.join(given)}: of a rank of a job, and no job is given", printed.err)
    assert not printed.out


def test_a_plan_says_whether_it_fits_a_ranks_memory(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", llama, "--num_processes", "1", "--sequence", "16"]
    assert main([*words, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak"]
    for left, verdict in (
        (2048, "and 2.00 KiB of {size} are left"),
        (-2048, "2.00 KiB more than {size}, and does not fit"),
    ):
        size = f"{int(1.05 * peak) + left}B"
        assert main([*words, "--memory", size]) == 0
        last = f"a rank needs {size_in_words(1.05 * peak)}, {verdict.format(size=size)}"
        assert capsys.readouterr().out.splitlines()[-1].endswith(last)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--global_batch 8 --write FILE", "--global_batch, --write: of --fit SIZE, which is not given"),
        ("--fit 1GiB --global_batch 8 --batch 2 --compare", "--batch, --compare: of plans, and --fit writes"),
        ("--fit 1GiB --global_batch 8 --memory 1GiB --json", "--memory, --json: of plans, and --fit writes"),
        ("--json --memory 1GiB", "--memory: of tables and pictures, and --json has the peak of each plan"),
        ("--dtypes bfloat16", "--dtypes: of sizes without a job; the weights of a plan are of --dtype"),
    ],
)
def test_options_that_would_change_nothing_are_refused(llama: str, words: str, message: str, capsys: Any) -> None:
    assert main(["estimate", llama, "--num_processes", "2", *words.split()]) == 2
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert not printed.out


def test_options_of_launch_belong_to_a_job(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", llama, "--mixed_precision", "bf16"])
    assert "unrecognized arguments: --mixed_precision bf16" in capsys.readouterr().err


def test_adapters_are_asked_for_by_name_and_need_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model", LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).to_dict())
    words = [folder, "--num_processes", "1"]
    with pytest.raises(ConfigError, match=r"--load_in_4bit is for a frozen model, .* add --lora RANK"):
        estimate.run_estimate([*words, "--load_in_4bit"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="adapters are those of PEFT, which is not installed: pip install peft"):
        estimate.run_estimate([*words, "--lora", "4"])
