from __future__ import annotations

import json

import pytest

from accel_trainer import Accelerator
from accel_trainer.utils import constants
from accel_trainer.utils.constants import BaseEnum, LoggerType, PrecisionType, RNGType

CLOSED_SETS = [each for each in vars(constants).values() if isinstance(each, type) and issubclass(each, BaseEnum)]


@pytest.mark.parametrize("kind", [each for each in CLOSED_SETS if each is not BaseEnum])
def test_a_member_is_its_word(kind: type[BaseEnum]):
    assert kind.list() == [member.value for member in kind]
    for member in kind:
        assert member == member.value == str(member) == f"{member}"
        assert member.value in kind
        assert json.dumps(member) == json.dumps(member.value)
    assert "no such word" not in kind


def test_members_are_taken_as_options():
    accelerator = Accelerator(cpu=True, mixed_precision=PrecisionType.BF16, rng_types=[RNGType.TORCH])
    assert accelerator.mixed_precision == "bf16"
    assert Accelerator(cpu=True, log_with=[]).trackers == []
    assert LoggerType("tensorboard") is LoggerType.TENSORBOARD
