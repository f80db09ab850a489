"""What fits a bigger model, asked for by fields of TrainingArguments: the plain loop's numbers, resumed, or a refusal.

Techniques, and where each is refused, are those of tests/conformance/test_techniques.py, whose loops ask for them by a
configuration.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from accel_trainer.errors import ConfigError
from accel_trainer.techniques import activations
from tests.cells import beyond, selected
from tests.conformance.models import GLOBAL_BATCH, build_model, build_samples
from tests.conformance.test_conformance import LAYOUTS, mark
from tests.conformance.test_features import readers_of
from tests.conformance.test_techniques import COLUMNS, SAVED, TECHNIQUES, UPDATES, require_plain_or_refused
from tests.ranks import preload, run_ranks
from tests.trainer_jobs import MULTIPLIES_COPIES

preload("transformers.models.llama.modeling_llama", "accel_trainer.trainer.trainer", "deepspeed")

FIELDS = {"activation_checkpointing": "activation_checkpointing_policy", "loss": "loss_implementation"}
"""Those that are called otherwise than the option."""
SAMPLE = ("tp", "selective, a loss in chunks")
"""Each technique by itself is in other tests of the Trainer, on one process and on shards."""


def train(model: Any, layout: str, title: str, folder: str, resume: str | None = None) -> list[float]:
    """Return losses on this rank, then the averaged model's loss and the tokens seen, where there are some."""
    from accel_trainer import Trainer, TrainingArguments

    asked, on = TECHNIQUES[title], LAYOUTS[layout]
    block = {key: value for key, value in on.options.get("deepspeed", {}).items() if key != "zero3_init_flag"}
    sizes = {**on.options.get("parallel", {}), **({"dp_shard_size": 2} if layout == "hsdp" else {})}
    fields = {FIELDS.get(name, name): value for name, value in asked.config.items()}
    batch = GLOBAL_BATCH // readers_of(layout)
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, max_steps=UPDATES,
        logging_steps=1, save_steps=SAVED, train_sampling_strategy="sequential", max_grad_norm=0.0, report_to=[],
        disable_tqdm=True, fsdp=on.strategy == "fsdp2" and not sizes, deepspeed=block or None,
        parallelism_config=sizes or None, learning_rate=1e-2, weight_decay=0.1, lr_scheduler_type="constant",
        optim="muon" if title == "Muon" else "adamw_torch", prediction_loss_only=True, **fields,
    )  # fmt: skip
    samples = build_samples("llama")
    last = samples[(UPDATES - 1) * GLOBAL_BATCH : UPDATES * GLOBAL_BATCH]
    trainer = Trainer(model=model, args=args, train_dataset=samples, eval_dataset=last)
    trainer.train(resume_from_checkpoint=resume)
    found = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if args.ema_decay is not None:
        found.append(trainer.evaluate()["eval_loss"])
    if args.meters:
        found += [log["perf/tokens_seen"] for log in trainer.state.log_history if "perf/tokens_seen" in log][-1:]
    trainer.accelerator.free_memory()
    return found


def run_all(layout: str, titles: list[str], folder: str) -> dict[str, Any]:
    """Return what each technique gives on this rank: numbers, those of a resumed run, or a refusal."""
    activations._LEAST_BYTES = 0
    found: dict[str, Any] = {}
    # Before all arguments, under which ZeRO-3 builds models in pieces, of other values.
    models = [(build_model("llama"), build_model("llama")) for _ in titles]
    for number, (title, (model, fresh)) in enumerate(zip(titles, models, strict=True)):
        try:
            state = f"{folder}/{number}"
            resume = f"{state}/checkpoint-{SAVED}"
            found[title] = train(model, layout, title, state), train(fresh, layout, title, f"{state}-again", resume)
        except ConfigError as error:
            found[title] = str(error)
    return found


@functools.cache
def results_of(layout: str, titles: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Return the results of `run_all` by rank."""
    on = LAYOUTS[layout]
    return run_ranks(run_all, on.world_size, layout, list(titles), str(folder), env=on.env, timeout=250)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("techniques")


CELLS = [
    mark(layout, kind=title) if (layout, title) == SAMPLE else beyond(mark(layout, kind=title))
    for layout in COLUMNS
    for title in TECHNIQUES
]


@pytest.mark.multirank
@pytest.mark.timeout(300)  # the first test of a layout waits for all its runs
@pytest.mark.skipif(MULTIPLIES_COPIES, reason="ranks that share a sequence are refused under transformers 5.17")
@pytest.mark.parametrize(("layout", "technique"), CELLS)
def test_a_field_asks_for_what_the_configuration_does(
    layout: str, technique: str, request: pytest.FixtureRequest, folder: Path
):
    cells = selected(request, "test_a_field_asks_for_what_the_configuration_does")
    titles = tuple(title for on, title in cells if on == layout)
    for results in results_of(layout, titles, folder / layout):
        require_plain_or_refused(results[technique], layout, technique, 0)
