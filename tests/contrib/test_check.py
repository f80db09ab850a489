"""`accel-trainer check`: verdicts on lines of scripts and configurations, which are read and not run."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from accel_trainer.contrib.check.changes import CHANGES, Verdict
from accel_trainer.contrib.check.command import check_path, run_check
from accel_trainer.contrib.check.script import Missing, find
from accel_trainer.errors import ConfigError
from tests.migration.accelerate_scripts import NOT_RUN, PROCESSES, find_accelerate
from tests.migration.names import DIFFERENCES

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
import torch
import accelerate
from accelerate import Accelerator, prepare_pippy
from accelerate.utils import ProjectConfiguration
from transformers import Trainer as Base, TrainingArguments, get_scheduler
from trl import SFTTrainer
raise SystemExit("this script was run")
accelerator = Accelerator(gradient_accumulation_steps=2, megatron_lm_plugin=plugin, logdir="x")
model, schedule = accelerator.prepare(model, get_scheduler("linear", optimizer))
accelerator.wait_for_everyone()
accelerator.state.fork_launched
accelerator.flag_tensor
accelerator.load_state(directory, strict=False)
accelerate.utils.no_such_name
args = TrainingArguments("run", warmup_ratios=0.1)
class Own(Base):
    def training_step(self, model, inputs, n=None):
        return model(**inputs).loss
    def roll_back(self):
        return super().log({})
    def log(self, logs):
        super().log(logs)
trainer = Own(args=args)
trainer.train(resume_from_checkpoint=True)
torch.accelerator.current_accelerator()
"""


def verdicts(tmp_path: Path, text: str, name: str = "script.py", **options: bool) -> list[tuple[int, str, str]]:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    found = check_path(file, **options)
    return [(each.line, str(each.verdict), f"{each.words} -> {each.instead}") for each in found]


def test_each_line_has_its_verdict(tmp_path):
    found = verdicts(tmp_path, SCRIPT)

    for line, verdict, words in (
        (2, "import", "import accelerate -> import accel_trainer as accelerate"),
        (3, "replace", "accelerate.prepare_pippy is not here: pipeline-parallel inference is not offered; use torch."),
        (3, "import", "from accelerate import Accelerator -> from accel_trainer import Accelerator"),
        (4, "import", "from accelerate.utils import ProjectConfiguration -> from accel_trainer.utils import ProjectC"),
        (
            5,
            "import",
            "from transformers import Trainer as Base, TrainingArguments -> from accel_trainer import Trainer as",
        ),
        (6, "import", "trl.SFTTrainer runs on transformers' own Trainer -> class SFTTrainer(trl.SFTTrainer, accel_tr"),
        (8, "replace", "Accelerator(megatron_lm_plugin=...) is Megatron-LM, which is not offered"),
        (8, "replace", "Accelerator() takes no argument logdir"),
        (8, "changes", "Accelerator(): gradients of a short last window are the mean over what it holds"),
        (9, "changes", "Accelerator.prepare(): a prepared schedule steps once per update, not once for each process"),
        (10, "works", "Accelerator.wait_for_everyone()"),
        (12, "replace", "Accelerator.flag_tensor is not here: internal there: `set_trigger` and `check_trigger`"),
        (13, "replace", "Accelerator.load_state(): a state is loaded as a whole: strict=False is an error"),
        (14, "replace", "accelerate.utils.no_such_name is not here: there is no such name"),
        (15, "replace", "TrainingArguments() takes no argument warmup_ratios; did you mean 'warmup_steps'?"),
        (17, "changes", "Own.training_step takes the place of the Trainer's own, which does more"),
        (19, "replace", "Own.roll_back: the Trainer here has that name for itself -> another name"),
        (24, "changes", "Trainer.train(): a resume with another number of samples in an update is an error"),
    ):
        assert [text for at, kind, text in found if (at, kind) == (line, verdict) and text.startswith(words)], words
    assert {line for line, *_ in found} <= {2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 17, 19, 24}


ACCUMULATES = """\
from accelerate import Accelerator
accelerator = Accelerator()
unet = UNet.from_pretrained("sd")
inner = Layers(unet)
held = Text()
inner, optimizer = accelerator.prepare(inner, optimizer)
models = [inner]
def step(given):
    with accelerator.accumulate(unet), accelerator.accumulate(inner):
        accelerator.accumulate(models)
        accelerator.accumulate(given)
        accelerator.accumulate(held)
"""


def test_a_model_that_no_prepare_gets_does_not_accumulate(tmp_path):
    """As in diffusers' custom_diffusion, which prepares the trained layers and accumulates the model around them."""
    words = "Accelerator.accumulate({}): no prepare() of this file gets {}, and prepared models are what it takes -> "
    found = [each for each in verdicts(tmp_path, ACCUMULATES) if each[1] == "replace"]
    assert found == [(line, "replace", words.format(name, name)) for line, name in ((9, "unet"), (12, "held"))]
    listed = ACCUMULATES.replace("prepare(inner, optimizer)", "prepare(*everything)")
    assert not [each for each in verdicts(tmp_path, listed) if each[1] == "replace"]


def test_an_accelerator_that_a_condition_chooses_is_one(tmp_path):
    """As in transformers' run_glue_no_trainer, and run_ner_no_trainer and run_translation_no_trainer."""
    text = (
        "from accelerate import Accelerator\n"
        "accelerator = (Accelerator(log_with=names) if tracks else Accelerator())\n"
        "other = Accelerator() if first else Accelerator(cpu=True) if second else Accelerator(split_batches=True)\n"
        "accelerator.backward(loss)\n"
        "accelerator.save_state('out')\n"
        "accelerator.no_such_name\n"
        "other.wait_for_everyone()\n"
    )

    found = {(line, verdict, words.partition(":")[0]) for line, verdict, words in verdicts(tmp_path, text)}

    assert {each for each in found if each[0] > 3} == {
        (4, "works", "Accelerator.backward() -> "),
        (5, "changes", "Accelerator.save_state()"),
        (6, "replace", "Accelerator.no_such_name is not here"),
        (7, "works", "Accelerator.wait_for_everyone() -> "),
    }


def test_what_compat_restores_does_not_change(tmp_path):
    text = "from accel_trainer import Accelerator\nAccelerator(gradient_accumulation_steps=2)\n"

    assert "changes" in {verdict for _, verdict, _ in verdicts(tmp_path, text)}
    assert {verdict for _, verdict, _ in verdicts(tmp_path, text, compat=True)} == {"works"}


def test_exit_codes_lines_and_json_are_a_linters(tmp_path, capsys):
    script = tmp_path / "loop.py"
    script.write_text("from accel_trainer import prepare_pippy\n")

    assert run_check([str(script), "--json"]) == 1
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["file"], only["line"], only["verdict"]) == (str(script), 1, "replace")
    assert run_check([str(script)]) == 1
    assert capsys.readouterr().out.startswith(f"{script}:1: replace: accel_trainer.prepare_pippy is not here: ")
    script.write_text("from accel_trainer import AcceleratorState\nstate = AcceleratorState()\nprint(state.device)\n")
    assert run_check([str(script), "--problems"]) == 0
    assert capsys.readouterr() == ("", "2 works, 0 import, 0 changes, 0 replace\n")
    with pytest.raises(ConfigError, match="nowhere is not there; check takes scripts, configurations and folders"):
        run_check(["nowhere"])


def test_a_mark_of_the_byte_order_is_no_part_of_a_script(tmp_path):
    assert verdicts(tmp_path, f"\ufeff{SCRIPT}") == verdicts(tmp_path, SCRIPT)


def test_a_file_that_is_no_python_is_named(tmp_path):
    assert verdicts(tmp_path, "a = 1\nb = = 2\n") == [(2, "replace", "this is not Python: invalid syntax -> ")]


def test_configurations_are_read_as_a_run_reads_them(tmp_path):
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2\n"

    ((line, verdict, words),) = verdicts(tmp_path, text, "file.yaml")
    assert (line, verdict) == (4, "replace")
    assert "did you mean 'fsdp_version'" in words
    text = text.replace("versoin: 2", "version: 1")
    assert [(each[0], each[1]) for each in verdicts(tmp_path, text, "file.yaml")] == [(1, "changes")]
    assert [each[1] for each in verdicts(tmp_path, text.replace("1", "2"), "file.yaml")] == ["works"]


def test_launches_of_shell_scripts_are_read(tmp_path):
    text = (
        "set -e\naccelerate launch --num_processes 2 \\\n  --no_such_flag 3 run.py --own 1\naccelerate launch run.py\n"
    )

    first, second = verdicts(tmp_path, text, "job.sh")
    assert first[:2] == (2, "replace")
    assert "--no_such_flag" in first[2]
    assert second == (4, "import", "accelerate launch -> accel-trainer launch, with the same flags")


def test_a_folder_gives_only_what_has_to_do_with_it(tmp_path):
    (tmp_path / "package.json").write_text('{"name": "other"}')
    (tmp_path / "other.py").write_text("import torch\ntorch.accelerator.current_accelerator()\n")
    (tmp_path / "run.py").write_text("from accelerate import Accelerator\n")

    assert [Path(each.file).name for each in check_path(tmp_path)] == ["run.py"]


def test_our_own_examples_hold_nothing_to_replace():
    found = [each for each in check_path(ROOT / "examples") if each.verdict in (Verdict.REPLACE, Verdict.IMPORT)]

    assert found == []


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.call}-{change.keyword}")
def test_every_change_is_of_a_call_that_is_here(change):
    if change.call == "random_split":  # torch's
        return
    owner, _, method = change.call.rpartition(".")
    found = find(f"accel_trainer.{owner or method}")
    found = find(f"accel_trainer.utils.{owner or method}") if isinstance(found, Missing) else found
    found = find(f"accel_trainer.local_sgd.{method}") if isinstance(found, Missing) else found
    assert not isinstance(found, Missing)
    assert not owner or hasattr(found, method)


@pytest.mark.beside_accelerate
@pytest.mark.skipif(find_accelerate() is None, reason="Hugging Face accelerate is not installed")
def test_no_line_of_accelerates_scripts_works_where_the_script_deviates():
    """Those that test_accelerate_scripts.py runs: what deviates there is not called "works" here."""
    folder = find_accelerate()
    assert folder is not None
    scripts = folder / "test_utils" / "scripts"
    deviating = {(each["script"], check) for each in DIFFERENCES["scripts"] for check in each["checks"]}
    for name in PROCESSES:
        file = scripts.joinpath(*name.split(".")).with_suffix(".py")
        found = list(check_path(file))
        functions = {
            node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
        }
        bad = {each.line for each in found if each.verdict in (Verdict.CHANGES, Verdict.REPLACE)}
        for script, check in deviating:
            if script == name and check in functions:
                assert any(functions[each].lineno <= line <= (functions[each].end_lineno or 0)
                           for each in _reached(functions, check) for line in bad), check  # fmt: skip
        # What is replaced there fails: accelerate's own test_utils aside, which stand beside ours when they are run.
        replaced = [each for each in found if each.verdict is Verdict.REPLACE and "test_utils" not in each.words]
        assert bool(replaced) == ((name, "the whole script") in deviating), replaced
    assert not set(NOT_RUN) & set(PROCESSES)


def _reached(functions: dict[str, ast.FunctionDef], name: str) -> set[str]:
    """Return a function of a script and those that it calls."""
    found, waiting = set[str](), [name]
    while waiting:
        found.add(each := waiting.pop())
        names = {node.id for node in ast.walk(functions[each]) if isinstance(node, ast.Name)}
        waiting += [name for name in names if name in functions and name not in found]
    return found
