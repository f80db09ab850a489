"""What single fields of TrainingArguments do, those that no other test is about."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import HfApi, close_session
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainerCallback

import accel_trainer.trainer.trainer as trainer_module
from accel_trainer.runtime.fault_point import set_fault_hook
from accel_trainer.trainer import Trainer
from tests.hub_server import Hub, serve_hub
from tests.ranks import run_ranks, wait_until
from tests.trainer_jobs import TokenDataset, arguments, build_trainer
from tests.waits import stand_in_device

TOKEN = "hf_secret_of_this_test"


def find_backend(folder: str) -> str:
    arguments(folder, ddp_backend="cpu:gloo")
    return torch.distributed.get_backend_config()


def log_as(folder: str) -> list[tuple[bool, int]]:
    """Return whether this rank logs as a main process, and how much, with and without log_on_each_node."""
    found = []
    for on_each in (True, False):
        options = {"log_level": "info", "log_level_replica": "error", "log_on_each_node": on_each}
        trainer = build_trainer(folder, **options)
        found.append((trainer.args.should_log, transformers.utils.logging.get_verbosity()))
    return found


DDP_FIELDS = {  # of the arguments, and where the wrapper has them
    "ddp_find_unused_parameters": ("find_unused_parameters", True, True),
    "ddp_bucket_cap_mb": ("bucket_bytes_cap", 7, 7 * 2**20),
    "ddp_broadcast_buffers": ("broadcast_buffers", False, False),
    "ddp_static_graph": ("static_graph", True, True),
}


def find_ddp_options(folder: str) -> list[Any]:
    found = []
    for name, (attribute, value, _) in DDP_FIELDS.items():
        trainer = build_trainer(folder, max_steps=1, **{name: value})
        trainer.train()
        found.append(getattr(trainer.model_wrapped, attribute))
    return found


def look_on_two(folder: str) -> dict[str, Any]:
    # The backend first: whoever needs the group next has it.
    return {"backend": find_backend(folder), "logs": log_as(folder), "ddp": find_ddp_options(folder)}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(look_on_two, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.multirank
def test_the_backend_is_the_one_that_was_asked_for(on_two):
    assert [found["backend"] for found in on_two] == ["cpu:gloo"] * 2


@pytest.mark.multirank
def test_options_of_ddp_reach_the_wrapper(on_two):
    assert [found["ddp"] for found in on_two] == [[expected for *_, expected in DDP_FIELDS.values()]] * 2


def own_node(rank: int) -> dict[str, str]:
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}


@pytest.mark.multirank
def test_each_node_or_the_first_alone_logs_as_the_main_process(tmp_path, on_two):
    main, replica = (True, logging.INFO), (False, logging.ERROR)
    assert run_ranks(log_as, 2, str(tmp_path), env=own_node) == [[main, main], [main, replica]]
    assert [found["logs"] for found in on_two] == [[main, main], [replica, replica]]


class Doubled(torch.nn.Module):
    """A model that is soon compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.factor * input_ids).mean()}


def compile_with_a_mode(folder: str) -> list[Any]:
    seen: list[Any] = []

    def recording(graph: Any, inputs: Any, **options: Any) -> Any:
        seen.append(options)
        return graph.forward

    torch._dynamo.register_backend(recording, name="recording")
    for mode in (None, "max-autotune-no-cudagraphs"):
        torch.compiler.reset()
        options = {"torch_compile": True, "torch_compile_backend": "recording", "torch_compile_mode": mode}
        Trainer(Doubled(), arguments(folder, max_steps=1, **options), train_dataset=TokenDataset(4)).train()
    return seen


def find_determinism(folder: str) -> list[tuple[bool, list[float]]]:
    found = []
    for is_full in (False, True):
        trainer = build_trainer(folder, max_steps=2, dropout=0.1, full_determinism=is_full)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((torch.are_deterministic_algorithms_enabled(), losses))
    return found


def look_alone(folder: str) -> dict[str, Any]:
    """What leaves switches of torch behind."""
    return {"compile": compile_with_a_mode(folder), "determinism": find_determinism(folder)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(look_alone, 1, str(tmp_path_factory.mktemp("alone")))[0]


def test_the_compilers_mode_reaches_the_backend(alone):
    assert alone["compile"][0] == {}
    assert alone["compile"][-1] == {"mode": "max-autotune-no-cudagraphs"}


def test_full_determinism_turns_torchs_on(alone):
    (plain, losses), (full, again) = alone["determinism"]
    assert (plain, full) == (False, True)
    assert losses == again


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        api = HfApi(endpoint=hub.endpoint)
        monkeypatch.setattr("transformers.utils.hub._hf_api", api)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield hub
        close_session()
        if api._thread_pool is not None:
            api._thread_pool.shutdown()


def build_pushing(folder: Path, strategy: str = "every_save", **options: Any) -> Any:
    return build_trainer(
        folder / "out", push_to_hub=True, hub_token=TOKEN, hub_strategy=strategy, hub_always_push=True,
        samples=16, save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip


def test_a_push_goes_to_the_repository_the_branch_and_with_the_token_that_were_given(tmp_path, hub):
    options = {"hub_revision": "draft", "hub_model_id": "mine", "hub_private_repo": True, "report_html": True}
    trainer = build_pushing(tmp_path, **options)
    trainer.train()
    trainer.push_to_hub()

    assert (hub.repositories[0], hub.private[0]) == ("user/mine", True)
    assert len(hub.commits) >= 3  # two saves, and the end
    assert {commit.revision for commit in hub.commits} == {"draft"}
    assert {commit.token for commit in hub.commits} == {TOKEN}


def test_a_push_lists_no_file_that_is_being_written(tmp_path):
    listed: set[str] = set()

    def list_for_upload(*args: Any) -> None:
        names = [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")]
        listed.update(filter_repo_objects(names, ignore_patterns=["_*", "checkpoint-*"]))  # as upstream's push does

    set_fault_hook(list_for_upload)
    try:
        build_trainer(tmp_path / "out", samples=16, save_strategy="steps", save_steps=2).train()
    finally:
        set_fault_hook(None)

    assert listed == set()


def test_a_push_that_failed_is_a_warning(tmp_path, hub, caplog):
    hub.refuses = True
    build_pushing(tmp_path).train()

    def failures() -> list[str]:
        return [text for record in caplog.records if "a push to the hub failed" in (text := record.getMessage())]

    wait_until(lambda: len(failures()) == 2)  # the thread that pushes says it, and train() has waited for the push
    assert all(re.search(r"403.*on this disk only", text, re.DOTALL) for text in failures())


@pytest.mark.parametrize("strategy", ["end", "checkpoint", "all_checkpoints"])
def test_a_strategy_says_what_is_pushed(tmp_path, hub, strategy):
    build_pushing(tmp_path, strategy).train()

    folders = {name.split("/")[0] for commit in hub.commits for name in commit.files if "/" in name}
    expected = {"end": set(), "checkpoint": {"last-checkpoint"}, "all_checkpoints": {"checkpoint-2", "checkpoint-4"}}
    assert folders == expected[strategy]
    assert bool(hub.commits) is (strategy != "end")


def test_the_token_is_in_no_file_no_log_and_no_repr(tmp_path, hub, info_log):
    trainer = build_trainer(
        tmp_path / "out", samples=8, push_to_hub=True, hub_token=TOKEN, save_strategy="epoch", eval_strategy="epoch",
        report_html=True, logging_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.save_state()

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "trainer_state.json", "report.html"} <= {path.name for path in files}
    assert [str(path) for path in files if TOKEN.encode() in path.read_bytes()] == []
    pushed = {name: content for commit in hub.commits for name, content in commit.files.items()}
    assert [name for name, content in pushed.items() if TOKEN.encode() in content] == []
    assert TOKEN not in repr(trainer.args) + str(trainer.args) + trainer.args.to_json_string() + info_log.text
    assert trainer.args.hub_token == TOKEN
    loaded = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert loaded.hub_token is None
    assert loaded.learning_rate == trainer.args.learning_rate


class NamedRun(TrainerCallback):
    """As the callbacks of trackers, which name their run by the arguments."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.name = args.run_name


def test_the_name_of_a_run_reaches_callbacks_and_the_page(tmp_path):
    callback = NamedRun()
    options = {"callbacks": [callback]}
    build_trainer(tmp_path, max_steps=1, run_name="winter", report_html=True, options=options).train()

    assert callback.name == "winter"
    assert "<title>winter" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("every", "expected"), [(None, []), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_the_devices_cache_is_emptied_every_so_many_updates(tmp_path, monkeypatch, every, expected):
    trainer = build_trainer(tmp_path, samples=16, torch_empty_cache_steps=every)
    seen: list[int] = []
    monkeypatch.setattr(trainer_module, "clear_device_cache", lambda: seen.append(trainer.state.global_step))

    trainer.train()

    assert seen == expected


LOADER_FIELDS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "dataloader_pin_memory": ({}, "pin_memory", False),  # on a CPU
    "dataloader_num_workers": ({"dataloader_num_workers": 2}, "num_workers", 2),
    "dataloader_prefetch_factor": (
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 5}, "prefetch_factor", 5,
    ),
    "dataloader_persistent_workers": (
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, "persistent_workers", True,
    ),
    "dataloader_in_order": ({"dataloader_num_workers": 1, "dataloader_in_order": False}, "in_order", False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADER_FIELDS)
def test_loaders_read_as_the_arguments_say(tmp_path, name):
    changes, attribute, value = LOADER_FIELDS[name]
    trainer = build_trainer(tmp_path, **changes)

    loaders = (
        trainer.get_train_dataloader(),
        trainer.get_eval_dataloader(),
        trainer.get_test_dataloader(TokenDataset(4)),
    )

    assert [getattr(loader, attribute) for loader in loaders] == [value] * 3


@pytest.mark.parametrize("is_pinned", [True, False])
def test_memory_is_pinned_where_there_is_an_accelerator_to_copy_to(tmp_path, is_pinned):
    with stand_in_device():
        trainer = build_trainer(tmp_path, use_cpu=False)
        trainer.args.dataloader_pin_memory = is_pinned  # upstream turns it off on a CPU

        assert trainer.get_train_dataloader().pin_memory is is_pinned


def test_workers_are_started_by_the_method_that_was_asked_for(tmp_path):
    trainer = build_trainer(tmp_path, dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")

    assert trainer.get_train_dataloader().multiprocessing_context.get_start_method() == "spawn"


def logged_steps(folder: Path, key: str, **changes: Any) -> list[int]:
    trainer = build_trainer(folder, samples=24, **changes)
    trainer.train()
    return [entry["step"] for entry in trainer.state.log_history if key in entry]


def test_the_first_step_is_logged(tmp_path):
    assert logged_steps(tmp_path, "loss", logging_steps=4) == [4]
    assert logged_steps(tmp_path, "loss", logging_steps=4, logging_first_step=True) == [1, 4]


def test_evaluations_wait(tmp_path):
    steps = {"eval_strategy": "steps", "eval_steps": 2}
    assert logged_steps(tmp_path, "eval_loss", **steps) == [2, 4, 6]
    assert logged_steps(tmp_path, "eval_loss", **steps, eval_delay=3) == [4, 6]


def test_a_loss_that_is_no_number_is_logged_where_it_is_not_filtered(tmp_path):
    losses, first = {}, []
    for is_filtered in (True, False):
        trainer = build_trainer(
            tmp_path, samples=12, logging_steps=3, max_grad_norm=0.0, on_nonfinite="warn",
            logging_nan_inf_filter=is_filtered,
        )  # fmt: skip
        compute = trainer.compute_loss

        def nan_later(*args: Any, trainer=trainer, compute=compute, **kwargs: Any) -> Any:
            if trainer.state.global_step:
                return compute(*args, **kwargs) * float("nan")
            first.append(compute(*args, **kwargs))
            return first[-1]

        trainer.compute_loss = nan_later
        trainer.train()
        losses[is_filtered] = trainer.state.log_history[0]["loss"]
    # In their place the mean so far, over one update more: x + x/2 + (x + x/2)/3, over three updates.
    assert losses[True] == pytest.approx(first[0].item() * 2 / 3, rel=1e-6)
    assert np.isnan(losses[False])


def test_memory_is_measured_where_it_is_not_skipped(tmp_path):
    for skips in (True, False):
        metrics = build_trainer(tmp_path, skip_memory_metrics=skips, max_steps=1).train().metrics
        assert ("train_mem_cpu_alloc_delta" in metrics) is not skips


def test_overflow_in_the_model_is_found_where_it_arises(tmp_path, capsys):
    trainer = build_trainer(tmp_path, debug="underflow_overflow", max_steps=1)
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.up_proj.weight.fill_(float("inf"))

    with pytest.raises(ValueError, match="DebugUnderflowOverflow: inf/nan detected"):
        trainer.train()
    assert "model.layers.1.mlp" in capsys.readouterr().out


def test_generation_caches_are_for_evaluation_where_they_are_asked_for(tmp_path):
    assert build_trainer(tmp_path).model.config.use_cache is False
    assert build_trainer(tmp_path, use_cache=True).model.config.use_cache is True


class Counting(TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self, start: int = 0) -> None:
        self.start = self.count = start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


def test_callbacks_go_on_where_they_were(tmp_path):
    options = {"callbacks": [Counting()]}
    build_trainer(tmp_path, samples=8, save_strategy="steps", save_steps=1, options=options).train()
    for restores, expected in ((True, 2), (False, 1)):
        trainer = build_trainer(
            tmp_path, samples=8, restore_callback_states_from_checkpoint=restores, options={"callbacks": [Counting()]}
        )
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))

        [callback] = [each for each in trainer.callback_handler.callbacks if isinstance(each, Counting)]
        assert callback.count == expected


def test_the_column_of_lengths_is_the_one_that_is_named(tmp_path):
    rows = datasets.Dataset.from_list(
        [{"input_ids": [5] * (3 + i % 7), "labels": [5] * (3 + i % 7), "size": i % 5} for i in range(20)]
    )
    trainer = build_trainer(tmp_path, train_sampling_strategy="group_by_length", length_column_name="size")
    trainer.train_dataset = rows

    assert trainer._get_train_sampler().lengths == [i % 5 for i in range(20)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("activation_checkpointing", "activation_checkpointing_kwargs"),
        ("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ],
)
@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_options_of_recomputation_reach_the_model(tmp_path, name, options, is_reentrant):
    if name not in {field.name for field in dataclasses.fields(transformers.TrainingArguments)}:
        pytest.skip("this transformers has the other name only")
    trainer = build_trainer(tmp_path, max_steps=1, **{name: True, options: {"use_reentrant": is_reentrant}})
    passes: list[bool] = []
    layer = trainer.model.model.layers[0].self_attn
    layer.register_forward_hook(lambda module, args, output: passes.append(output[0].requires_grad))

    trainer.train()

    # The first pass of a reentrant recomputation records no graph.
    assert passes == [not is_reentrant, True]


def test_half_precision_evaluation_casts_the_model(tmp_path):
    trainer = build_trainer(tmp_path, fp16_full_eval=True)
    seen: list[torch.dtype] = []
    trainer.model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.evaluate()
    assert set(seen) == {torch.float16}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tf32": True}, ValueError, "tf32"),
        ({"use_liger_kernel": True}, ImportError, "liger-kernel"),
        ({"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}, ImportError, "liger-kernel"),
    ],
)
def test_what_this_machine_lacks_is_named(tmp_path, options, error, message):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(error, match=message):
        build_trainer(tmp_path, **options).train()


def test_progress_is_a_bar_or_lines(tmp_path):
    callbacks = {
        quiet: {type(each) for each in build_trainer(tmp_path, disable_tqdm=quiet).callback_handler.callbacks}
        for quiet in (True, False)
    }
    assert transformers.PrinterCallback in callbacks[True]
    assert callbacks[False] & {transformers.ProgressCallback}


def test_the_trackers_that_are_named_record_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    for names, is_recorded in (("none", False), (["tensorboard"], True)):
        folder = tmp_path / str(is_recorded)
        build_trainer(folder, max_steps=1, report_to=names).train()
        assert bool(list(folder.rglob("events.out.tfevents*"))) is is_recorded


def test_labels_are_the_columns_that_are_named(tmp_path):
    data = TokenDataset(6, seed=1)
    for name in ("labels", "attention_mask"):
        found = build_trainer(tmp_path, label_names=[name]).predict(data).label_ids
        np.testing.assert_array_equal(found, torch.stack([row[name] for row in data.rows]).numpy())


def test_options_of_the_schedule_reach_it(tmp_path):
    trainer = build_trainer(
        tmp_path, samples=16, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 4e-3}
    )
    trainer.train()
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(4e-3)


def test_the_loss_alone_is_kept_where_it_is_all_that_was_asked_for(tmp_path):
    for is_alone in (True, False):
        output = build_trainer(tmp_path, prediction_loss_only=is_alone).predict(TokenDataset(4))
        assert (output.predictions is None) is is_alone
        assert output.metrics["test_loss"] > 0


def test_columns_that_the_model_does_not_take_are_removed_or_kept(tmp_path):
    rows = datasets.Dataset.from_list([{"input_ids": [5, 6], "labels": [5, 6], "weight": 0.5}] * 4)
    for removes in (True, False):
        trainer = build_trainer(tmp_path, remove_unused_columns=removes)
        trainer.train_dataset = rows
        assert ("weight" in next(iter(trainer.get_train_dataloader()))) is not removes


def test_the_files_of_a_run_are_where_they_were_asked_for(tmp_path):
    for strategy, expected in {"no": set(), "steps": {2, 3}, "epoch": {3}}.items():
        output_dir = tmp_path / strategy
        build_trainer(output_dir, samples=12, save_strategy=strategy, save_steps=2).train()
        saved = {int(path.name.rpartition("-")[2]) for path in output_dir.glob("checkpoint-*")}
        assert saved == expected
