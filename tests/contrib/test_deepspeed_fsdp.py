"""Configurations in other spellings and for other engines: `accel-trainer convert`, `to-fsdp2` and what is lost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_trainer.commands.to_fsdp2 import convert_config_to_fsdp2, to_fsdp2_command, to_fsdp2_command_parser
from accel_trainer.config import build_config, field_specs, packaged_names, read_file, resolve
from accel_trainer.config.schema import get_value
from accel_trainer.contrib.deepspeed_fsdp import to_deepspeed, to_fsdp
from accel_trainer.errors import ConfigError
from accel_trainer.launch.cli import main


def test_a_file_is_converted_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(engine), encoding="utf-8")
    there, back = tmp_path / "fsdp.yaml", tmp_path / "back.json"

    assert main(["convert-config", str(tmp_path / "ds.json"), str(there)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'ds.json'} -> {there}",
        "- gradient_clipping has no counterpart: call accelerator.clip_grad_norm_ before the step, or set "
        "max_grad_norm of TrainingArguments",
    ]
    assert there.read_text(encoding="utf-8") == "strategy: fsdp2\nmixed_precision: bf16\n"

    assert main(["convert-config", str(there), str(back)]) == 0
    assert resolve(file=back).config.mixed_precision == "bf16"
    assert json.loads(back.read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 3


def test_an_accelerate_file_keeps_what_is_not_deepspeeds(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 2\n")
    assert main(["convert-config", str(path), str(tmp_path / "out.yml")]) == 0
    config = resolve(file=tmp_path / "out.yml").config
    assert (config.strategy, config.launch.num_processes, config.deepspeed) == ("fsdp2", 4, {})


SOURCES = {
    "accelerate 0.12": "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 4\nmachine_rank: 0\n",
    "accelerate, FSDP1": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n"
    "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 1000\n  fsdp_sharding_strategy: 2\n",
    "accelerate, ZeRO": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 3\n"
    "  gradient_accumulation_steps: 4\n  offload_param_device: cpu\n  zero3_init_flag: true\n",
    "ours, FSDP2": "strategy: fsdp2\nuse_cpu: true\n"
    "fsdp: {wrap_classes: [A, B], ignored_modules: [head], backward_prefetch: false}\n"
    "compile: {backend: inductor, dynamic: true}\naccumulation: {num_steps: 3}\nlaunch: {num_processes: 4}\n",
    "ours, ZeRO": "strategy: deepspeed\nmixed_precision: bf16\n"
    "deepspeed: {zero_optimization: {stage: 2, overlap_comm: true}}\n",
    "fsdp_config": '{"reshard_after_forward": false, "transformer_layer_cls_to_wrap": ["A"], "version": 2}',
    "DeepSpeed": '{"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}, "gradient_clipping": 1.0}',
}


@pytest.mark.parametrize("to", ["ours", "accelerate", "fsdp2", "fsdp_config", "deepspeed"])
@pytest.mark.parametrize("name", SOURCES)
def test_what_is_written_says_the_same_or_a_line_says_what_not(
    name: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.yaml", tmp_path / f"out.{'json' if to in ('deepspeed', 'fsdp_config') else 'yaml'}"
    source.write_text(SOURCES[name])
    before = resolve(file=source).config
    if to == "fsdp_config" and before.strategy == "ddp":
        assert main(["convert", str(source), str(target), "--to", to]) == 2
        assert "strategy=ddp shards nothing" in capsys.readouterr().err
        return
    assert main(["convert", str(source), str(target), "--to", to]) == 0
    lines = capsys.readouterr().out
    after = resolve(file=target).config
    engine = {"deepspeed": "deepspeed", "fsdp_config": "fsdp2", "fsdp2": "ddp" if before.strategy == "ddp" else "fsdp2"}
    assert after.strategy == engine.get(to, before.strategy)
    for path in field_specs():
        old, new = get_value(before, path), get_value(after, path)
        # What another engine does alike has other names there; see below.
        is_of_an_engine = path == "strategy" or path.partition(".")[0] in ("fsdp", "deepspeed")
        if not (is_of_an_engine and before.strategy != after.strategy or path == "deepspeed"):
            assert old == new or path in lines, (path, old, new, lines)


def test_accelerates_keys_are_spelled_as_accelerate_spells_them(tmp_path: Path) -> None:
    source, target = tmp_path / "in.yaml", tmp_path / "out.yaml"
    source.write_text(SOURCES["ours, FSDP2"])
    assert main(["convert", str(source), str(target), "--to", "accelerate"]) == 0
    content = yaml.safe_load(target.read_text())
    assert content["distributed_type"] == "FSDP"
    assert content["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_transformer_layer_cls_to_wrap": "A,B",
        "fsdp_ignored_modules": ["head"],
    }
    dynamo = {"backend": "inductor", "mode": "default", "use_fullgraph": False, "use_dynamic": True}
    assert content["dynamo_config"] == {f"dynamo_{key}": value for key, value in dynamo.items()}


def test_without_a_target_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", "zero1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "strategy: fsdp2\nfsdp:\n  reshard_after_forward: false\n"
    assert printed.err == "- zero_optimization.stage is 1: FSDP2 shards the gradients too, as stage 2 does\n"
    assert main(["convert-config", "shard_grad_op"]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken.yaml", "{path} exists and was left as it is; remove it first, or name another file"),
        ("out.toml", "{path} has the suffix '.toml'; expected one of .json, .yaml, .yml"),
        ("no/out.json", "{path} cannot be written: there is no {path.parent}; name another file"),
    ],
)
def test_what_cannot_be_written_is_said(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.yaml").write_text("debug: true\n")
    path = tmp_path / name
    assert main(["convert-config", "zero3", str(path)]) == 2
    assert capsys.readouterr().err == f"accel-trainer convert-config: {message.format(path=path)}\n"
    assert (tmp_path / "taken.yaml").read_text() == "debug: true\n"


# --- to-fsdp2 ---------------------------------------------------------------------------------------------------------

FSDP1 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 2
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
mixed_precision: bf16
num_processes: 4
"""


def test_a_file_for_fsdp1_becomes_one_for_fsdp2_that_runs_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(FSDP1)
    assert main(["to-fsdp2", "--config_file", str(old), "--output_file", str(new)]) == 0
    assert capsys.readouterr().out == f"{old} -> {new}\n"
    before, after = read_file(old), read_file(new)
    assert after.content["fsdp_config"] == {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    }
    assert {**after.content, "fsdp_config": {}} == {**before.content, "fsdp_config": {}}
    assert resolve(file=new).config == resolve(file=old).config
    assert after.notes == ()
    left_out = [record.message.partition("=")[0] for record in caplog.records]
    assert left_out == ["fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params"]

    assert main(["to-fsdp2", "--config_file", str(old), "--output_file", str(tmp_path / "new.json")]) == 0
    assert json.loads((tmp_path / "new.json").read_text()) == after.content
    caplog.clear()
    assert main(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    assert read_file(old).content == after.content
    assert main(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    assert "nothing to convert: the file is for FSDP2 already" in caplog.text
    assert read_file(old).content == after.content
    assert convert_config_to_fsdp2({"distributed_type": "NO"}) == {"distributed_type": "NO"}
    of_0_16 = {"fsdp_config": {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}}
    assert convert_config_to_fsdp2(of_0_16) == {"fsdp_config": {"fsdp_version": 2}}


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, [], "in.yaml does not exist; give a file of `accelerate config`"),
        (FSDP1, [], "in.yaml exists, and is left as it is; give another --output_file, or --overwrite"),
        ("strategy: fsdp2", ["--overwrite"], "in.yaml is a file of accel_trainer, and not of accelerate"),
        ("zero_optimization: {stage: 3}", ["--overwrite"], "a file of deepspeed, .* is `accel-trainer convert`"),
        (FSDP1.replace("ategy: 2", "ategy: 3"), ["--overwrite"], "fsdp_sharding_strategy is 3: .*MULTI_GPU"),
        (FSDP1.replace("ategy: 2", "ategy: 4"), ["--overwrite"], "is 4: .*true, .*config_dp_replicate_size"),
    ],
)
def test_what_has_no_form_in_fsdp2_is_refused_and_nothing_is_written(
    content: str | None, words: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "in.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        to_fsdp2_command(to_fsdp2_command_parser().parse_args(["--config_file", str(file), *words]))
    assert (file.read_text() if file.exists() else None) == content


def test_a_program_has_the_command_among_its_own() -> None:
    parser = argparse.ArgumentParser()
    to_fsdp2_command_parser(parser.add_subparsers())
    args = parser.parse_args(["to-fsdp2", "--config_file", "missing.yaml"])
    with pytest.raises(FileNotFoundError, match=r"missing\.yaml does not exist"):
        args.func(args)


# --- DeepSpeed and FSDP2 ----------------------------------------------------------------------------------------------


def fsdp_of(block):
    return to_fsdp(resolve(file={"strategy": "deepspeed", "deepspeed": block}).config)


GRADIENTS_TOO = "zero_optimization.stage is 1: FSDP2 shards the gradients too, as stage 2 does"
PARAMETERS_TOO = (
    "zero_optimization.offload_optimizer.device is 'cpu': fsdp.offload_params keeps the parameters in CPU memory too"
)
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
NUMBERS = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("block", "options", "expected_lost"),
    [
        ({"zero_optimization": {"stage": 0}}, {"strategy": "ddp"}, []),
        ({"zero_optimization": {"stage": 1}}, {"fsdp.reshard_after_forward": False}, [GRADIENTS_TOO]),
        ({"zero_optimization": {"stage": 2}}, {"fsdp.reshard_after_forward": False}, []),
        (
            {"zero_optimization": {"stage": 3, **OFFLOADED}, **NUMBERS},
            {"fsdp.offload_params": True, "mixed_precision": "bf16", "accumulation.num_steps": 4},
            [],
        ),
        ({"zero_optimization": {"stage": "3"}}, {}, []),
        ({"zero_optimization": {"stage": "1"}}, {"fsdp.reshard_after_forward": False}, [GRADIENTS_TOO]),
        (
            {"zero_stage": 2, "offload_optimizer_device": "cpu"},
            {"fsdp.reshard_after_forward": False, "fsdp.offload_params": True},
            [PARAMETERS_TOO],
        ),
    ],
    ids=[
        "nothing is sharded",
        "optimizer state",
        "gradients too",
        "parameters too, offloaded, in bf16",
        "parameters too, as text",
        "optimizer state, as text",
        "half an offload",
    ],
)
def test_stages_become_strategies_and_what_fsdp2_has_is_kept(block, options, expected_lost):
    config, lost = fsdp_of(block)
    assert config == resolve(explicit={"strategy": "fsdp2", **options}).config
    assert lost == expected_lost


@pytest.mark.parametrize("stage", [4, "three", "auto"])
def test_a_stage_that_is_none_is_refused(stage):
    with pytest.raises(ConfigError, match=rf"zero_optimization.stage is '?{stage}'?; expected 0, 1, 2 or 3"):
        fsdp_of({"zero_optimization": {"stage": stage}})


def test_what_has_no_counterpart_is_listed():
    _, lost = fsdp_of(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "gradient_clipping": 1.0,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "wall_clock_breakdown": False,
            "zero3_init_flag": True,
            "deepspeed_hostfile": "hosts",
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "reduce_bucket_size": 1000,
                "stage3_prefetch_bucket_size": "auto",
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "nvme", "nvme_path": "/disk"},
            },
        }
    )
    assert lost == [
        "zero_optimization.offload_param.device is 'nvme': fsdp.offload_params keeps it in CPU memory, there is no "
        "offload to disks",
        "optimizer has no counterpart: build the optimizer in the script",
        "scheduler has no counterpart: build the scheduler in the script",
        "gradient_clipping has no counterpart: call accelerator.clip_grad_norm_ before the step, or set max_grad_norm "
        "of TrainingArguments",
        "train_micro_batch_size_per_gpu has no counterpart: it is the batch size of the data loader",
        "zero3_init_flag has no counterpart: models are built whole, and then sharded",
        "zero_optimization.reduce_bucket_size has no counterpart: 1000 is left out",
        "zero_optimization.offload_param.nvme_path has no counterpart: '/disk' is left out",
        "deepspeed_hostfile has no counterpart: start the script on each machine",
    ]


def test_a_run_with_fsdp_becomes_a_configuration_of_deepspeed():
    config = resolve(
        file={
            "strategy": "fsdp2",
            "mixed_precision": "fp16",
            "accumulation": {"num_steps": 2},
            "fsdp": {
                "offload_params": True,
                "state_dict_type": "sharded",
                "wrap_classes": ["Block"],
                "activation_checkpointing": True,
                "replicate_per_node": True,
                "forward_prefetch": True,
            },
            "compile": {"backend": "inductor"},
            "launch": {"num_processes": 4},
        }
    ).config
    data, lost = to_deepspeed(config)
    assert data == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": True},
    }
    assert lost == [
        "compile.backend='inductor' has no counterpart",
        "fsdp.wrap_classes=['Block'] has no counterpart: DeepSpeed needs no groups of layers",
        "fsdp.activation_checkpointing=true has no counterpart: call model.gradient_checkpointing_enable()",
        "fsdp.forward_prefetch=true has no counterpart",
        "fsdp.replicate_per_node=true has no counterpart; zero_optimization.zero_hpz_partition_size is the nearest",
        "launch.num_processes=4 is no option of DeepSpeed; set it where the run's other options are",
    ]


def test_half_an_offload_and_fp8_are_said():
    half = {"fsdp.reshard_after_forward": False, "fsdp.offload_params": True}
    config = build_config({"strategy": "fsdp2", "mixed_precision": "fp8", **half})
    data, lost = to_deepspeed(config)
    assert data["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert lost == [
        "fsdp.offload_params at stage 2 offloads optimizer state only; the parameters stay on the device",
        "mixed_precision=fp8 has no counterpart",
    ]


@given(
    st.sampled_from(["ddp", "fsdp2"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["no", "bf16", "fp16"]),
    st.integers(1, 9),
)
def test_what_both_have_survives_the_way_there_and_back(strategy, reshards, offloads, precision, steps):
    options = {"strategy": strategy, "mixed_precision": precision, "accumulation.num_steps": steps}
    if strategy == "fsdp2":
        options |= {"fsdp.reshard_after_forward": reshards, "fsdp.offload_params": offloads}
    config = resolve(explicit=options).config

    data, lost = to_deepspeed(config)
    back, _ = to_fsdp(resolve(file=data).config)

    assert back == config
    half = strategy == "fsdp2" and offloads and not reshards
    assert len(lost) == int(half)


@pytest.mark.parametrize("name", packaged_names())
def test_every_packaged_configuration_can_be_converted(name):
    config = resolve(file=name).config
    if config.strategy == "deepspeed":
        assert to_fsdp(config)[0].strategy == "fsdp2"
    else:
        data, _ = to_deepspeed(config)
        assert resolve(file=data).config.strategy == "deepspeed"


def test_what_cannot_be_converted_is_refused():
    with pytest.raises(ConfigError, match=r"^strategy=ddp is not 'deepspeed'; there is nothing to convert to FSDP2$"):
        to_fsdp(resolve(file="ddp").config)
    message = r"^strategy=auto has no counterpart in DeepSpeed; convert a configuration whose strategy is fsdp2 or ddp$"
    with pytest.raises(ConfigError, match=message):
        to_deepspeed(resolve().config)
