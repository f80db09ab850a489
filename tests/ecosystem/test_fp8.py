"""Linear layers in torchao's fp8: emulated on the CPU, compared with a closed form, with bf16 and over layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, AORecipeKwargs, Trainer, TrainingArguments
from accel_trainer.config.schema import Fp8Config
from accel_trainer.errors import ConfigError
from accel_trainer.precision import Float8Recipe, PrecisionPolicy, apply_float8, build_precision
from tests.ranks import preload, run_ranks

float8 = pytest.importorskip("torchao.float8")
preload("transformers.models.llama.modeling_llama", "accel_trainer.accelerator", "accel_trainer.trainer")

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_UPDATES, BATCH = 4, 8


def build_model(*, seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32,
        )
    )  # fmt: skip


def samples() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 128, (BATCH * NUM_UPDATES, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def build_accelerator(strategy: str, precision: str = "fp8", **sections: Any) -> Accelerator:
    config = {"strategy": strategy, "mixed_precision": precision, **sections}
    if precision == "fp8":
        config["fp8"] = {"emulate": True, **sections.get("fp8", {})}
    return Accelerator(cpu=True, config=config)


def train(
    accelerator: Accelerator, *, model: nn.Module | None = None, load: str = "", save: str = ""
) -> dict[str, Any]:
    """Train over an epoch; save in its middle, or load there and go on."""
    model = model or build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(samples(), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, half = [], NUM_UPDATES // 2
    if load:
        accelerator.load_state(load)
        loader = accelerator.skip_first_batches(loader, half)
    weights = accelerator.get_state_dict(model)
    for index, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if save and index + 1 == half:
            accelerator.save_state(save)
            weights = accelerator.get_state_dict(model)
    kinds = {type(getattr(p, "_local_tensor", p)).__name__ for n, p in model.named_parameters() if "up_proj" in n}
    return {
        "losses": losses,
        "weights": {name: tensor.clone() for name, tensor in weights.items()},
        "kinds": kinds,
        "num_fp8": sum(type(module).__name__ == "Float8Linear" for module in model.modules()),
    }


def run_layouts(folder: str) -> dict[str, Any]:
    """What this rank sees under DDP and FSDP2, uninterrupted and resumed."""
    results = {
        "bf16": train(build_accelerator("fsdp2", "bf16")),
        "ddp": train(build_accelerator("ddp")),
        "fsdp2": train(build_accelerator("fsdp2"), save=f"{folder}/state"),
        "resumed": train(build_accelerator("fsdp2"), load=f"{folder}/state"),
        "bf16 gathered": train(build_accelerator("fsdp2", fp8={"enable_fsdp_float8_all_gather": False})),
    }
    accelerator = build_accelerator("fsdp2", fsdp={"cpu_ram_efficient_loading": True})
    with torch.device("cpu" if accelerator.is_main_process else "meta"):
        model = build_model()
    results["loaded by rank 0"] = train(accelerator, model=model)
    return results


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("fp8")
    return run_ranks(run_layouts, 2, str(folder), timeout=110)[0], folder


def round_to_fp8(tensor: Tensor) -> Tensor:
    """The values of a tensor that is scaled to the range of e4m3, rounded to it, and scaled back."""
    scale = torch.finfo(torch.float8_e4m3fn).max / tensor.abs().max().double()
    return (tensor.float() * scale.float()).to(torch.float8_e4m3fn).float() / scale.float()


def test_a_layer_multiplies_what_was_rounded_to_fp8():
    accelerator = build_accelerator("single")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    middle = model[1].weight.detach().clone()
    model = accelerator.prepare(model)
    seen = {}
    model[1].register_forward_hook(lambda module, inputs, output: seen.update(input=inputs[0], output=output))
    model(torch.randn(16, 32))
    rounded = round_to_fp8(seen["input"].bfloat16()) @ round_to_fp8(middle).T
    exact = seen["input"].float() @ middle.T
    # Sums are rounded to bf16 on both sides; three bits of mantissa are some 4 % away from the exact product.
    assert (seen["output"].float() - rounded).norm() < 0.006 * exact.norm()
    assert 0.02 * exact.norm() < (seen["output"].float() - exact).norm() < 0.08 * exact.norm()


@pytest.mark.multirank
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "bf16 gathered"])
def test_losses_are_those_of_bf16_but_for_the_rounding(layout: str, on_two_ranks: tuple[dict[str, Any], Path]):
    results = on_two_ranks[0]
    assert results[layout]["losses"] == pytest.approx(results["bf16"]["losses"], rel=2e-3)
    assert results[layout]["losses"] != pytest.approx(results["bf16"]["losses"], rel=1e-6)
    # Two layers of seven, and the head; the first linear layer and the head are left out.
    assert (results[layout]["num_fp8"], results["bf16"]["num_fp8"]) == (13, 0)


@pytest.mark.multirank
def test_fsdp2_gathers_in_fp8_and_keeps_full_precision(on_two_ranks: tuple[dict[str, Any], Path]):
    results = on_two_ranks[0]
    wrapped = {name: run["kinds"] == {"WeightWithDynamicFloat8CastTensor"} for name, run in results.items()}
    assert [name for name, gathers in wrapped.items() if gathers] == ["fsdp2", "resumed", "loaded by rank 0"]
    assert all(tensor.dtype == torch.float32 for tensor in results["fsdp2"]["weights"].values())
    assert results["loaded by rank 0"]["losses"] == results["fsdp2"]["losses"]


@pytest.mark.multirank
def test_a_resumed_run_is_the_interrupted_one_and_other_layouts_read_its_state(
    on_two_ranks: tuple[dict[str, Any], Path],
):
    results, folder = on_two_ranks
    assert results["resumed"]["losses"] == results["fsdp2"]["losses"][NUM_UPDATES // 2 :]
    alone = train(build_accelerator("single", "bf16"), load=str(folder / "state"))
    assert alone["weights"].keys() == results["fsdp2"]["weights"].keys()
    assert all(torch.equal(alone["weights"][name], each) for name, each in results["fsdp2"]["weights"].items())
    assert alone["losses"] == pytest.approx(results["resumed"]["losses"], rel=5e-3)


def test_a_recipe_says_how_and_which_layers():
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    recipe = AORecipeKwargs(
        config=type(config)(**{**vars(config), "emulate": True}), module_filter_func=lambda _, name: "down_proj" in name
    )
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
    assert (accelerator.fp8_backend, accelerator.ao_recipe_handler) == ("AO", recipe)
    model = accelerator.prepare(build_model())
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    assert names == [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]


@pytest.mark.parametrize(("compiles", "emulates"), [(False, False), (True, False), (False, True)])
def test_fp8_that_is_not_compiled_is_said_to_be_slow(
    compiles: bool, emulates: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = PrecisionPolicy(float8=Float8Recipe.build(Fp8Config(emulate=emulates)))
    apply_float8(build_model(), policy, compiles=compiles)
    assert ("fp8 without torch.compile" in caplog.text) == (not compiles and not emulates)


def test_the_trainer_trains_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCEL_TRAINER_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCEL_TRAINER_FP8__EMULATE", "true")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(model=build_model(), args=arguments, train_dataset=samples())
    trainer.train()
    assert trainer.accelerator.mixed_precision == "fp8"
    assert sum(type(module).__name__ == "Float8Linear" for module in trainer.model.modules()) == 13


def test_what_cannot_be_honoured_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ConfigError, match=r"fp8 was asked for on cpu, and this kind of device multiplies no .*fp8\.emulate: true"
    ):
        Accelerator(cpu=True, mixed_precision="fp8")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"fp8 was asked for on cuda, and A100 has no cores .*8\.9"):
        build_precision("fp8", torch.device("cuda"))
    with pytest.raises(ConfigError, match="none of Sequential's 1 linear layer"):
        build_accelerator("single").prepare(nn.Sequential(nn.Linear(4, 1)))
    with pytest.raises(ConfigError, match="was given config and pad_inner_dim"):
        AORecipeKwargs(config=float8.Float8LinearConfig(), pad_inner_dim=True)
    with pytest.raises(ConfigError, match="holds an AORecipeKwargs, and mixed_precision=bf16"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])
