"""The samples of an update in words, and the settings that give as many."""

from __future__ import annotations

import itertools
import re

import pytest

from accel_trainer.checkpoint.changed_run import UpdateBatch


def test_samples_of_an_update_are_given_with_their_factors() -> None:
    assert UpdateBatch(16, 2, 4, 2).describe() == "16 samples = 4 x 2 x 2 (micro-batch x accumulation x ranks)"
    assert UpdateBatch(1, 1).describe() == "1 sample"
    # A script that counts otherwise: factors of another product would be wrong.
    assert UpdateBatch(1_600, 2, 4, 2).describe() == "1,600 samples"


@pytest.mark.parametrize(
    ("now", "wanted", "settings"),
    [
        (UpdateBatch(16, 2, 4, 2), 32, "gradient_accumulation_steps=4 (now 2) or size=8 (now 4)"),
        (UpdateBatch(16, 2, 4, 2), 12, "size=3 (now 4)"),
        (UpdateBatch(24, 2, 4, 3), 16, "gradient_accumulation_steps=2 (now 3)"),
        (UpdateBatch(24, 1, 8, 3), 20, "size=5 (now 8) and gradient_accumulation_steps=4 (now 3)"),
        (UpdateBatch(16, 2, 4, 2), 9, "a number of ranks that divides 9"),
    ],
)
def test_settings_for_as_many_samples_are_named_with_their_present_values(
    now: UpdateBatch, wanted: int, settings: str
) -> None:
    assert now.settings_for(wanted, "size") == settings


def test_every_setting_that_is_named_gives_the_samples() -> None:
    for size, steps, ranks, wanted in itertools.product(range(1, 7), range(1, 5), range(1, 4), range(1, 40)):
        text = UpdateBatch(size * steps * ranks, ranks, size, steps).settings_for(wanted, "size")
        for way in text.split(" or "):
            named = {name: int(value) for name, value in re.findall(r"(size|steps)=(\d+)", way)}
            product = named.get("size", size) * named.get("steps", steps) * ranks
            assert product == wanted if named else wanted % ranks
