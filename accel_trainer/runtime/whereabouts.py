"""Where a rank is, in words, read from frames on demand: the section, the collective it waits in, the user's line."""

from __future__ import annotations

import ast
import functools
import gc
import operator
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F")
_FOLDERS = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
# How paths begin that are no code of the user's.
_LIBRARIES = ("<", str(Path(__file__).resolve().parents[1]), *_FOLDERS)
# Of others: by the end of a file's path and the names of its functions, none for all, what runs within.
_SECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("torch/utils/data/", (), "data loading"),
    ("torch/nn/modules/module.py", ("_call_impl",), "forward"),
    ("torch/autograd/graph.py", ("_engine_run_backward",), "backward"),
    ("torch/optim/", (), "optimizer step"),
    ("transformers/trainer_callback.py", ("call_event",), "callback"),
)
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
# Where the innermost frame of a rank is that waits for others.
_WAITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_COLLECTIVES, ()),
    ("torch/distributed/", ()),
    ("torch/nn/parallel/distributed.py", ()),
    ("torch/autograd/graph.py", ("_engine_run_backward",)),
)
COMPARISON = "a comparison of calls"
ARRIVAL = "a meeting of all ranks"

# Our own functions are marked where they are defined, so that a new name or place of one cannot hide it from reports.
_Marks = dict[tuple[str, str], list[tuple[range, str]]]
_marked_sections: _Marks = {}
"""By the file and the name of a function: the lines of those that are marked, and as what."""
_marked_waits: _Marks = {}
_waiting_files: set[str] = set()
_marked_device_waits: _Marks = {}
_marked_for_all: _Marks = {}
_STACK_LIMIT = 24

OTHER = "other"
FOR_ALL = "for all"
"""What one rank does for all while they wait for it, by design: the phase of no slow rank, and none of `PHASES`."""
_PHASE_OF_SECTION = {
    "data loading": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer step": "optimizer",
    "gradient clipping": "optimizer",
    "save": "save",
    "evaluation": "evaluation",
}
PHASES = (*dict.fromkeys(_PHASE_OF_SECTION.values()), OTHER)
"""Of a rank's time; "other" is the loop itself, callbacks, and a loss that is computed outside of the model."""
_known_phases: dict[_Call, str] = {}
"""A thread that samples asks for the same ones again and again."""


def section(name: str) -> Callable[[F], F]:
    """Decorate a function, below other decorators, in which reports say that a rank is in `name`; free to call."""
    return lambda function: _mark(_marked_sections, function, name)


def waits(name: str) -> Callable[[F], F]:
    """Decorate a function in which a rank waits for others, as reports say in `name`; see `section`."""
    return lambda function: _mark(_marked_waits, function, name)


def waits_for_device(function: F) -> F:
    """Decorate a function in which the host waits for its own device: no work of this rank. See `section`."""
    return _mark(_marked_device_waits, function, "")


def for_all(function: F) -> F:
    """Decorate a function of a save that one rank runs for all, which makes it no slow rank. See `section`."""
    return _mark(_marked_for_all, function, "")


def _mark(marks: _Marks, function: F, name: str) -> F:
    code = function.__code__  # type: ignore[attr-defined]
    last = max(line for _, _, line in code.co_lines() if line is not None)
    marks.setdefault((code.co_filename, code.co_name), []).append((range(code.co_firstlineno, last + 1), name))
    return function


def _mark_of(marks: _Marks, call: _Call, unmarked: Any = None) -> Any:
    return next((name for lines, name in marks.get((call.path, call.name), ()) if call.line in lines), unmarked)


def mark_collectives(path: str) -> None:
    """Note that the functions of a module wait for other ranks; call it with `__file__`."""
    _waiting_files.add(path)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The place of a thread, or of an error."""

    section: str
    """"evaluation > forward", "callback on_save"; empty in code that is none of these."""
    operation: str
    """The collective, or whatever else it waits for other ranks in; empty if it does not."""
    line: str
    """The user's: "collate (train.py:41)"."""
    stack: str


@dataclass(frozen=True, slots=True)
class RankState:
    """Where a rank is, as it stands in the job's store; section to stack are those of `Whereabouts`."""

    updates: int
    begun: dict[str, int]
    """Collectives that it has begun, by the name of their group."""
    last: str
    """The last one of the job's group, as torch's flight recorder has it; empty where the backend has none."""
    section: str
    operation: str
    line: str
    stack: str = field(compare=False)
    """Two looks at one place may differ in it, as a rank that waits polls, and are of the same state."""
    limit_seconds: float
    """How long it may make no progress there."""
    still_seconds: float = field(compare=False)
    """For how long it has not moved at all; as `stack`."""


class _Call(NamedTuple):
    path: str
    name: str
    line: int


# Another thread's frames are read at once, and none is held: one held beyond its return keeps its variables, and
# destroys them in the wrong thread; torch's guards among them, which then write to the dispatcher's state of a thread
# that is in the midst of an operation.
# Read by their `repr`, and not by `f_code`, of which audit hooks hear, as they do of ctypes' calls in Python 3.14. In a
# hook of Python threads change, and filelock 4, which transformers imports, has one from Python 3.12 on.
_READ_LIMIT = 100


def position_of(thread_id: int) -> int:
    """Return a number for the line that a thread is at, with all its callers. Callable from another thread."""
    return hash(tuple(_calls_of(thread_id)))


def describe_thread(thread_id: int) -> Whereabouts | None:
    """Return where a thread of this process is; None for one that has ended. Callable from another thread."""
    calls = _calls_of(thread_id)
    return _describe(calls) if calls else None


def activity_of(thread_id: int) -> tuple[str, str]:
    """Return a thread's phase, of `PHASES` or `FOR_ALL`, and the `Whereabouts.operation` that it waits in, or empty.

    Callable from another thread, often: 30 us for a Trainer's 40 calls.
    """
    calls = _calls_of(thread_id)
    phases = [*filter(None, map(_phase, calls)), OTHER]
    phase = FOR_ALL if FOR_ALL in phases else phases[0]
    if not calls or "torch/distributed/tensor/" in calls[-1].path:
        return phase, ""  # DTensor computes in its dispatch, which is no wait
    if _mark_of(_marked_device_waits, calls[-1]) is not None:
        return phase, "its device"
    return phase, _operation(calls)


def _phase(call: _Call) -> str:
    if (found := _known_phases.get(call)) is None:
        is_for_all = _mark_of(_marked_for_all, call) is not None
        found = _known_phases[call] = FOR_ALL if is_for_all else _PHASE_OF_SECTION.get(_section(call, None), "")
    return found


def describe_failure(error: BaseException) -> Whereabouts:
    """Return where an error was raised, while it is handled."""
    trace = error.__traceback__
    callers = [] if trace is None else _calls(traceback.walk_stack(trace.tb_frame.f_back))[::-1]
    return _describe([*callers, *_calls(traceback.walk_tb(trace))])


def users_line() -> str:
    """Return the line of the user's code that has led to this call."""
    return _line(_calls(traceback.walk_stack(sys._getframe(1)))[::-1])


def _calls(frames: Iterable[tuple[FrameType, int]]) -> list[_Call]:
    return [_Call(frame.f_code.co_filename, frame.f_code.co_name, line) for frame, line in frames]


def _calls_of(thread_id: int) -> list[_Call]:
    """Return the calls that a thread is in, outermost first: the innermost 100; empty for one that has ended."""
    # One call of C asks for the frames and drops each once it is read: the interpreter changes threads between
    # instructions of Python, of which there is none in it. `accumulate` keeps the last frame, and ends with the call:
    # it has no name here.
    # Not faulthandler: it walks the list of threads without its lock, and crashes where one of gloo's is just being
    # added (Python 3.11).
    innermost = map(operator.itemgetter(thread_id), map(operator.call, (sys._current_frames,)))
    steps = chain(innermost, repeat("f_back", _READ_LIMIT - 1))
    # Nor may garbage be collected in it, which calls finalizers and `gc.callbacks` of Python: threads change there.
    collects: list[bool] = []
    begin = chain(map(collects.append, map(operator.call, (gc.isenabled,))), map(operator.call, (gc.disable,)))
    end = map(operator.call, map((bool, gc.enable).__getitem__, collects))
    read: list[Any] = []
    try:
        read = list(chain(begin, map(repr, takewhile(operator.truth, accumulate(steps, getattr))), end))
    except KeyError:
        if any(collects):
            gc.enable()
    return [_parse(text.partition(", file ")[2]) for text in reversed(read[2:-1])]


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> _Call:
    """Return the call of a frame whose repr ends so: `'train.py', line 12, code step>`."""
    path, _, rest = text.rpartition(", line ")
    line, _, name = rest.partition(", code ")
    return _Call(sys.intern(ast.literal_eval(path)), name.removesuffix(">"), int(line))


def _describe(calls: list[_Call]) -> Whereabouts:
    sections: dict[str, None] = {}
    for caller, call in zip([None, *calls], calls, strict=False):
        if title := _section(call, caller):
            sections[title] = None
    innermost = calls[-_STACK_LIMIT:]
    stack = traceback.StackSummary.from_list([(call.path, call.line, call.name, None) for call in innermost])
    return Whereabouts(" > ".join(sections), _operation(calls), _line(calls), "".join(stack.format()))


def _section(call: _Call, caller: _Call | None) -> str:
    for end, names, title in _SECTIONS:
        if end in call.path and (not names or call.name in names):
            # transformers has a method per event, by its name, that calls the one for all of them.
            return f"callback {caller.name}" if title == "callback" and caller else title
    section: str = _mark_of(_marked_sections, call, "")
    return section


def _operation(calls: list[_Call]) -> str:
    # torch/distributed/c10d_logger.py and contextlib stand around each collective.
    innermost_first = (call for call in reversed(calls) if not call.path.endswith("contextlib.py"))
    waiting = list(takewhile(_waits, innermost_first)) if calls and _waits(calls[-1]) else []
    if not waiting:
        return ""
    names = [call.name for call in waiting if _COLLECTIVES in call.path]
    # Decorators around a collective; and all_gather_object() is what was called, not the all_gather within.
    names = [name for name in names if name not in ("wrapper", "inner")]
    if names:
        return names[-1]
    outermost = waiting[-1]
    name = "backward" if outermost.name == "_engine_run_backward" else outermost.name
    operation: str = _mark_of(_marked_waits, outermost, name)
    return operation


def _waits(call: _Call) -> bool:
    return (
        call.path in _waiting_files
        or _mark_of(_marked_waits, call) is not None
        or any(end in call.path and (not names or call.name in names) for end, names in _WAITS)
    )


def _line(calls: list[_Call]) -> str:
    if not calls:
        return "an unknown line"
    own = [call for call in calls if not (call.path.startswith(_LIBRARIES) or "site-packages" in call.path)]
    call = (own or calls)[-1]
    return f"{call.name} ({Path(call.path).name}:{call.line})"


# --- who waits for whom ---------------------------------------------------------------------------------------------

_SILENT = "stopped, killed, or in a call that keeps the interpreter's lock"
_MAX_REPORTED_RANKS = 16


def describe_ranks(
    answers: list[RankState | None], heard: list[RankState | None], failure: str, *, is_final: bool
) -> str:
    """Return who waits for whom, and stacks of those that have not come; empty where all ranks compute.

    `answers`: where each rank is, None for silent ones; `heard`: where it last was. `is_final`: one has waited in vain.
    """
    group, most = _busiest_group(heard)
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    waiting = [rank for rank, answer in enumerate(answers) if answer is not None and answer.operation]
    absent = sorted({*silent, *_behind(heard, group, most)})
    if not (absent or waiting or is_final):
        return ""
    absent = absent or sorted(set(range(len(answers))).difference(waiting))
    lines = [_headline(absent, waiting, answers, most) + failure]
    for rank in sorted(range(len(answers)), key=lambda rank: rank not in absent)[:_MAX_REPORTED_RANKS]:
        has_stack = rank in absent or not absent
        lines += _describe_state(rank, heard[rank], group, is_silent=rank in silent, has_stack=has_stack)
    return "\n".join(lines)


def _behind(states: list[RankState | None], group: str, most: int) -> list[int]:
    return [rank for rank, state in enumerate(states) if state is not None and state.begun.get(group, most) < most]


def _busiest_group(states: list[RankState | None]) -> tuple[str, int]:
    """Return the group in which ranks have begun the most unequal numbers of collectives, and the largest of them."""
    counts: dict[str, list[int]] = {}
    for state in states:
        for group, number in ({} if state is None else state.begun).items():
            counts.setdefault(group, []).append(number)
    if not counts:
        return "", 0
    group = max(counts, key=lambda name: (max(counts[name]) - min(counts[name]), len(counts[name])))
    return group, max(counts[group])


def _headline(absent: list[int], waiting: list[int], answers: list[RankState | None], most: int) -> str:
    if not absent:
        return f"All ranks wait, in what may be different collectives (number {most} of the group):"
    others = [rank for rank in waiting if rank not in absent]
    operations = sorted({state.operation for rank in others if (state := answers[rank]) is not None})
    return (
        f"{_ranks(others) if others else 'The others'} wait{'s' if len(others) == 1 else ''} in "
        f"{', '.join(operations) or 'collectives'} (number {most} of the group) for {_ranks(absent)}, which "
        f"{'has' if len(absent) == 1 else 'have'} not arrived there:"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _describe_state(rank: int, state: RankState | None, group: str, *, is_silent: bool, has_stack: bool) -> list[str]:
    if state is None:
        return [f"  rank {rank} does not answer ({_SILENT})"]
    doing = f"waits in {state.operation}," if state.operation else "is"
    if is_silent:
        doing = f"does not answer ({_SILENT}); was last heard of"
    last = f", the last one {state.last}" if state.last else ""
    stack = [f"    {line}" for line in state.stack.rstrip().splitlines()]
    return [
        f"  rank {rank} {doing} in {state.section or 'the loop'}, {state.line}: update {state.updates}, collective "
        f"{state.begun.get(group, 0)}{last}",
        *(stack if has_stack else ()),
    ]
