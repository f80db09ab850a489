"""Gradients that are no numbers in native loops: found on all ranks alike; weights that are none are not saved."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.accelerator import single_files
from accel_trainer.errors import ConfigError, NonFiniteError
from accel_trainer.runtime.nonfinite import check_weights
from tests.loops import take_update
from tests.ranks import preload, run_ranks
from tests.stand_in import ALONE, build, install
from tests.strategy_configs import needs_deepspeed

preload("accel_trainer.accelerator")


def train(
    action: str, *, clips: bool = True, strategy: str = "auto", bad_rank: int = 0, adds: bool = False, **options: Any
) -> dict[str, Any]:
    """Do three updates, the second of which has a NaN in the loss of one rank.

    Args:
        adds: the NaN is added to the loss, whose gradients are numbers.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, config={"on_nonfinite": action, "strategy": strategy, **options})
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(range(4), 2)  # from which an engine takes its batch size
    model, optimizer, scheduler, _ = accelerator.prepare(model, optimizer, scheduler, loader)
    weights, skipped, error = [], [], ""
    try:
        for update in (1, 2, 3):
            with accelerator.accumulate(model):
                loss = model(torch.ones(2, 3)).square().mean()
                is_bad = (update, bad_rank) == (2, accelerator.process_index)
                nan = float("nan")
                accelerator.backward((loss + nan if adds else loss * nan) if is_bad else loss)
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
            weights.append(accelerator.get_state_dict(model).get("weight", torch.zeros(0)).clone())
    except NonFiniteError as raised:
        error = str(raised)
    return {"error": error, "weights": weights, "skipped": skipped, "schedule": scheduler.last_epoch}


def test_a_norm_of_a_part_hides_no_nan_of_another() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, config={"on_nonfinite": "skip_step"})
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    hidden = model["body"](torch.zeros(2, 4)) * 0  # the root at 0 has no derivative; the loss is a number
    accelerator.backward((hidden.norm(dim=1).sqrt() + model["head"](torch.randn(2, 4))[:, 0]).mean())
    norms = [accelerator.clip_grad_norm_(model[part].parameters(), 1.0) for part in ("body", "head")]
    optimizer.step()
    assert [norm.isnan().item() for norm in norms] == [True, False]
    assert optimizer.step_was_skipped
    assert model["body"].weight.isfinite().all()


CASES = {
    "clipped": {},
    "unclipped": {"clips": False},
    "sharded": {"strategy": "fsdp2"},
}


def train_all(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: {action: train(action, bad_rank=1, **case) for action in ("raise", "skip_step", "warn")}
        for name, case in CASES.items()
    }
    for name, case in {**CASES, "sharded, unclipped": {"strategy": "fsdp2", "clips": False}}.items():
        results[f"{name}, added"] = {
            action: train(action, bad_rank=1, adds=True, **case) for action in ("raise", "skip_step")
        }
    for strategy in ("ddp", "fsdp2"):
        results[f"save {strategy}"] = save(f"{folder}/{strategy}", strategy)
        results[f"rollback {strategy}"] = roll_back(f"{folder}/rollback-{strategy}", strategy)
    return results


def save(folder: str, strategy: str) -> list[str]:
    """Return the messages of saves of weights that are NaN; those with "warn" write."""
    messages = []
    for action in ("raise", "warn"):
        accelerator = Accelerator(cpu=True, config={"on_nonfinite": action, "strategy": strategy})
        model = nn.Linear(3, 4)
        model.weight.data[1, 2] = float("inf")
        model = accelerator.prepare(model)
        for name, call in (("state", accelerator.save_state), ("model", lambda to: accelerator.save_model(model, to))):  # noqa: B023
            try:
                call(f"{folder}/{name}")
            except NonFiniteError as error:
                messages.append(str(error))
    assert Path(folder, "state").is_dir()
    assert Path(folder, "model", "model.safetensors").is_file()
    return messages


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_all, 2, str(tmp_path_factory.mktemp("weights")), timeout=100)


def check(seen: dict[str, Any], is_main: bool, bad_rank: int = 1) -> None:
    words = f"update 2: the norm of the gradients is NaN or infinite, and the loss on rank {bad_rank}"
    assert seen["raise"]["error"].startswith(words)
    assert len(seen["raise"]["weights"]) == 1
    if "warn" in seen:
        assert seen["warn"]["error"] == ""
    skipping = seen["skip_step"]
    assert (skipping["error"], skipping["skipped"], skipping["schedule"]) == ("", [False, True, False], 2)
    first, second, third = skipping["weights"]
    if is_main:
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
        assert third.isfinite().all()


@pytest.mark.parametrize("case", [*CASES, *(f"{name}, added" for name in CASES), "sharded, unclipped, added"])
def test_r14_all_ranks_act_alike_on_one_ranks_nan(ranks: list[dict[str, Any]], case: str) -> None:
    for rank, seen in enumerate(ranks):
        check(seen[case], rank == 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_r14_weights_that_are_none_are_not_saved_unless_asked_to(ranks: list[dict[str, Any]], strategy: str) -> None:
    for seen in ranks:
        state, model = seen[f"save {strategy}"]
        assert state.startswith("save to ")
        assert "1 of the model's weights hold NaN or infinity, 'weight' for one; nothing is saved" in state
        assert model.startswith("save_model to ")


@pytest.mark.parametrize("clips", [True, False])
def test_r14_one_process_acts_as_several(clips: bool) -> None:
    check({action: train(action, clips=clips) for action in ("raise", "skip_step", "warn")}, is_main=True, bad_rank=0)


def test_r14_a_load_looks_at_weights_that_the_save_has_not_seen_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(named: Any, section: str, *args: Any, **kwargs: Any) -> bool:
        looks.append(section)
        return check_weights(named, section, *args, **kwargs)

    def prepare(dtype: torch.dtype = torch.float32, action: str = "raise") -> tuple[Accelerator, nn.Module]:
        accelerator = Accelerator(cpu=True, config={"on_nonfinite": action})
        model = nn.Linear(3, 4)
        model.weight.data[1, 2] = 1e6
        return accelerator, accelerator.prepare(model.to(dtype))

    monkeypatch.setattr(single_files, "check_weights", look)
    accelerator, model = prepare()
    accelerator.save_state(tmp_path / "good")
    accelerator.load_state(tmp_path / "good")
    assert looks == [f"save to {tmp_path / 'good'}"]
    accelerator.load_state(tmp_path / "good", verify="size")
    with pytest.raises(NonFiniteError, match=f"load of {tmp_path / 'good'}: 1 of the model's weights"):
        prepare(torch.float16)[0].load_state(tmp_path / "good")

    accelerator, model = prepare(action="warn")
    model.weight.data[0, 0] = float("nan")
    accelerator.save_state(tmp_path / "bad")
    with pytest.raises(NonFiniteError, match=f"load of {tmp_path / 'bad'}: 1 of the model's weights"):
        prepare()[0].load_state(tmp_path / "bad")
    assert len(looks) == 5


def test_weights_whose_sum_is_too_large_for_fp32_are_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model.weight.data.fill_(torch.finfo(torch.float32).max)
    accelerator.save_model(accelerator.prepare(model), tmp_path / "model")
    assert Path(tmp_path, "model", "model.safetensors").is_file()


def train_with_engine(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}, "bad_rank": 1}
    return {action: train(action, **engine) for action in ("raise", "skip_step")}, roll_back(folder, "deepspeed")


@pytest.fixture(scope="module")
def engine_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return run_ranks(train_with_engine, 2, str(tmp_path_factory.mktemp("engine")), timeout=100)


@needs_deepspeed
def test_r14_an_engine_that_steps_by_itself_leaves_the_update_out_and_tells(engine_ranks: list[Any]) -> None:
    for rank, (seen, _) in enumerate(engine_ranks):
        check(seen, is_main=rank == 0)


@needs_deepspeed
def test_r14_ranks_of_an_engine_are_rolled_back_together(engine_ranks: list[Any]) -> None:
    check_rollbacks([seen for _, seen in engine_ranks])


def test_a_loss_that_the_loop_leaves_out_is_no_updates() -> None:
    accelerator = Accelerator(cpu=True)
    module = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for factor in (float("nan"), 1.0):
        loss = model(torch.ones(1, 2)).square().mean() * factor
        accelerator.backward(loss)
        if loss.isfinite():
            optimizer.step()
        optimizer.zero_grad()
    assert not optimizer.step_was_skipped


def build_regression() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def loop(accelerator: Accelerator, *, saves_after: tuple[int, ...], bad: range) -> dict[str, Any]:
    """Train 12 updates of a small regression; `bad` ones have a NaN in the loss of the last rank."""
    model, optimizer, scheduler = build_regression()
    data = torch.arange(48.0).reshape(24, 2) / 48
    loader = torch.utils.data.DataLoader(data, batch_size=2 // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rows, error = [], ""
    try:
        for update, batch in enumerate(loader, start=1):
            rows.append(batch.tolist())
            with accelerator.accumulate(model):
                loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
                is_bad = update in bad and accelerator.is_last_process
                take_update(loss * float("nan") if is_bad else loss, optimizer, accelerator)
                scheduler.step()
            if update in saves_after:
                accelerator.save_state()
    except NonFiniteError as raised:
        error = str(raised)
    weights = accelerator.get_state_dict(model)
    return {"error": error, "rows": rows, "weights": weights, "epoch": scheduler.last_epoch}


def roll_back(folder: str, strategy: str) -> dict[str, Any]:
    def build(name: str) -> Accelerator:
        naming = ProjectConfiguration(project_dir=f"{folder}/{name}", automatic_checkpoint_naming=True)
        config = {"on_nonfinite": "rollback", "max_rollbacks": 2, "strategy": strategy}
        if strategy == "deepspeed":  # parameters of tiny models are partitioned, too
            stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
            config["deepspeed"] = {"zero_optimization": stage}
        return Accelerator(cpu=True, project_config=naming, config=config)

    with pytest.raises(ConfigError, match="on_nonfinite in the config dict is 'skip'; expected one of"):
        Accelerator(cpu=True, config={"on_nonfinite": "skip"})
    with pytest.raises(
        ConfigError, match=r"on_nonfinite=rollback .* goes back to the newest save_state\(\) of the run"
    ):
        loop(Accelerator(cpu=True, config={"on_nonfinite": "rollback"}), saves_after=(), bad=range(0))
    return {
        "once": loop(build("once"), saves_after=(2, 4, 9), bad=range(6, 7)),
        "again": loop(build("again"), saves_after=(2,), bad=range(4, 20)),
        "early": loop(build("early"), saves_after=(2,), bad=range(1, 2)),
    }


def by_hand(updates: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The plain loop: in place of its 6th update it goes back to what it was after the 4th."""
    model, optimizer, scheduler = build_regression()
    kept: list[Any] = []
    for update, parts in enumerate(updates, start=1):
        if update == 6:
            for each, state in zip((model, optimizer, scheduler), kept, strict=True):
                each.load_state_dict(state)
            continue
        batch = torch.tensor([row for part in parts for row in part])
        take_update((model(batch).squeeze(1) - batch.sum(1)).square().mean(), optimizer)
        scheduler.step()
        if update == 4:
            kept = copy.deepcopy([each.state_dict() for each in (model, optimizer, scheduler)])
    return {"weights": model.state_dict(), "epoch": scheduler.last_epoch}


def check_rollbacks(ranks: list[dict[str, Any]]) -> None:
    once = [seen["once"] for seen in ranks]
    reference = by_hand(list(zip(*(seen["rows"] for seen in once), strict=True)))
    assert len({str(row) for seen in once for part in seen["rows"] for row in part}) == 24
    for seen in once:
        assert (seen["error"], seen["epoch"]) == ("", reference["epoch"])
    for name, value in reference["weights"].items():
        torch.testing.assert_close(once[0]["weights"][name], value, rtol=0, atol=1e-6)
    bad = f"the loss on rank {len(ranks) - 1} is, too"
    for seen in ranks:
        assert seen["again"]["error"].startswith("update 6: ")
        assert re.search(rf"{bad}; the run has gone back to \S+checkpoint_0 2 time", seen["again"]["error"])
        assert re.match(rf"update 1: .*{bad}; on_nonfinite='rollback' has no checkpoint", seen["early"]["error"])


def test_r14_a_loop_that_is_rolled_back_goes_on_behind_the_update(tmp_path: Path) -> None:
    check_rollbacks([roll_back(str(tmp_path), "auto")])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_r14_ranks_are_rolled_back_together(ranks: list[dict[str, Any]], strategy: str) -> None:
    check_rollbacks([seen[f"rollback {strategy}"] for seen in ranks])


def roll_back_on_a_device(folder: str) -> list[tuple[bool, torch.Tensor]]:
    install()
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=naming, config={"on_nonfinite": "rollback"})
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for update in range(1, 7):
        loss = model(torch.ones(2, 3, device=accelerator.device)).square().mean()
        take_update(loss * float("nan") if update == 4 else loss, optimizer, accelerator)
        seen.append((optimizer.step_was_skipped, model.weight.detach().cpu().clone()))
        if update == 2:
            accelerator.save_state()
    return seen


def test_r14_on_an_accelerator_the_update_is_taken_back_one_later(tmp_path: Path) -> None:
    build()
    [seen] = run_ranks(roll_back_on_a_device, 1, str(tmp_path), env=ALONE)
    skipped, weights = zip(*seen, strict=True)
    assert skipped == (False, False, False, False, True, False)
    assert weights[3].isnan().any()
    assert torch.equal(weights[4], weights[1])
    assert torch.equal(weights[5], weights[2])


def test_a_nan_of_eight_bits_is_named():
    weight = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    with pytest.raises(NonFiniteError, match="save: 1 of the model's weights hold NaN or infinity, 'weight' for one"):
        check_weights([("weight", weight)], "save", None, is_forced=False)
