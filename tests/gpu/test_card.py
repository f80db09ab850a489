"""What only a card has: its kernels for fp8 and for optimizers in 8 bits, CUDA graphs, engines over nccl, paged memory.

One rank, since nccl refuses two of one card. docs/gpu.md says when this was last run on one.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import stand_in
from tests.gpu.test_one_gpu import begin
from tests.loops import tiny_model
from tests.ranks import ask_jobs, preload, run_ranks
from tests.trainer_jobs import build_trainer

preload("accel_trainer.accelerator", "tests.trainer_jobs")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(500),  # of which compilers may take some minutes, once
]

NUM_UPDATES = 6
BF16, FP8 = {"mixed_precision": "bf16"}, {"mixed_precision": "fp8"}
GRAPHS = {"compile": {"backend": "inductor", "mode": "reduce-overhead"}}
OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def zero(**section: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": section, "train_micro_batch_size_per_gpu": 4}}


ENGINES: dict[str, tuple[dict[str, Any], float, tuple[str, ...]]] = {
    "bf16": (BF16, 3e-2, ()),
    "CUDA graphs": (GRAPHS, 1e-3, ()),
    "CUDA graphs, bf16, windows of two": ({**GRAPHS, **BF16, "gradient_accumulation_steps": 2}, 3e-2, ()),
    "CUDA graphs, watched losses": ({**GRAPHS, "on_nonfinite": "skip_step"}, 1e-3, ()),
    "fp8": (FP8, 3e-2, ("torchao",)),
    "fp8, compiled": ({**FP8, "compile": {"backend": "inductor"}}, 3e-2, ("torchao",)),
    "ddp": ({"strategy": "ddp"}, 1e-3, ()),
    "fsdp2": ({"strategy": "fsdp2"}, 1e-3, ()),
    "fsdp2, bf16, compiled": ({"strategy": "fsdp2", **BF16, "compile": {"backend": "inductor"}}, 3e-2, ()),
    "fsdp2, shards on the host": ({"strategy": "fsdp2", "fsdp": {"offload_params": True}}, 1e-3, ()),
    "fsdp2, fp8": ({"strategy": "fsdp2", **FP8}, 3e-2, ("torchao",)),
    "zero1": (zero(stage=1), 1e-3, ("deepspeed",)),
    "zero2, bf16": ({**zero(stage=2), **BF16}, 3e-2, ("deepspeed",)),
    "zero3": (zero(stage=3, stage3_param_persistence_threshold=0), 1e-3, ("deepspeed",)),
    "zero3, state and shards on the host": (zero(**OFFLOADED), 1e-3, ("deepspeed",)),
}
"""A configuration, how far its losses may be from those of one process in fp32, and the packages that it needs."""


def losses_of_engine(config: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Train; save after half of the updates, in the background, and after the last go on from there once more."""
    accelerator = begin(config=config)
    # Layers whose sizes are multiples of 16, as fp8 asks for.
    model = tiny_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    window = accelerator.gradient_accumulation_steps

    def train(first: int) -> list[float]:
        losses = []
        for number in range(first, NUM_UPDATES):
            ids = torch.randint(3, 64, (4, 32), generator=torch.Generator().manual_seed(number)).to(accelerator.device)
            for _ in range(window):  # the same rows, so that each window has the gradients of one update
                with accelerator.accumulate(model):
                    loss = model(input_ids=ids, labels=ids).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            if folder and not first and number == NUM_UPDATES // 2 - 1:
                accelerator.save_state(Path(folder, "state"), async_=True)
        return losses

    seen: dict[str, Any] = {"losses": train(0)}
    if folder:
        accelerator.wait_for_checkpoint()
        accelerator.load_state(Path(folder, "state"))
        seen["again"] = train(NUM_UPDATES // 2)
        seen["weights"] = {name: tuple(value.shape) for name, value in accelerator.get_state_dict(model).items()}
    return seen


def present(packages: tuple[str, ...]) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each engine in a process of its own, some at a time."""

    def run(name: str) -> dict[str, Any]:
        config, _, packages = ENGINES[name]
        if not present(packages):
            return {}
        folder = str(tmp_path_factory.mktemp("engine"))
        return run_ranks(losses_of_engine, 1, config, folder, timeout=400)[0]

    alone = run_ranks(losses_of_engine, 1, {}, None, env=stand_in.ALONE, timeout=200)[0]["losses"]
    return alone, ask_jobs(run, ENGINES, at_once=5)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_the_losses_of_one_process_and_goes_on_from_its_checkpoint(engine: Any, name: str):
    _, tolerance, packages = ENGINES[name]
    if not present(packages):
        pytest.skip(f"needs {packages[0]}")
    alone, ask = engine
    seen = ask(name)
    assert seen["losses"] == pytest.approx(alone, rel=tolerance)
    assert seen["again"] == pytest.approx(seen["losses"][NUM_UPDATES // 2 :], rel=1e-3)  # kernels that add in any order
    assert seen["weights"]["model.embed_tokens.weight"] == (64, 64)


# --- the Trainer ---------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "CUDA graphs": ({"torch_compile": True, "torch_compile_mode": "reduce-overhead", "bf16": True}, ()),
    "paged in 8 bits": ({"optim": "paged_adamw_8bit"}, ("bitsandbytes",)),
    "in 8 bits": ({"optim": "adamw_bnb_8bit", "bf16": True}, ("bitsandbytes",)),
    "lion in 8 bits": ({"optim": "lion_8bit"}, ("bitsandbytes",)),
    "torchao's 8 bits": ({"optim": "adamw_torch_8bit"}, ("torchao",)),
    "torchao's 4 bits": ({"optim": "adamw_torch_4bit"}, ("torchao",)),
}
"""Training arguments and the packages that they need."""


def quantised() -> Any:
    """Return a tiny llama whose base is in 4 bits, with adapters."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = tiny_model("llama", hidden_size=64, intermediate_size=128)
    folder = Path.cwd() / "base"
    base.save_pretrained(folder)
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packing, device_map={"": 0})
    torch.manual_seed(0)
    return peft.get_peft_model(
        peft.prepare_model_for_kbit_training(model), peft.LoraConfig(r=4, target_modules="all-linear")
    )


def train_and_resume(folder: str, changes: dict[str, Any], is_quantised: bool = False) -> dict[str, Any]:
    os.chdir(folder)
    seen: dict[str, Any] = {}
    for name, resume in (("whole", None), ("resumed", 3)):
        trainer = build_trainer(
            Path(folder, "run"), use_cpu=False, save_strategy="steps", save_steps=3, max_steps=6, learning_rate=1e-3,
            eval_strategy="steps", eval_steps=3, samples=32, **changes,
        )  # fmt: skip
        if is_quantised:
            trainer = type(trainer)(
                quantised(), trainer.args, train_dataset=trainer.train_dataset, eval_dataset=trainer.eval_dataset
            )
        checkpoint = str(Path(folder, "run", f"checkpoint-{resume}")) if resume else None
        trainer.train(resume_from_checkpoint=checkpoint)
        history = trainer.state.log_history
        seen[name] = [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
        seen["optimizer"] = type(trainer.optimizer.optimizer).__module__
        seen["files"] = sorted(each.name for each in Path(folder, "run", "checkpoint-3").iterdir())
    return seen


@pytest.fixture(scope="module")
def by_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(name: str) -> dict[str, Any]:
        changes, packages = WAYS[name]
        if not present(packages):
            return {}
        folder = str(tmp_path_factory.mktemp("trainer"))
        return run_ranks(train_and_resume, 1, folder, changes, env=stand_in.ALONE, timeout=400)[0]

    return ask_jobs(run, WAYS, at_once=5)


@pytest.mark.parametrize("name", WAYS)
def test_a_trainer_goes_on_with_the_losses_of_the_run_that_was_not_interrupted(by_trainer: Any, name: str):
    _, packages = WAYS[name]
    if not present(packages):
        pytest.skip(f"needs {packages[0]}")
    seen = by_trainer(name)
    assert len(seen["whole"]) == 8
    assert seen["resumed"] == pytest.approx(seen["whole"], rel=1e-3)
    assert not packages or seen["optimizer"].startswith(packages[0])


def test_adapters_on_a_base_in_four_bits_train_and_go_on(tmp_path: Path):
    if not present(("bitsandbytes", "peft")):
        pytest.skip("needs bitsandbytes and PEFT")
    changes = {"bf16": True, "optim": "paged_adamw_8bit"}
    (seen,) = run_ranks(train_and_resume, 1, str(tmp_path), changes, is_quantised=True, env=stand_in.ALONE, timeout=300)
    assert seen["resumed"] == pytest.approx(seen["whole"], rel=1e-3)
    assert seen["whole"][3] != seen["whole"][-1]  # what it evaluates to after three updates and after six
    assert "adapter_model.safetensors" in seen["files"]
    assert "model.safetensors" not in seen["files"]
