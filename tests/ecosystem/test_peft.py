"""PEFT: adapters trained, saved, resumed and merged on one process, DDP, FSDP2 and ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_jobs import TokenDataset, arguments, build_model

peft = pytest.importorskip("peft")


def test_lora_trains_and_saves_the_adapter_alone(tmp_path: Path):
    from accel_trainer import Trainer

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_model(), config)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    trainer = Trainer(model, arguments(tmp_path, save_strategy="epoch"), train_dataset=TokenDataset(16))
    trainer.train()

    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = {path.name for path in (tmp_path / "checkpoint-4").glob("*.safetensors")}
    assert weights == {"adapter_model.safetensors"}
    assert (tmp_path / "checkpoint-4" / "adapter_config.json").is_file()
