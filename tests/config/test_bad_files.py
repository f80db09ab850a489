"""Files that must be refused, each with the exact text of its message."""

from __future__ import annotations

import pytest

from accel_trainer.config import read_file
from accel_trainer.errors import ConfigError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{previous}'] * 10)}]\n" for previous, name in zip("abcde", "bcdef", strict=True)
)

# name of the case, file name, content, message
BAD_FILES = [
    (
        "unknown_key",
        "train.yaml",
        "strategy: fsdp2\n"
        "mixed_precision: bf16\n"
        "accumulation:\n"
        "  num_steps: 2\n"
        "\n"
        "# a comment\n"
        "\n"
        "gradient_acumulation_steps: 2\n",
        "unknown key 'gradient_acumulation_steps' at train.yaml:8; did you mean 'gradient_accumulation_steps'?",
    ),
    (
        "unknown-nested",
        "train.yaml",
        "strategy: fsdp2\nfsdp:\n  wrap_polcy: size\n",
        "unknown key 'wrap_polcy' in 'fsdp' at train.yaml:3; did you mean 'wrap_policy'?",
    ),
    (
        "hf-spelling-in-own",
        "train.yaml",
        "strategy: fsdp2\nfsdp:\n  sharding_strategy: FULL_SHARD\n",
        "unknown key 'sharding_strategy' in 'fsdp' at train.yaml:3; here it is called 'reshard_after_forward'",
    ),
    (
        "section-key-at-top",
        "train.yaml",
        "strategy: ddp\nnum_processes: 2\n",
        "unknown key 'num_processes' at train.yaml:2; it belongs into the section 'launch'",
    ),
    (
        "unquoted-no",
        "train.yaml",
        "mixed_precision: no\n",
        "mixed_precision at train.yaml:1 is false; expected one of 'no', 'bf16', 'fp16', 'fp8'; YAML reads "
        "an unquoted no as false: write 'no' in quotes",
    ),
    (
        "enum-typo",
        "train.yaml",
        "mixed_precision: bf61\n",
        "mixed_precision at train.yaml:1 is 'bf61'; expected one of 'no', 'bf16', 'fp16', 'fp8'; did you mean 'bf16'?",
    ),
    (
        "wrong-type-int",
        "train.yaml",
        "accumulation:\n  num_steps: two\n",
        "accumulation.num_steps at train.yaml:2 is 'two'; expected a whole number",
    ),
    (
        "quoted-int",
        "train.yaml",
        "accumulation:\n  num_steps: '2'\n",
        "accumulation.num_steps at train.yaml:2 is '2'; expected a whole number without quotes",
    ),
    (
        "quoted-bool",
        "train.yaml",
        "use_cpu: 'true'\n",
        "use_cpu at train.yaml:1 is 'true'; expected true or false without quotes",
    ),
    (
        "leading-zero",
        "train.yaml",
        "launch:\n  num_processes: 010\n",
        "launch.num_processes at train.yaml:2 is '010'; expected a whole number; a leading zero means "
        "octal to some readers: write 10",
    ),
    (
        "range",
        "train.yaml",
        "accumulation: {num_steps: 0}\n",
        "accumulation.num_steps at train.yaml:1 is 0; expected a whole number of at least 1",
    ),
    (
        "float",
        "train.yaml",
        "timeout_seconds: soon\n",
        "timeout_seconds at train.yaml:1 is 'soon'; expected a number",
    ),
    (
        "negative-timeout",
        "train.yaml",
        "timeout_seconds: -1e-5\n",
        "timeout_seconds at train.yaml:1 is -1e-05; expected a positive number of seconds, 1e9 at most",
    ),
    (
        "endless-timeout",
        "train.json",
        '{"timeout_seconds": 1' + "0" * 400 + "}",
        f"timeout_seconds at train.json:1 is 1{'0' * 76}...; expected a finite number",
    ),
    (
        "timeout-of-torch",
        "train.yaml",
        "timeout_seconds: 1e10\n",
        "timeout_seconds at train.yaml:1 is 10000000000.0; expected a positive number of seconds, 1e9 at most",
    ),
    (
        "tee",
        "train.yaml",
        "launch: {tee: both}\n",
        "launch.tee at train.yaml:1 is 'both'; expected a number from 0 to 3 (1 output, 2 errors, 3 both), or one for "
        "each local rank: '0:3,1:2'",
    ),
    (
        "section-scalar",
        "train.yaml",
        "fsdp: true\n",
        "fsdp at train.yaml:1 is true; expected a section with the keys reshard_after_forward, "
        "wrap_policy, wrap_classes, min_num_params, offload_params, activation_checkpointing, "
        "cpu_ram_efficient_loading, state_dict_type, ignored_modules, backward_prefetch, forward_prefetch, "
        "replicate_size, replicate_per_node",
    ),
    (
        "duplicate",
        "train.yaml",
        "strategy: ddp\nuse_cpu: true\nstrategy: fsdp2\n",
        "key 'strategy' at train.yaml:3 was already given at line 1; keep one of the two",
    ),
    (
        "dup-json",
        "train.json",
        '{\n "strategy": "ddp",\n "strategy": "fsdp2"\n}',
        "key 'strategy' at train.json:3 was already given at line 2; keep one of the two",
    ),
    (
        "alias-bomb",
        "train.yaml",
        BOMB,
        "train.yaml:4 brings the file to more than 10000 values with its aliases expanded; a configuration "
        "has a few hundred",
    ),
    (
        "self-alias",
        "train.yaml",
        "fsdp: &x\n  fsdp: *x\n",
        "alias *x at train.yaml:2 has no finished anchor &x before it; write the value out, and note that "
        "an anchor cannot contain itself",
    ),
    (
        "merge",
        "train.yaml",
        "base: &b\n  num_steps: 2\naccumulation:\n  <<: *b\n",
        "merge key << at train.yaml:4 is not supported; write the keys out",
    ),
    (
        "tag",
        "train.yaml",
        "strategy: !!python/object/apply:os.system ['true']\n",
        "2 problems in train.yaml:\n"
        "  - tag !!python/object/apply:os.system at train.yaml:1 is refused: a configuration holds plain "
        "values only\n"
        "  - strategy at train.yaml:1 is ['true']; expected text",
    ),
    (
        "two-docs",
        "train.yaml",
        "strategy: ddp\n---\nstrategy: fsdp2\n",
        "train.yaml:2 starts a second document; a configuration is one document",
    ),
    (
        "syntax",
        "train.yaml",
        "fsdp:\n  wrap_policy: size\n wrap_classes: []\n",
        "train.yaml:3 is not valid YAML: expected <block end>, but found '<block mapping start>'; check "
        "the indentation",
    ),
    (
        "tab",
        "train.yaml",
        "fsdp:\n\twrap_policy: size\n",
        "train.yaml:2 is not valid YAML: found character '\\t' that cannot start any token; indent with spaces",
    ),
    (
        "empty",
        "train.yaml",
        "# nothing\n",
        "train.yaml is empty; expected a mapping of options",
    ),
    (
        "list",
        "train.yaml",
        "- strategy\n",
        "train.yaml holds ['strategy']; expected a mapping of options",
    ),
    (
        "json-trailing-comma",
        "train.json",
        '{\n "strategy": "ddp",\n}',
        "train.json:3 is not valid JSON: Expecting property name enclosed in double quotes (column 1)",
    ),
    (
        "json-nan",
        "train.json",
        '{"timeout_seconds": NaN}',
        "train.json holds NaN, which is not a value of JSON; use a finite number",
    ),
    (
        "regex",
        "train.yaml",
        "fsdp:\n  ignored_modules: ['(']\n",
        "fsdp.ignored_modules at train.yaml:2 is ['(']; expected a list of valid regular expressions for module names",
    ),
    (
        "classes",
        "train.yaml",
        "fsdp:\n  wrap_classes: [1, 2]\n",
        "fsdp.wrap_classes at train.yaml:2 is [1, 2]; expected a list of names",
    ),
    (
        "deep-nesting",
        "train.yaml",
        "deepspeed: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]\n",
        "train.yaml:1 is nested deeper than 32 levels; a configuration has few",
    ),
    (
        "unknown-key-only",
        "train.yaml",
        "num_proceses: 2\n",
        "unknown key 'num_proceses' at train.yaml:1; did you mean 'num_processes'?",
    ),
    (
        "several-problems",
        "train.yaml",
        "strategy: fsdp2\n"
        "mixed_precision: fp61\n"
        "fsdp:\n"
        "  wrap_policy: big\n"
        "  offload: true\n"
        "launch:\n"
        "  num_processes: -2\n"
        "  main_process_port: 70000\n",
        "5 problems in train.yaml:\n"
        "  - mixed_precision at train.yaml:2 is 'fp61'; expected one of 'no', 'bf16', 'fp16', 'fp8'; did "
        "you mean 'fp16'?\n"
        "  - fsdp.wrap_policy at train.yaml:4 is 'big'; expected one of 'transformer', 'size', 'none'\n"
        "  - unknown key 'offload' in 'fsdp' at train.yaml:5; did you mean 'offload_params'?\n"
        "  - launch.num_processes at train.yaml:7 is -2; expected a whole number of at least 1\n"
        "  - launch.main_process_port at train.yaml:8 is 70000; expected a port number from 0 to 65535",
    ),
]


@pytest.mark.parametrize(
    ("file_name", "content", "message"), [case[1:] for case in BAD_FILES], ids=[c[0] for c in BAD_FILES]
)
def test_a_bad_file_is_refused_with_this_message(tmp_path, monkeypatch, file_name, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / file_name).write_text(content, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_file(file_name)

    assert str(caught.value) == message


def test_there_are_bad_files_of_every_kind_and_each_case_has_its_own_name():
    names = [case[0] for case in BAD_FILES]

    assert len(names) == len(set(names)) >= 25
