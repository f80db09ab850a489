"""Planned peaks against measured ones, of configurations that nobody tuned for, and of advice that is followed.

A native loop trains three updates. The measured peak is that of torch's allocator in the last one: what its profiler
sees come and go, on all that Python holds before it. A plan that is off by more than 5 % in either direction misses its
bound; then the cheapest change for less memory than it takes is followed, and measured against that memory. So is, of
some cases, the file that `accel-trainer estimate --fit` writes for that memory.

    python benchmarks/planned_peaks.py 1 [NUMBER ...]    # cases on one process; others as run.py starts them
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from timing import Row
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from accel_trainer import Accelerator
from accel_trainer.contrib import estimate
from accel_trainer.contrib.planner import Workload, optimizer_builder
from accel_trainer.contrib.preflight import PlannedRun
from accel_trainer.state import AcceleratorState

BOUND = 1.05
_BF16: dict[str, Any] = {"mixed_precision": "bf16"}
_SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
_GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 8}
_T5 = {"d_model": 128, "d_ff": 512, "d_kv": 16, "num_layers": 3, "num_heads": 8, "decoder_start_token_id": 0}
_VIT = {"image_size": 64, "patch_size": 8}
_FEW_HEADS = {"head_dim": 16, "num_key_value_heads": 2}


def zero_options(stage: int, **more: Any) -> dict[str, Any]:
    """Return the options of a stage of ZeRO, with buckets that are small for models of a few MiB."""
    zero = {"stage": stage, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, **more}
    return {"strategy": "deepspeed", "deepspeed": {"zero_optimization": zero}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run on so many ranks: rows and tokens are those of a micro-batch, `settings` the optimizer's."""

    family: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 4
    length: int = 256
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    has_adapters: bool = False
    """LoRA of all matrices in layers, by PEFT."""
    is_packed: bool = False
    asks_fit: bool = False
    """Whether `estimate --fit` is given the memory that the advice is for, too."""

    def __str__(self) -> str:
        ways = [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        return ", ".join([self.family, *filter(None, ["LoRA" * self.has_adapters, "packed" * self.is_packed]), *ways])[
            :70
        ]


CASES: tuple[Case, ...] = (
    Case(asks_fit=True),
    Case(sizes={"vocab_size": 16000}, options={**_BF16, "loss_chunk_tokens": 64}),
    Case(options=_BF16, rows=2, length=1024, optimizer="SGD", settings={"momentum": 0.9, "nesterov": True}),
    Case(options={"activation_checkpointing": "full"}, rows=16, optimizer="RMSprop"),
    Case(options={**_BF16, "activation_checkpointing": "selective"}, length=512),
    Case(options={**_BF16, "activation_checkpointing": "every:2", "gradient_accumulation_steps": 3}, length=512),
    Case(options={**_BF16, "activation_checkpointing": "full", "activation_offload": True}, rows=8),
    Case(family="qwen3", sizes=_FEW_HEADS, options={**_BF16, "ema_decay": 0.99}, rows=2, asks_fit=True),
    Case(family="gemma2", sizes=_FEW_HEADS, rows=2, optimizer="NAdam"),
    Case(family="gpt2", sizes=_GPT2, options=_BF16, asks_fit=True),
    Case(family="bert", rows=8, length=128, settings={"weight_decay": 0.1}),
    Case(family="t5", sizes=_T5, rows=8, length=128, optimizer="Adagrad"),
    Case(family="vit", sizes=_VIT, options={**_BF16, "gradient_accumulation_steps": 2}, rows=32, length=0),
    Case(options=_BF16, is_packed=True, rows=2, length=512),
    Case(options=_BF16, has_adapters=True),
    Case(options={"strategy": "ddp"}, ranks=2, rows=2, asks_fit=True),
    Case(options={"strategy": "fsdp2", **_BF16}, ranks=2, rows=2),
    Case(options={"strategy": "fsdp2", "activation_checkpointing": "selective", "ema_decay": 0.9}, ranks=2, rows=2),
    Case(options={"strategy": "fsdp2", "loss": "chunked", "activation_offload": True}, ranks=2, rows=2),
    Case(options={"strategy": "fsdp2", **_BF16}, has_adapters=True, ranks=2, rows=2),
    Case(options=zero_options(1), ranks=2, rows=2),
    Case(options={**_BF16, **zero_options(2)}, ranks=2, rows=2),
    Case(options={**_BF16, **zero_options(3)}, ranks=2, rows=2),
    Case(options=zero_options(2, offload_optimizer={"device": "cpu"}), ranks=2, rows=2),
    Case(options={"parallel": {"dp_replicate_size": 2, "dp_shard_size": 2}, **_BF16}, ranks=4, rows=1, asks_fit=True),
    Case(options={"parallel": {"tp_size": 2}}, ranks=4, rows=1),
)
_KINDS = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM", "vit": "AutoModelForImageClassification"}


def build_model(case: Case) -> Any:
    """Return the model of a case with random weights, on the device of the context."""
    import transformers

    sizes = {"vocab_size": 2000, "use_cache": False, **_SMALL, **case.sizes}
    config = transformers.AutoConfig.for_model(case.family, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, _KINDS.get(case.family, "AutoModelForCausalLM")).from_config(config)
    if case.has_adapters:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def build_batch(case: Case) -> dict[str, Tensor]:
    """Return a micro-batch."""
    if not case.length:
        return {"pixel_values": torch.rand(case.rows, 3, 64, 64), "labels": torch.zeros(case.rows, dtype=torch.long)}
    ids = torch.randint(3, 2000, (case.rows, case.length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.is_packed:
        batch["position_ids"] = (torch.arange(case.length) % (case.length // 4)).expand_as(ids).contiguous()
    return batch


def begin(case: Case) -> Accelerator:
    """Return the Accelerator of a case, in a process that may have had others."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, config=case.options)


def measured_peak(case: Case) -> int:
    """Return the bytes at the peak of an update of this rank. Collective."""
    accelerator = begin(case)
    model, batch = build_model(case), build_batch(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, case.optimizer)(trained, lr=1e-4, **case.settings)
    model, optimizer = accelerator.prepare(model, optimizer)
    del trained

    def update() -> None:
        for _ in range(accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(2):  # DDP makes its buckets anew after the first
        update()
    peaks = []
    for _ in range(1 if case.ranks == 1 else 3):  # gloo's threads hold buffers of an update for longer now and then
        gc.collect()
        held = sum(storage.nbytes() for storage in _held_storages())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            update()
        events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        peaks.append(held + max(itertools.accumulate(change for _, change in changes)))
    accelerator.free_memory()
    return min(peaks)


def _held_storages() -> Iterator[Any]:
    """Yield the storages of all tensors that Python holds or has held, DDP's buckets among them; each once."""
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.device.type == "cpu" and each.layout is torch.strided:
            local = each.to_local() if hasattr(each, "to_local") else each
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage
    yield from found.values()


def plan_case(case: Case) -> PlannedRun:
    """Return the plan of a case, of a model on the meta device."""
    accelerator = begin(case)
    with torch.device("meta"), accelerator.strategy.building(in_pieces=False):
        model = build_model(case)
    build = optimizer_builder(getattr(torch.optim, case.optimizer), {"lr": 1e-4, **case.settings}, is_on_gpu=False)
    workload = Workload(dtype=None, optimizer=build, inputs=build_batch(case), is_on_gpu=False)
    return PlannedRun(model, accelerator.resolved, accelerator.process, workload, memory=1)


def follow_advice(case: Case, planned: PlannedRun) -> tuple[str, Case, float] | None:
    """Return the cheapest change with which a run fits less memory than it takes, the case with it, and that memory."""
    changes = planned.changes(0)
    if not changes:
        return None
    limit = (min(change.needed_bytes for change in changes) + BOUND * planned.plan.peak) / 2
    change = planned.changes(limit)[0]
    options = copy.deepcopy(case.options) | {name: str(value) for name, value in change.options.items()}
    options["gradient_accumulation_steps"] = planned.rows * planned.num_steps // change.rows
    return change.text, replace(case, options=options, rows=change.rows), limit


def fit_case(case: Case, limit: float) -> Case:
    """Return a case as `estimate --fit` has chosen its layout, micro-batch and ways to save memory."""
    rows = case.rows * case.options.get("gradient_accumulation_steps", 1) * case.ranks
    with torch.device("meta"):
        model = build_model(case)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/train.yaml"
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        sizes = {"num_processes": case.ranks, "global_batch": rows, "sequence": case.length, "fit": f"{int(limit)}B"}
        kept = {name: case.options[name] for name in ("mixed_precision", "ema_decay") if name in case.options}
        words = [word for name, value in (sizes | kept).items() for word in (f"--{name}", str(value))]
        parser = estimate.estimate_command_parser()
        args, others = parser.parse_known_args([folder, *words, "--write", file, "--cpu"])
        estimate.estimate_command(argparse.Namespace(**vars(args), layout_options=others))
        options = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    del options["launch"]  # of the processes that are there
    return replace(case, options=options, rows=options["accumulation"]["micro_batch_size"])


def measure_cases(cases: dict[int, Case]) -> list[Row]:
    """Return rows for each case: planned against measured, and the peaks with what is advised against the memory."""
    rows = []
    for number, case in cases.items():
        if case.has_adapters and importlib.util.find_spec("peft") is None:
            print(f"peft is not installed: {case} is left out")
            continue
        planned = plan_case(case)
        ratio = planned.plan.peak / measured_peak(case)
        rows.append(Row(f"peak {number}: {case}", "the measured one", max(ratio, 1 / ratio), ratio, ratio, BOUND, 1))
        if (advice := follow_advice(case, planned)) is None:
            continue
        text, changed, limit = advice
        followed = {f"advice {number}: {text}": changed}
        if case.asks_fit:
            fitted = fit_case(case, limit)
            followed[f"--fit {number}: {case.family}, micro-batches of {fitted.rows}"] = fitted
        for name, each in followed.items():
            share = measured_peak(each) / limit
            rows.append(Row(name[:60], "the memory", share, share, share, 1.0, 1))
    return rows


def cases_of(ranks: int) -> dict[int, Case]:
    """Return the cases on so many ranks, by number."""
    return {number: case for number, case in enumerate(CASES) if case.ranks == ranks}


def main() -> None:
    """Print the rows as JSON: of numbers that are given, or of all cases for this number of processes. Collective."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    cases = cases_of(accelerator.num_processes)
    given = [int(number) for number in sys.argv[2:]]  # behind the rounds, of which bytes need one
    rows = measure_cases({number: cases[number] for number in given} if given else cases)
    if accelerator.is_main_process:
        print(json.dumps([row.to_dict() for row in rows]), flush=True)
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
