"""Features beside layouts: each trains a tiny llama as a plain loop on one process does, or is refused by name.

`FEATURES` are rows of docs/compatibility.md: a cell is a test here, or in tests/ecosystem where it needs a package that
`make test` does without, and a refusal is the words of its message.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from tests.cells import crossed
from tests.conformance.models import GLOBAL_BATCH, build_model, build_optimizer, build_samples, collate
from tests.conformance.test_conformance import LAYOUTS, mark
from tests.ranks import RankFailure, preload, run_ranks

preload(
    "accel_trainer.accelerator",
    "accel_trainer.strategies.fsdp2.strategy",
    "accel_trainer.trainer.trainer",
    "datasets",
    "deepspeed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "transformers.models.llama.modeling_llama",
)

COLUMNS = ("single", "ddp", "fsdp2", "hsdp", "tp", "sp", "zero1", "zero2", "zero3")
UPDATES = 2
DOCUMENTS = [list(range(1, 1 + length)) for length in (5, 12, 7, 9, 3, 14, 11, 6, 8, 10, 4, 13)] * 4
"""Unpadded rows, for packing into rows of 24 tokens."""


class Job:
    """A llama on a layout, trained for some updates."""

    def __init__(self, layout: str, *, model: nn.Module | None = None, rows: Any = None, **config: Any) -> None:
        self.accelerator = LAYOUTS[layout].accelerator(config)
        model = model or build_model("llama")
        optimizer = build_optimizer(model)
        if not optimizer.param_groups[-1]["params"]:  # of vectors, which adapters have none of; DeepSpeed refuses it
            optimizer.param_groups.pop()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
        rows = build_samples("llama") if rows is None else rows
        if not isinstance(rows, DataLoader):
            rows = DataLoader(rows, GLOBAL_BATCH // self.accelerator.readers.world_size, collate_fn=collate)
        prepared = self.accelerator.prepare(model, optimizer, rows, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def losses(self, updates: int = UPDATES, skip: int = 0) -> list[float]:
        """Train, and return the loss of each update: the mean over its targets on all ranks."""
        losses = []
        for batch in itertools.islice(self.loader, skip, skip + updates):
            targets = (batch["labels"][:, 1:] != -100).sum()
            loss_sum = self.model(**batch)["loss"] * targets
            self.accelerator.backward(self.accelerator.global_token_mean(loss_sum, targets))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            total, count = self.accelerator.reduce(torch.stack([loss_sum.detach(), targets.float()]), "sum").tolist()
            losses.append(total / count)
        return losses


def rate_at(step: int) -> float:
    return 1.0 / (1 + step)


def compiled(layout: str, folder: str) -> list[float]:
    return Job(layout, compile={"backend": "aot_eager", "regional": True}).losses()


def in_bfloat16(layout: str, folder: str) -> list[float]:
    return Job(layout, mixed_precision="bf16").losses()


def streamed(layout: str, folder: str) -> list[float]:
    from datasets import Dataset

    rows = [{name: value.tolist() for name, value in sample.items()} for sample in build_samples("llama")]
    return Job(layout, rows=Dataset.from_list(rows).to_iterable_dataset().with_format("torch")).losses()


def packed(layout: str, folder: str) -> list[float]:
    from accel_trainer.data_loader import PackingCollator, pack_dataset

    rows = pack_dataset([{"input_ids": document} for document in DOCUMENTS], max_length=24)
    share = -(-len(rows) // LAYOUTS[layout].accelerator().readers.world_size)
    return Job(layout, rows=DataLoader(rows, share, collate_fn=PackingCollator())).losses(updates=1)


def documents_alone() -> list[float]:
    """Return the loss of all documents, each by itself, in plain PyTorch."""
    model, total, targets = build_model("llama"), 0.0, 0
    for document in DOCUMENTS:
        tokens = torch.tensor([document])
        with torch.no_grad():
            total += model(input_ids=tokens, labels=tokens)["loss"].item() * (len(document) - 1)
        targets += len(document) - 1
    return [total / targets]


def saved_in_background(layout: str, folder: str) -> list[float]:
    job = Job(layout, save_async=True)
    losses = job.losses(1)
    job.accelerator.save_state(folder)
    job.losses(1, skip=1)  # while the state is written
    job.accelerator.wait_for_checkpoint()
    resumed = Job(layout)
    resumed.accelerator.load_state(folder)
    return losses + resumed.losses(UPDATES - 1, skip=1)


def evaluated(layout: str, folder: str) -> list[float]:
    job = Job(layout)
    losses = job.losses(1)
    loader = job.accelerator.prepare(DataLoader(build_samples("llama")[:11], batch_size=3, collate_fn=collate))
    job.model.eval()
    with torch.no_grad():
        logits = [job.accelerator.gather_for_metrics(job.model(**batch)["logits"]) for batch in loader]
    return losses + torch.cat(logits).flatten()[:200].tolist()


def exported(layout: str, folder: str) -> list[float]:
    job = Job(layout)
    losses = job.losses(1)
    job.accelerator.save_model(job.model, folder)
    job.accelerator.wait_for_everyone()
    model = build_model("llama", seed=1)
    files = [load_file(path) for path in sorted(Path(folder).glob("*.safetensors"))]
    model.load_state_dict({name: value for file in files for name, value in file.items()}, strict=True)
    with torch.no_grad():
        logits = model(**collate(build_samples("llama")[:11]))["logits"]
    return losses + logits.flatten()[:200].tolist()


def by_the_trainer(layout: str, folder: str) -> list[float]:
    """Return the losses of a run that went on from its checkpoint, and those of evaluations of eleven rows."""
    from accel_trainer import Trainer, TrainingArguments

    asked = LAYOUTS[layout]
    block = {key: value for key, value in asked.options.get("deepspeed", {}).items() if key != "zero3_init_flag"}
    sizes = {**asked.options.get("parallel", {}), **({"dp_shard_size": 2} if layout == "hsdp" else {})}
    samples, history = build_samples("llama"), []
    # Before the arguments, under which ZeRO-3 builds models in pieces: the optimizer's groups go by dimensions.
    models = [build_model("llama") for _ in range(2)]
    for model, checkpoint in zip(models, (None, f"{folder}/checkpoint-1"), strict=True):
        args = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=GLOBAL_BATCH // readers_of(layout), max_steps=UPDATES,
            logging_steps=1, save_steps=1, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3,
            train_sampling_strategy="sequential", max_grad_norm=0.0, report_to=[], disable_tqdm=True,
            fsdp=asked.strategy == "fsdp2" and not sizes, deepspeed=block or None, parallelism_config=sizes or None,
        )  # fmt: skip
        optimizer = build_optimizer(model)
        optimizers = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
        trainer = Trainer(
            model=model, args=args, train_dataset=samples, eval_dataset=samples[:11], optimizers=optimizers
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        history.append([log[key] for key in ("loss", "eval_loss") for log in trainer.state.log_history if key in log])
    assert history[0] == pytest.approx(history[1], abs=1e-6)
    return history[1]


def readers_of(layout: str) -> int:
    return {"single": 1, "tp": 1, "sp": 1, "cp": 1, "hsdp": 4}.get(layout, 2)


@functools.cache
def of_plain_loop() -> list[float]:
    return train_alone(build_model("llama"), UPDATES)


@functools.cache
def then_logits() -> list[float]:
    """Return the loss of an update, then logits of the trained model."""
    model = build_model("llama")
    losses = train_alone(model, 1)
    with torch.no_grad():
        logits = model(**collate(build_samples("llama")[:11]))["logits"]
    return losses + logits.flatten()[:200].tolist()


@functools.cache
def with_evaluations() -> list[float]:
    model, evaluated = build_model("llama"), []
    losses = train_alone(model, UPDATES, lambda: evaluated.append(loss_of(model, build_samples("llama")[:11])))
    return losses + evaluated


@torch.no_grad()
def loss_of(model: nn.Module, samples: list[dict[str, torch.Tensor]]) -> float:
    return model(**collate(samples))["loss"].item()


def train_alone(model: nn.Module, updates: int, after: Callable[[], Any] = lambda: None) -> list[float]:
    """Train with plain PyTorch on one process; `after` is called after each update."""
    optimizer, losses, samples = build_optimizer(model), [], build_samples("llama")
    for step in range(updates):
        loss = model(**collate(samples[GLOBAL_BATCH * step : GLOBAL_BATCH * (step + 1)]))["loss"]
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate_at(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after()
    return losses


def with_adapters() -> nn.Module:
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(build_model("llama"), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first, which would hide what the other matrix does
            nn.init.normal_(parameter, std=0.1)
    return model


def adapted(layout: str, folder: str) -> list[float]:
    return Job(layout, model=with_adapters()).losses()


def in_fp8(layout: str, folder: str) -> list[float]:
    return Job(layout, mixed_precision="fp8", fp8={"emulate": True}).losses()


@dataclass(frozen=True)
class Feature:
    """What is asked for beside a layout, and what is expected of it."""

    title: str
    run: Callable[[str, str], list[float]]
    """On each rank, of a layout and a folder: losses, and other numbers."""
    expected: Callable[[], list[float]] = of_plain_loop
    refused: Mapping[str, str] = field(default_factory=dict)
    """Words of the message, by layout."""
    tolerance: float = 2e-5
    in_ecosystem: bool = False
    """Whether it needs a package that tests/ecosystem has."""


NO_FP8 = {
    "tp": "layers that are split over ranks do not compute in fp8 here",
    **dict.fromkeys(("zero1", "zero2", "zero3"), "whose engine has no fp8 layers"),
}
FEATURES = {
    feature.run.__name__: feature
    for feature in (
        Feature("`mixed_precision: bf16`", in_bfloat16, tolerance=5e-3),
        Feature("fp8, emulated", in_fp8, refused=NO_FP8, tolerance=5e-3, in_ecosystem=True),
        Feature("adapters of PEFT (LoRA)", adapted, lambda: train_alone(with_adapters(), UPDATES), in_ecosystem=True),
        Feature("a stream of `datasets`", streamed),
        Feature("`compile`", compiled),
        Feature("packed rows", packed, documents_alone),
        Feature("a save in the background, and a resume", saved_in_background),
        Feature("evaluation with `gather_for_metrics`", evaluated, then_logits),
        Feature("`save_model` for `from_pretrained`", exported, then_logits),
        Feature("the Trainer: evaluation, checkpoint, resume", by_the_trainer, with_evaluations),
    )
}


def check(layout: str, name: str, folder: Path) -> None:
    """Run a feature on the ranks of a layout, and compare each rank's numbers, or its refusal."""
    asked, on = FEATURES[name], LAYOUTS[layout]
    if layout in asked.refused:
        with pytest.raises(RankFailure) as caught:
            run_ranks(asked.run, on.world_size, layout, str(folder), env=on.env, timeout=250)
        assert len(caught.value.failures) == on.world_size
        assert all(asked.refused[layout] in failure for failure in caught.value.failures.values()), caught.value
        return
    for numbers in run_ranks(asked.run, on.world_size, layout, str(folder), env=on.env, timeout=250):
        assert numbers == pytest.approx(asked.expected(), rel=asked.tolerance, abs=asked.tolerance)


@pytest.mark.multirank
@pytest.mark.timeout(280)  # of `compile`: 4 s of a processor, and 52 s on a busy machine
@pytest.mark.parametrize(
    ("feature", "layout"),
    crossed([name for name, each in FEATURES.items() if not each.in_ecosystem], [mark(name) for name in COLUMNS]),
)
def test_a_feature_is_as_on_one_process_or_refused_by_name(feature: str, layout: str, tmp_path: Path):
    check(layout, feature, tmp_path / "run")
