"""The benchmark of planned peaks: small cases on real ranks, in whose jobs plans leave everything as it was."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cells import beyond
from tests.ranks import preload, run_ranks
from tests.stand_in import ALONE

preload("accel_trainer.accelerator", "transformers.models.llama.modeling_llama", "torch.profiler", "deepspeed")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
ONE_LAYER = {**SMALL, "num_hidden_layers": 1}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tied weights": (1, {"tie_word_embeddings": True}, {}),
    "averages": (1, {}, {"ema_decay": 0.9, "mixed_precision": "bf16"}),
    "activations on the host": (1, {}, {"activation_offload": True}),
    "shards with averages": (2, {}, {"strategy": "fsdp2", "ema_decay": 0.9}),
    "ZeRO-1": (2, {}, {"stage": 1}),
    "ZeRO-2 in bf16": (2, {}, {"stage": 2, "mixed_precision": "bf16"}),
    "ZeRO-3 in bf16": (2, {}, {"stage": 3, "mixed_precision": "bf16"}),
    "ZeRO-2 offloaded": (2, {}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
}


def measure(name: str) -> tuple[float, bool, Any]:
    """Return the planned peak as a share of the measured one, whether the plan has left the job's own state, and it."""
    sys.path.insert(0, str(BENCHMARKS))
    planned_peaks = importlib.import_module("planned_peaks")
    ranks, sizes, options = CASES[name]
    more = {key: value for key, value in options.items() if key.startswith("offload")}
    if "stage" in options:
        zero = planned_peaks.zero_options(options["stage"], **more)
        options = {**zero, **{key: value for key, value in options.items() if key not in ("stage", *more)}}
    case = planned_peaks.Case(sizes={**SMALL, **sizes}, options=options, ranks=ranks, rows=2, length=64)
    planned_peaks.begin(case)  # an engine's own state of this job
    before = _engine_state()
    planned = planned_peaks.plan_case(case).plan
    is_kept = before == _engine_state()
    return planned.peak / planned_peaks.measured_peak(case), is_kept, planned.peak_parts


def _engine_state() -> list[Any]:
    from deepspeed.accelerator import real_accelerator
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    return [comm.cdb, groups._WORLD_GROUP, real_accelerator.ds_accelerator, os.environ.get("LOCAL_RANK")]


# Beyond the sample: averages are in shards in it, and stage 2 and 16 bits in others of ZeRO.
@pytest.mark.parametrize("name", [beyond(n) if n in ("averages", "ZeRO-2 in bf16") else n for n in CASES])
def test_plans_are_within_5_per_cent_of_what_ranks_take(name: str):
    ranks = CASES[name][0]
    for ratio, is_kept, parts in run_ranks(measure, ranks, name, env=ALONE if ranks == 1 else None, timeout=200):
        assert ratio == pytest.approx(1, abs=0.05)
        assert is_kept
        assert (parts["averages"] > 0) == ("averages" in name)


def test_a_case_is_measured_as_fit_has_written_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no default configuration
    sys.path.insert(0, str(BENCHMARKS))
    planned_peaks = importlib.import_module("planned_peaks")
    case = planned_peaks.Case(sizes=ONE_LAYER, options={"mixed_precision": "bf16"}, rows=4, length=64)
    planned = planned_peaks.plan_case(case)
    *_, limit = planned_peaks.follow_advice(case, planned)
    fitted = planned_peaks.fit_case(case, limit)
    assert fitted.rows * fitted.options["accumulation"]["num_steps"] == 4
    assert (fitted.options["mixed_precision"], fitted.options["use_cpu"]) == ("bf16", True)
    found = planned_peaks.plan_case(fitted).plan
    assert found.rows == planned.plan.rows
    assert 1.05 * found.peak <= limit < 1.05 * planned.plan.peak


def test_the_advice_of_a_plan_is_a_case_that_is_measured():
    sys.path.insert(0, str(BENCHMARKS))
    planned_peaks = importlib.import_module("planned_peaks")
    torch.manual_seed(0)
    planned = planned_peaks.plan_case(case := planned_peaks.Case(sizes=ONE_LAYER, rows=2, length=32))
    text, changed, limit = planned_peaks.follow_advice(case, planned)
    assert limit < 1.05 * planned.plan.peak
    assert planned_peaks.plan_case(changed).plan.peak * 1.05 <= limit
    assert changed.rows * changed.options["gradient_accumulation_steps"] == 2
    assert text
