"""Lines appear once a job, or once a rank and in order; nothing else of Python's logging changes."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from accel_trainer import PartialState
from accel_trainer.errors import ConfigError
from accel_trainer.logging import current_rank, get_logger, tqdm
from accel_trainer.runtime.process import init_process
from tests.ranks import preload, run_ranks

preload("accel_trainer.state")


def test_a_line_is_reported_where_it_was_written(caplog: pytest.LogCaptureFixture):
    logger = get_logger("accel_trainer.test_place")
    logger.warning("plain %d", 1)
    logger.warning("everywhere", main_process_only=False)
    logger.warning("in order", in_order=True)
    logger.warning_once("once")
    assert [record.funcName for record in caplog.records] == ["test_a_line_is_reported_where_it_was_written"] * 4
    assert caplog.messages == ["plain 1", "[rank 0] everywhere", "[rank 0] in order", "once"]


def test_a_warning_is_given_once_by_whatever_logger_of_that_name(caplog: pytest.LogCaptureFixture):
    for name in ("accel_trainer.test_once", "accel_trainer.test_once", "accel_trainer.test_once_more"):
        get_logger(name).warning_once("seen %s", name)
    assert caplog.messages == ["seen accel_trainer.test_once", "seen accel_trainer.test_once_more"]


def test_the_level_is_set_on_that_logger_only():
    root = logging.getLogger().level
    logger = get_logger("accel_trainer.test_level", log_level="debug")
    assert logger.isEnabledFor(logging.DEBUG)
    assert logging.getLogger().level == root
    assert get_logger("accel_trainer.test_level").isEnabledFor(logging.DEBUG)
    with pytest.raises(ValueError, match="Unknown level: 'LOUD'"):
        get_logger("accel_trainer.test_level", log_level="loud")


def test_a_variable_sets_the_level_of_the_packages_lines():
    package = logging.getLogger("accel_trainer")
    before, root = package.level, logging.getLogger().level
    try:
        init_process({"ACCEL_TRAINER_LOG_LEVEL": "info"}, use_cpu=True)
        assert package.isEnabledFor(logging.INFO)
        assert not package.isEnabledFor(logging.DEBUG)
        assert logging.getLogger().level == root
    finally:
        package.setLevel(before)
    with pytest.raises(ConfigError, match=r"ACCEL_TRAINER_LOG_LEVEL is 'loud'; expected one of .*info"):
        init_process({"ACCEL_TRAINER_LOG_LEVEL": "loud"}, use_cpu=True)


def write_lines(path: str) -> int:
    """Write lines of every kind to one file that all ranks append to."""
    state = PartialState(cpu=True)
    handler = logging.FileHandler(path)
    logging.getLogger("accel_trainer.test_ranks").addHandler(handler)
    logger = get_logger("accel_trainer.test_ranks", log_level="INFO")
    logger.info("main")
    state.wait_for_everyone()
    for number in range(3):
        logger.info("turn %d", number, in_order=True)
    # A level may differ from rank to rank; the turns still fit together.
    if state.process_index == 1:
        logger.logger.setLevel("ERROR")
    logger.info("quiet", in_order=True)
    logger.error("error", main_process_only=False, in_order=True)
    return current_rank()


def test_ranks_write_in_order_and_the_others_are_silent(tmp_path: Path):
    assert run_ranks(write_lines, 3, str(tmp_path / "log")) == [0, 1, 2]
    turns = [f"[rank {rank}] turn {number}" for number in range(3) for rank in range(3)]
    ends = ["[rank 0] quiet", "[rank 2] quiet", *(f"[rank {rank}] error" for rank in range(3))]
    assert (tmp_path / "log").read_text().splitlines() == ["main", *turns, *ends]


def draw_bars() -> tuple[list[int], str, str]:
    """What a bar iterates over, and what it and a bar of every rank draw."""
    PartialState(cpu=True)
    main, everywhere = io.StringIO(), io.StringIO()
    items = list(tqdm(range(3), file=main))
    list(tqdm(range(3), main_process_only=False, file=everywhere))
    return items, main.getvalue(), everywhere.getvalue()


def test_a_progress_bar_shows_on_rank_0_only():
    results = run_ranks(draw_bars, 2)
    assert [items for items, _, _ in results] == [[0, 1, 2]] * 2
    assert "3/3" in results[0][1]
    assert results[1][1] == ""
    assert all("3/3" in everywhere for _, _, everywhere in results)


def test_a_bar_can_be_switched_off_by_name():
    drawn = io.StringIO()
    list(tqdm(range(3), file=drawn, disable=True))
    assert drawn.getvalue() == ""
    with pytest.raises(ConfigError, match=r"tqdm got True as its first.*; give .* main_process_only=True by"):
        tqdm(True, range(3))
