from __future__ import annotations

import os
import sys
import unittest

import pytest

from accel_trainer.errors import ConfigError
from accel_trainer.runtime.availability import (
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)


def test_words_of_truth():
    assert [str_to_bool(word) for word in ("Yes", "on", "1", "n", "FALSE")] == [1, 1, 1, 0, 0]
    assert str_to_bool("true", to_bool=True) is True
    with pytest.raises(ConfigError, match="invalid truth value 'maybe'; expected one of y, yes"):
        str_to_bool("maybe")


def test_a_block_changes_variables_and_puts_them_back():
    with patch_environment(outer=1, Both="a"):
        with pytest.raises(KeyError, match=r"1b2.*no such variable"), patch_environment(both="b", inner=2):
            raise KeyError(os.environ["OUTER"] + os.environ["BOTH"] + os.environ["INNER"], "no such variable")
        assert os.environ["BOTH"] == "a"
        assert "INNER" not in os.environ
        assert parse_flag_from_env("OUTER")
        assert parse_choice_from_env("BOTH") == "a"
        assert get_int_from_env(["INNER", "OUTER"], 7) == 1
    assert "OUTER" not in os.environ
    assert not parse_flag_from_env("OUTER")
    assert parse_choice_from_env("BOTH") == "no"
    assert get_int_from_env(["INNER", "OUTER"], 7) == 7


def test_a_block_without_an_environment_gets_it_back():
    before = dict(os.environ)
    with clear_environment():
        assert not os.environ
        os.environ["LEFT_BEHIND"] = "1"
    assert dict(os.environ) == before


def test_a_purged_function_leaves_launchers_variables_as_they_were():
    @purge_accelerate_environment
    def change() -> None:
        os.environ["ACCELERATE_GIVEN"] = "changed"
        os.environ["ACCEL_TRAINER_NEW"] = "1"
        del os.environ["ACCELERATE_TAKEN"]

    with patch_environment(accelerate_given="1", accelerate_taken="2"):
        change()
        assert (os.environ["ACCELERATE_GIVEN"], os.environ["ACCELERATE_TAKEN"]) == ("1", "2")
        assert "ACCEL_TRAINER_NEW" not in os.environ


@pytest.mark.parametrize("base", [unittest.TestCase, object])
def test_a_purged_class_restores_after_each_test_of_its_subclasses_too(base: type):
    @purge_accelerate_environment
    class Tests(base):  # type: ignore[misc]
        def test_sets(self) -> None:
            os.environ["ACCELERATE_SET"] = "1"

        def helper(self) -> None:
            os.environ["ACCELERATE_KEPT"] = "1"

    class MoreTests(Tests):
        def test_more(self) -> None:
            os.environ["ACCELERATE_SET"] = "2"

    with patch_environment(accelerate_kept="0"):
        for name in ("test_sets", "test_more", "helper"):
            getattr(MoreTests(*(("test_more",) if base is unittest.TestCase else ())), name)()
            assert "ACCELERATE_SET" not in os.environ
        assert os.environ["ACCELERATE_KEPT"] == "1"


def test_lines_for_a_host_file(caplog: pytest.LogCaptureFixture):
    assert convert_dict_to_env_variables({"A": "1", "BAD": "<x", "EMPTY": "", "B": "2"}) == ["A=1\n", "B=2\n"]
    assert "BAD=<x is left out" in caplog.text
    assert "EMPTY= is left out" in caplog.text


def test_libraries_that_are_imported():
    assert are_libraries_initialized("sys", "no_such_library") == ["sys"]
    assert "sys" in sys.modules
