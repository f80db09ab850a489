"""Many small things to see on the same ranks: starting a job costs more than most of them.

SCENARIOS = Scenarios()

@SCENARIOS.add
def sharded_once() -> Any: ...                 # runs on every rank; what it returns can be pickled

def test_it():
    first, second = SCENARIOS.results("sharded_once")
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from accel_trainer.errors import ConfigError
from tests.ranks import Environment, find, locate, run_ranks


@dataclass
class Outcome:
    """What a scenario returned on one rank, or how it failed."""

    value: Any = None
    failure: str | None = None


class Scenarios:
    """Functions that run one after the other on every rank of one job."""

    def __init__(self, env: Environment | None = None, timeout: float = 100) -> None:
        self._functions: dict[str, Callable[[], Any]] = {}
        self._results: list[dict[str, Outcome]] | None = None
        self._env = env
        self._timeout = timeout

    def add(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self._functions[function.__name__] = function
        return function

    def run(self) -> dict[str, Outcome]:
        """Run every function, on this rank. One that fails does not keep the others from running."""
        return {name: _outcome(function) for name, function in self._functions.items()}

    def results(
        self, name: str, run_all: Callable[[], dict[str, Outcome]] | None = None, world_size: int = 2
    ) -> list[Any]:
        """Return a scenario's results by rank; the job runs once for all of them. A failure fails the test.

        Args:
            run_all: a function of the test module that calls `run` where more is to be done on each rank.
        """
        if self._results is None:
            located = () if run_all else ([locate(function) for function in self._functions.values()],)
            self._results = run_ranks(
                run_all or _run_located, world_size, *located, env=self._env, timeout=self._timeout
            )
        failures = [
            f"--- rank {rank} ---\n{outcomes[name].failure}"
            for rank, outcomes in enumerate(self._results)
            if outcomes[name].failure is not None
        ]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return [outcomes[name].value for outcomes in self._results]


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=function())
    except Exception:
        return Outcome(failure=traceback.format_exc())


def _run_located(functions: list[tuple[str, str | None, str]]) -> dict[str, Outcome]:
    return {location[2]: _outcome(find(*location)) for location in functions}


def refused(call: Any) -> str:
    """Return the message of the ConfigError that `call` raises."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing was refused")
