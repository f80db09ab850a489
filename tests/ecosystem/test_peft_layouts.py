"""Adapters of PEFT on layers that ranks share: numbers, files and states of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_trainer.errors import ConfigError
from accel_trainer.strategies.parallel.plans import plan_experts, plan_layers
from tests.ecosystem.peft_models import adapt, build_peft_trainer, trained_tensors
from tests.loops import start, updates
from tests.ranks import preload, run_ranks
from tests.strategies.parallel.test_tensor_parallel import tiny_model, tokens

peft = pytest.importorskip("peft")
preload("peft", "accel_trainer.accelerator", "transformers.models.auto.modeling_auto")
preload("accel_trainer.trainer.trainer", "transformers.models.llama.modeling_llama")

# Of each way in which a layer is sharded, one: rows and columns, an embedding and a head; tied ones, with biases; fused
# matrices that are gathered; copies that are trained in full; prompts; attention beside experts.
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "everywhere": ("qwen3", "lora", {"target_modules": EVERYWHERE}),
    "tied": ("qwen2", "lora", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True, "use_rslora": True}),
    "fused": ("phi3", "lora", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "saved": ("qwen3", "lora", {"modules_to_save": ["lm_head", "embed_tokens", "q_norm"]}),
    "prompts": ("qwen3", "prompt", {}),
    "experts": ("mixtral", "lora", {"target_modules": ["q_proj", "o_proj"]}),
}
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tp": ({"tp_size": 2, "loss_parallel": True}, tuple(CASES)),
    "tp x shards": ({"tp_size": 2, "dp_shard_size": 2}, ("everywhere", "saved")),
    "ep": ({"dp_shard_size": 2, "ep_size": 2}, ("experts",)),
}


def build(name: str) -> nn.Module:
    kind, method, options = CASES[name]
    model = tiny_model(kind)
    model.config.output_router_logits = False  # the loss that balances experts is of each reader's rows
    return adapt(model, method, **({"init_lora_weights": False} if method == "lora" else {}), **options)


def train(accelerator: Any, model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Return losses and norms of updates on batches of four rows, of which each reader has its part."""
    rank, size = accelerator.readers.rank, accelerator.readers.world_size
    rows = [ids.chunk(size)[rank] for ids in tokens(16).chunk(4)[first:last]]
    seen = updates(model, optimizer, [{"input_ids": ids, "labels": ids} for ids in rows], accelerator)
    seen[::2] = [accelerator.reduce(torch.tensor(loss), "mean").item() for loss in seen[::2]]
    return seen


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(tokens()).logits


def run(folder: str, sizes: dict[str, Any], names: tuple[str, ...], resume: str) -> dict[str, Any]:
    """Train four updates with a save of state and adapters; go on from the states of another run."""
    found = {}
    for name in names:
        seen = []
        for state in (None, f"{resume}/{name}/state"):
            accelerator, model = start(sizes=sizes), build(name)
            trained = [p for p in model.parameters() if p.requires_grad]
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1, momentum=0.5))
            if state is None:
                first = train(accelerator, model, optimizer, 0, 2)
                accelerator.save_state(f"{folder}/{name}/state")
            else:
                accelerator.load_state(state)
            seen.append(train(accelerator, model, optimizer, 2, 4))
            if state is None:
                model.save_pretrained(f"{folder}/{name}/adapters", is_main_process=accelerator.is_main_process)
                seen, after = [first + seen[0]], logits(model)
            accelerator.wait_for_everyone()
        found[name] = {"seen": seen[0], "resumed": seen[1], "logits": after}
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = str(tmp_path_factory.mktemp("alone"))
    return run_ranks(run, 1, folder, {}, tuple(CASES), folder)[0], folder


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_train_and_save_and_resume_as_on_one_process(layout: str, alone: Any, tmp_path: Path):
    sizes, names = LAYOUTS[layout]
    world_size = sizes.get("tp_size", 1) * sizes.get("dp_shard_size", 1)
    results = run_ranks(run, world_size, str(tmp_path), sizes, names, alone[1], timeout=200)
    again = run_ranks(run, 1, str(tmp_path / "again"), {}, names, str(tmp_path))[0]
    for name in names:
        expected = alone[0][name]
        for found in results:
            assert found[name]["seen"] == pytest.approx(expected["seen"], abs=2e-6)
            assert found[name]["resumed"] == pytest.approx(expected["seen"][4:], abs=2e-6)
            assert torch.allclose(found[name]["logits"], expected["logits"], atol=2e-6)
        assert again[name]["resumed"] == pytest.approx(expected["seen"][4:], abs=2e-6)
        files = {path.name for path in Path(tmp_path, name, "adapters").iterdir()}
        assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
        loaded = peft.PeftModel.from_pretrained(tiny_model(CASES[name][0]), tmp_path / name / "adapters")
        assert torch.allclose(logits(loaded), expected["logits"], atol=2e-6)


def run_trainer(folder: str, resume: str, **options: Any) -> dict[str, Any]:
    """Train four updates with a checkpoint in the middle, and the last two from another run's."""
    found = {}
    for name, checkpoint in (("whole", None), ("resumed", f"{resume}/whole/checkpoint-2")):
        trainer = build_peft_trainer(
            f"{folder}/{name}", "single", "lora", save_strategy="steps", save_steps=2, **options
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        found[name] = {"losses": losses, "trained": trained_tensors(trainer), "eval": trainer.evaluate()["eval_loss"]}
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_a_trainer_trains_and_resumes_adapters_of_sharded_layers(tmp_path: Path):
    (alone,) = run_ranks(run_trainer, 1, f"{tmp_path}/alone", f"{tmp_path}/alone")
    options = {"parallelism_config": {"tp_size": 2}}
    shared = run_ranks(run_trainer, 2, f"{tmp_path}/tp", f"{tmp_path}/alone", **options)[0]
    for name, found in shared.items():
        assert found["losses"] == pytest.approx(alone[name]["losses"], abs=2e-6)
        assert found["eval"] == pytest.approx(alone[name]["eval"], abs=2e-6)
        for parameter, value in alone[name]["trained"].items():
            assert found["trained"][parameter] == pytest.approx(value, abs=2e-5)  # AdamW follows signs at first
    names = {path.name for path in Path(tmp_path, "tp", "whole", "checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names


def masks() -> dict[str, list[Tensor]]:
    """Return the masks of LoRA's dropout before layers whose inputs all ranks have, and before one of shards."""
    found: dict[str, list[Tensor]] = {}
    accelerator = start(sizes={"tp_size": 2})
    options = {"target_modules": ["q_proj", "k_proj", "o_proj"], "lora_dropout": 0.5}
    model = accelerator.prepare(adapt(tiny_model("qwen3"), "lora", **options)).train()
    for where, module in model.named_modules():
        if "lora_dropout.default" in where:
            own = found.setdefault(where.split(".")[-3], [])
            module.register_forward_hook(lambda m, args, output, own=own: own.append(output / args[0]))
    torch.manual_seed(1)
    model(tokens())
    return found


@pytest.mark.multirank
def test_inputs_of_adapters_drop_out_alike_unless_they_are_sharded():
    first, second = run_ranks(masks, 2)
    for name in ("q_proj", "k_proj"):
        assert first[name][0].equal(second[name][0])
    assert not first["o_proj"][0].equal(second["o_proj"][0])


def with_config(config: Any) -> nn.Module:
    return peft.get_peft_model(tiny_model("mixtral"), config)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), r"q_proj is .* of the kind DoraLinearVariant"),
        (peft.LoraConfig(target_parameters=["experts.down_proj"]), r"mlp.experts is .* peft.tuners.lora.layer.ParamW"),
        (
            peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
            r"base_model is .*ia3.model.IA3",
        ),
        (peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), r"prompt_encoder.default is .*Prefix"),
    ],
)
def test_adapters_that_cannot_follow_sharded_layers_are_refused_by_name(config: Any, kind: str):
    model = with_config(config)
    with pytest.raises(ConfigError, match=rf"^tp_size=2: .*{kind}.*; use one of them, or set the size to 1"):
        plan_layers(model, 2, (), "tp_size=2")


def test_adapters_of_experts_are_refused_where_ranks_share_experts():
    model = with_config(peft.LoraConfig(target_parameters=["experts.down_proj"]))
    with pytest.raises(ConfigError, match=r"^ep_size=2: .*mlp.experts is an adapter of PEFT .*ParamWrapper"):
        plan_experts(model, 2, (), "ep_size=2")
