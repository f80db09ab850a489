"""Updates of a job that goes on without the ranks it has lost: which are complete, and how one begins again.

Where the launcher starts another process in the place of a lost rank, it joins between two updates.

All ranks that are left come to the same collective of the same update, or to the same one between two: what they have
accumulated is dropped, the weights are those after the last update, and the loader hands out the samples of the update
anew, in more micro-batches. A loop sees some micro-batches more that do not end a window.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from accel_trainer import logging
from accel_trainer.accelerator.accumulation import PreparedUnit
from accel_trainer.accelerator.handover import (
    Places,
    collect_state,
    receive,
    send,
    take_state,
    take_update,
    why_not_level,
)
from accel_trainer.config import LossDivision, RankLossAction
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.data.plan import RanksLeft
from accel_trainer.data.position import Progress
from accel_trainer.errors import RankLostError
from accel_trainer.logging import write_stderr
from accel_trainer.runtime.own_watch import raise_if_theirs
from accel_trainer.runtime.process import find_survivors, rejoin
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rank_loss import Survivors, has_connections
from accel_trainer.runtime.rank_watch import is_broken, leave_losses_to
from accel_trainer.runtime.torch_private import clear_dtensor_caches, default_group, group_timeout, joined_groups

if TYPE_CHECKING:
    from accel_trainer import Accelerator

logger = logging.get_logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Handover(Protocol):
    """What a loop has beside the Accelerator, as plain data and tensors, for ranks that join."""

    def give(self) -> Any:
        """Return it on a rank that has it."""

    def take(self, given: Any) -> None:
        """Go on with what `give` of another rank has returned."""


class LostRanks:
    """The updates of an Accelerator, known so well that the ranks that are left can begin the present one again.

    Attributes:
        takes_windows: whether the windows made by hand are those of a Trainer, which begins its updates again itself.
        num_shards: of the data of an update: as many as there were ranks when the job began.
        left: how the updates are shared out since ranks were lost; None before.
        num_updates: that the job has applied since it began.
        num_calls: collectives of the loop that this rank has ended.
    """

    def __init__(self, accelerator: Accelerator, survivors: Survivors) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._survivors = survivors
        self.takes_windows = self._reports = False
        self._own_rounds = 1
        self.left: RanksLeft | None = None
        self.num_shards = accelerator.num_processes
        self.num_updates = self.num_calls = 0
        self._is_by_hand = False
        self._is_in_update = False
        self._is_calling = self._is_alike = False
        self._votes = self._has_voted = self._is_stepping = False
        """Whether ranks vote before each step, whether this one has come to the vote, and whether it was passed."""
        self.must_step = False
        """Whether the present update was counted, and all that is left of it is this rank's step."""
        self._last_result: Any = None
        """Of the last collective of the loop that this rank has ended: the same on all ranks."""
        self._given: list[Any] | None = None
        """What this rank lacked, and others had: the result of a collective, or with an update's state its number."""
        self._num_owed = 0
        """Micro-batches that others have begun beyond this rank, and given up: it gives up as many."""
        self._is_aside = False
        """Whether the present micro-batch is one of those."""
        self.extras: Handover | None = None
        """What a Trainer has beside the Accelerator, for ranks that join."""
        self._trained = weakref.WeakSet[Any]()
        """Bookmarks of the loaders whose batches are trained."""
        self._pass: Progress | None = None
        self._num_in_pass = self._num_yielded = self._num_samples = 0
        """Updates of the present pass, since it began or was moved; its batches and samples up to the last of them."""
        survivors.users.add(self)
        leave_losses_to(self.is_loss, survivors.has_lost)

    @classmethod
    def of(cls, accelerator: Accelerator) -> LostRanks | None:
        """Return those of a job that is to go on without lost ranks; None for another, or where it is one process."""
        if accelerator.config.launch.on_rank_loss is RankLossAction.RESTART or accelerator.num_processes == 1:
            return None
        survivors = find_survivors(accelerator.process)
        if survivors is None:
            logger.warning(
                "launch.on_rank_loss is %s, and has no effect: what has started these ranks is no launcher that "
                "outlives them; start them by `accel-trainer launch`, or leave the option out",
                accelerator.config.launch.on_rank_loss.value,
            )
            return None
        return cls(accelerator, survivors)

    @property
    def _owner(self) -> Accelerator:
        accelerator = self._accelerator()
        assert accelerator is not None
        return accelerator

    # --- what has been done ---------------------------------------------------------------------------------------

    def take_models(self) -> None:
        """Follow the models that have been prepared by now."""
        for prepared in self._owner._prepared.units:
            prepared.unit.guard_forward(self._go_on_in_forward)
            if not prepared.evaluation_only:
                self._survivors.take_replicas(prepared.unit.replica_size)
                self._votes = prepared.unit.needs_vote and (has_connections() or self._survivors.is_alone)
                if self._votes:
                    self._survivors.prepare_to_wait()
        self.announce()

    @contextmanager
    def beginning_updates(self, num_rounds: int, extras: Handover, *, reports: bool) -> Iterator[None]:
        """Context of a Trainer's training, which begins updates of so many micro-batches again itself.

        `reports`: rank 0 has trackers open.
        """
        self.takes_windows, self._own_rounds, self._reports, self.extras = True, num_rounds, reports, extras
        self.take_others()
        try:
            yield
        finally:
            self.takes_windows, self.extras = False, None
            self._is_by_hand = True
            self.announce()

    def begin_update(self, num_batches: int) -> int:
        """Note that an update begins which a Trainer makes of so many batches; return of how many it is made now."""
        self._begin()
        for prepared in self._owner._prepared.units:
            prepared.unit.begin_update()
        return num_batches if self.left is None else self.left.num_steps(num_batches * self.num_shards)

    def begin_micro_batch(self, units: list[PreparedUnit]) -> None:
        """Note that a micro-batch begins; keep the buffers of a model whose update begins with it."""
        if not self._is_in_update:
            self._begin()
        if self.left is not None:
            self._take_loader()
        if self._num_owed:
            self._num_owed, self._is_aside = self._num_owed - 1, True
            for prepared in units:
                prepared.unit.begin_update()
                prepared.unit.step_aside()
                prepared.abandon()
            return
        for prepared in units:
            if prepared.window.held == 1:
                prepared.unit.begin_update()

    def _take_loader(self) -> None:
        """Have a loader that is trained first behind a loss share out the updates that all ranks would have made of it.

        The shards of ranks that are left would be as many samples in each of more micro-batches. Its first one is given
        up, and its samples read again.
        """
        loader = self._owner.gradient_state.active_dataloader
        if loader is None or loader.bookmark in self._trained:
            return
        if reason := loader.why_not_shared_out():
            raise RankLostError(f"a rank was lost, and this job cannot go on without it: {reason}")
        loader.resize(self.num_shards, 0)
        self._num_owed = max(self._num_owed, 1)

    def _begin(self) -> None:
        self._is_in_update, self._has_voted, self._num_before = True, False, PROGRESS.updates

    def _end_aside(self) -> None:
        """Give up a micro-batch that only others would have counted: its samples are read again."""
        accelerator = self._owner
        self._is_aside = self._is_in_update = False
        for prepared in accelerator._prepared.units:
            prepared.unit.drop_update()
            prepared.abandon()
        if accelerator.nonfinite_guard is not None:
            accelerator.nonfinite_guard.drop()
        self._share_loaders(accelerator, 0)

    def takes_given(self) -> bool:
        """Whether the present update has come from another rank, and its step is not to be made; asked once."""
        given, self._given = self._given, None
        if given is None:
            return False
        (PROGRESS.updates,) = given
        return True

    @property
    def is_given(self) -> bool:
        """Whether the present update has come from another rank, or needs nothing but this rank's step."""
        return self.must_step or (self._given is not None and not self._is_calling)

    def note_update(self) -> None:
        """Note that an update has been applied."""
        if self.must_step:
            self.must_step = self._is_stepping = False
            return
        self._is_in_update = self._is_stepping = False
        self.num_updates += 1
        accelerator = self._accelerator()
        loader = None if accelerator is None else accelerator.gradient_state.active_dataloader
        if loader is None:
            return
        current = loader.current_pass
        assert current is not None
        if current is not self._pass:
            self._pass, self._num_in_pass = current, 0
            self._trained.add(loader.bookmark)
        self._num_in_pass += 1
        self._num_yielded, self._num_samples = current.num_yielded, current.samples

    def vote(self) -> bool:
        """Wait with the gradients of an update for all that a loss may leave; False where it begins again. Collective.

        For units that need it, others step at once. Behind the vote a rank that is lost takes nothing along: all that
        are left have the means of all gradients, and step. Before it none of them has stepped.
        """
        if self.must_step or not self._votes:
            return True
        self._has_voted = True
        try:
            self._survivors.wait_for_all()
        except RuntimeError as error:
            failure = error
        else:
            self._is_stepping = True
            return True
        if self.takes_windows:
            raise failure  # the Trainer goes on, and comes back where the step is to be made
        self.go_on(failure)
        return self.must_step

    def note_window_by_hand(self) -> None:
        """Note a backward outside of `accumulate()`: a loop that counts micro-batches itself takes no more of them."""
        if not (self._is_by_hand or self.takes_windows):
            self._is_by_hand = True
            self.announce()

    def announce(self) -> None:
        """Tell the launcher whether this rank could go on without others."""
        self._survivors.announce(self._why_never())

    # --- whether to go on -------------------------------------------------------------------------------------------

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error is that of a collective in which a rank was lost."""
        return is_broken(error) and self._survivors.knows_loss()

    def _why_never(self) -> str:
        """Return why no update of this run can be begun again; empty where it can."""
        accelerator = self._owner
        trained = [prepared.unit for prepared in accelerator._prepared.units if not prepared.evaluation_only]
        if accelerator.process.backend != "gloo" or not has_connections():
            return f"its process group is one of {accelerator.process.backend}, whose collectives cannot be ended"
        if accelerator.config.accumulation.loss_division is not LossDivision.EXACT:
            return f"{accelerator.resolved.describe('accumulation.loss_division')} counts micro-batches and ranks"
        if self._is_by_hand:
            return "no update is under way, or it has backward() outside of accumulate(), in windows made by hand"
        if any(optimizer.updates_in_backward for optimizer in accelerator._prepared.optimizers):
            return "its optimizer updates parameters in the backward"
        if len(trained) != 1 or len(self._survivors.users) != 1:
            return f"it trains {len(trained)} models, by {len(self._survivors.users)} Accelerator(s)"
        return trained[0].why_irreplaceable()

    def _why_not_now(self) -> str:
        if reason := self._why_never():
            return reason
        if self._is_stepping:
            return "its optimizer exchanges values in its steps, and the rank was lost in one"
        own = [group for prepared in self._owner._prepared.units for group in prepared.unit.own_groups()]
        if not {group.group_name for group in joined_groups()} <= {g.group_name for g in (default_group(), *own)}:
            return "there are other process groups than the job's, whose connections to the rank are lost, too"
        has_trackers = self._owner._trackers.chosen or self._reports
        if has_trackers and self._survivors.members[0] not in self._survivors.staying:
            return "its trackers were open on that rank"
        return self._why_not_shared_out()

    def _why_not_shared_out(self) -> str:
        loaders = self._owner.gradient_state.loaders
        if len(loaders) > 1:
            return "it was within the loops over several loaders"
        if loaders and not self._is_in_update and not self._trains(loaders[0]):
            return "it was evaluating"
        if not loaders and not self.takes_windows and (self._is_in_update or self.num_updates and not self._trained):
            return "its batches come from no loader that was prepared, and cannot be dealt out anew"
        reasons = [loader.why_not_shared_out() for loader in {*loaders, *self._owner._prepared.dataloaders}]
        return next(filter(None, reasons), "") or self._why_not_counted(loaders)

    def _trains(self, loader: PreparedDataLoader) -> bool:
        """Whether an update has been made in the present pass of a loader: loops may also evaluate over one."""
        return loader.bookmark in self._trained if self.takes_windows else loader.current_pass is self._pass

    def _why_not_counted(self, loaders: list[PreparedDataLoader]) -> str:
        """Return why the samples of the updates of the present pass are not known."""
        current = loaders[0].current_pass if loaders else None
        if current is None or current is not self._pass:
            return ""
        rounds = self._rounds_per_update
        expected = self._num_in_pass * (rounds if self.left is None else self.left.num_steps(self.num_shards * rounds))
        if self._num_yielded != expected and self._num_yielded != current.total:
            return f"{self._num_in_pass} updates of a pass took {self._num_yielded} batches, and not {expected}"
        return ""

    @property
    def _rounds_per_update(self) -> int:
        """Micro-batches of an update on each of the ranks that the job began with."""
        if self.left is not None:
            return self.left.rounds_per_update
        return self._own_rounds if self.takes_windows else self._owner.gradient_accumulation_steps

    def go_on(self, error: BaseException) -> None:
        """Begin the present update again, or the present call, with the ranks that are left. They all call it.

        Raises:
            BaseException: `error`, or what it comes from, where no rank is lost.
            RankLostError: on all of them: they cannot go on, or are at different updates.
        """
        if not self.is_loss(error):
            raise_if_theirs(error)
            raise error
        self._meet(error)

    def _meet(self, error: BaseException | None = None, replica: int | None = None) -> None:
        """Go on in a group of the ranks that are left, and of `replica`, where all have come to take that in."""
        begin, accelerator, survivors = time.monotonic(), self._owner, self._survivors
        before = survivors.members
        said = survivors.agree(self._facts(accelerator, replica), group_timeout().total_seconds())
        gone = ", ".join(map(str, sorted({*before} - {*survivors.members})))
        places = dict(zip(survivors.members, said, strict=True))
        self._settle(said, replica, gone, error)
        if survivors.members == before:
            return
        num_left = self._meet_again(accelerator, places)
        if accelerator._stop_point is not None:
            accelerator._stop_point.meet_anew(counts_on=num_left == len(survivors.members))
        if gone:
            logger.warning(
                "rank %s of the %d that the launcher has started is lost; the %d that are left go on after update %d, "
                "after %.1f s",
                gone, self.num_shards, num_left, self.num_updates, time.monotonic() - begin,
            )  # fmt: skip
        if num_left < len(survivors.members):
            num_bytes = self._hand_over(accelerator)
            logger.warning(
                "a process that was started in the place of a lost rank is rank %d of %d behind update %d, for which "
                "the others waited %.2f s (%.1f MiB were sent)",
                num_left, len(survivors.members), self.num_updates, time.monotonic() - begin, num_bytes / 2**20,
            )  # fmt: skip
        survivors.tidy_up()

    def _facts(self, accelerator: Accelerator, replica: int | None) -> dict[str, Any]:
        """Return what the others are to know of this rank where they meet."""
        units = accelerator._prepared.units
        reason = self._why_not_now() or self._why_not_joined(replica)
        windows = [prepared.window.held * self._is_in_update for prepared in units]
        # A Trainer that is one update behind stands in the last exchange of it, which the others have had.
        ends_update = self.takes_windows or all(prepared.window.is_last for prepared in units)
        if self._votes:
            ends_update = self._has_voted
        return {
            "reason": reason,
            "place": [self.num_updates, self.num_calls, *windows],
            "in_hand": replica is None and self._has_in_hand(max(windows, default=0)),
            "joins": replica,
            "can_take": self._is_alike if self._is_calling else ends_update,
            "votes": self._votes,
            "has_voted": self._is_in_update and self._has_voted,
        }

    def _has_in_hand(self, num_begun: int) -> bool:
        """Whether the loop has read a batch of the present update whose micro-batch it has not begun.

        It does in a collective between the two, and the batch is read again.
        """
        accelerator = self._owner
        loader = accelerator.gradient_state.active_dataloader
        if loader is None or self.takes_windows or accelerator._prepared.current:
            return False
        current = loader.current_pass
        assert current is not None
        return current.num_yielded - (self._num_yielded if current is self._pass else 0) > num_begun

    def _settle(self, said: list[dict[str, Any]], replica: int | None, gone: str, error: BaseException | None) -> None:
        """Let `replica` join where all have come for that; raise where ranks are `gone` and the others cannot go on."""
        reason = why_not_level(said)
        if reason and gone:
            raise RankLostError(
                f"rank {gone} was lost, and this job cannot go on without it: {reason}. The launcher starts all ranks "
                "again, where --max_restarts says so"
            ) from error
        # Others may have come to meet because of a loss: the rank that waits can join behind it.
        if replica is not None and {each["joins"] for each in said} == {replica}:
            self._survivors.settle(replica, reason)

    # --- ranks that return ----------------------------------------------------------------------------------------

    def take_others(self) -> None:
        """Have the launcher start others in the place of ranks that are lost: this run can tell them where it is."""
        self._survivors.announce("", "takes")

    def admit(self, loader: PreparedDataLoader | None = None) -> bool:
        """Take in ranks that wait to join, where all members have come between two updates for that.

        Every member calls it between two updates; it is collective where one joins. `loader`: the one whose next batch
        a loop is about to get. Whether the group is another one now.
        """
        survivors = self._survivors
        if not survivors.returning or survivors.is_alone:
            return False
        if loader is not None:
            is_trained = loader.bookmark in self._trained and not self.takes_windows
            if self._is_in_update or not is_trained or loader.why_not_shared_out():
                return False
        before = survivors.members
        while (replica := survivors.find_due(self.num_updates)) is not None:
            self._meet(replica=replica)
        return survivors.members != before

    def join(self) -> bool:
        """Join the others, in a process that was started in the place of a lost rank; return False in another.

        It goes on with what they have between two of their updates; called once everything is prepared. Ends the
        process where they do not take it in: their run has come to its end, or cannot have it.
        """
        accelerator, survivors = self._owner, self._survivors
        self.take_others()
        if not survivors.is_alone:
            return False
        clear_dtensor_caches(keep_groups=True)  # in `rejoin` again, without the imports: nobody waits for them here
        if refused := survivors.wait_for_admission():
            write_stderr(f"a process that was started in the place of a lost rank ends: {refused}")
            raise SystemExit(0)
        try:
            self._join_group(accelerator)
            state = receive(accelerator.process.rank % survivors.replica_size, accelerator.process.device)
            take_state(accelerator, state["accelerator"], survivors.rank)
            self._take_place(accelerator, state["place"])
            if self.extras is not None:
                self.extras.take(state["extras"])
            if accelerator._stop_point is not None:
                accelerator._stop_point.meet_anew(counts_on=False)
            survivors.tidy_up()
        except Exception:
            # Those that have taken it in wait for it: as a lost rank it costs them an update.
            traceback.print_exc()
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def _join_group(self, accelerator: Accelerator) -> None:
        """Take part in what `_meet_again` of the others does, in a process that joins them."""
        survivors = self._survivors
        while True:
            rejoin(accelerator.process, survivors)
            members = survivors.members
            try:
                self._share_out(accelerator)
            except RuntimeError as error:
                if not (self._votes and self.is_loss(error)):
                    raise
            if self._votes:
                survivors.agree({}, group_timeout().total_seconds())
            if survivors.members == members:
                break

    def _why_not_joined(self, replica: int | None) -> str:
        """Return why one that returns cannot be told where the others are; empty for nobody."""
        accelerator = self._owner
        known = {id(loader) for loader in accelerator._prepared.dataloaders}
        if replica is None or known.issuperset(map(id, accelerator.gradient_state.loaders)):
            return ""
        return "the others are in a pass that skip_first_batches has begun"

    def _hand_over(self, accelerator: Accelerator) -> int:
        """Send what this run has to those that have joined last; return the bytes. Every member calls it."""
        process, size = accelerator.process, self._survivors.replica_size
        if process.rank >= size:  # of the first replica, each to its likes
            return 0
        loaders = accelerator._prepared.dataloaders
        state = {
            "accelerator": collect_state(accelerator),
            "place": {
                "updates": self.num_updates,
                "samples": self._num_samples,
                "trained": [loader.bookmark in self._trained for loader in loaders],
            },
            "extras": None if self.extras is None else self.extras.give(),
        }
        # Where a rank is lost meanwhile, the exchange of the next update says so to all.
        with suppress(RuntimeError):
            return send(state, process.world_size - size + process.rank, process.device)
        return 0

    def _take_place(self, accelerator: Accelerator, place: Mapping[str, Any]) -> None:
        self.num_updates, self._num_samples = place["updates"], place["samples"]
        for loader, is_trained in zip(accelerator._prepared.dataloaders, place["trained"], strict=False):
            if is_trained:
                assert self.left is not None
                self._trained.add(loader.bookmark)
                loader.resize(self.num_shards, 0)
                loader.share_out(self.left, 0, 0)

    def _meet_again(self, accelerator: Accelerator, said: Mapping[int, dict[str, Any]]) -> int:
        """Go on in the group of the members, level with the foremost; return how many were here. All of them call it.

        `said`: by each of them, where they met. Where more are lost meanwhile, it is done again.
        """
        survivors = self._survivors
        while True:
            rejoin(accelerator.process, survivors)
            members = survivors.members
            # Where all that were ahead are lost by now, the others begin together again.
            places = Places.of({rank: each for rank, each in said.items() if rank in members}, survivors.rank)
            if not (places.behind or self._votes):
                self._share_out(accelerator)
                break
            given = self._catch_up(accelerator, places)
            survivors.agree({}, group_timeout().total_seconds())
            if survivors.members == members:
                if survivors.rank in places.behind:
                    self._take_level(accelerator, places, given)
                break
        self._num_owed = places.num_owed or self._num_owed
        return sum(rank in said for rank in survivors.members)

    def _catch_up(self, accelerator: Accelerator, places: Places) -> Any:
        """Share the updates out; return the state that this rank was given, None without one or after another loss."""
        try:
            if self._votes:
                self._take_vote(places.is_behind_update or places.have_voted)
            if self._votes or not places.is_behind_update:
                self._share_out(accelerator)
            return self._level(accelerator, places)
        except RuntimeError as error:
            if not self.is_loss(error):
                raise
        return None

    def _take_vote(self, is_passed: bool) -> None:
        """Let this rank make its step where all have come to the vote, and it has not: the update is complete."""
        if is_passed and self._has_voted and self._is_in_update:
            self.note_update()
            self.must_step = True

    def _level(self, accelerator: Accelerator, places: Places) -> Any:
        """Give those that are one step behind what the others have: an update's state, or a collective's result."""
        members, process, given = self._survivors.members, accelerator.process, None
        source = next(number for number, rank in enumerate(members) if rank not in places.behind)
        for rank, place in places.behind.items():
            to_rank = members.index(rank)
            if self._lacks_nothing(place, places.ahead):
                continue
            if process.rank == source:
                state = collect_state(accelerator) if place[0] < places.ahead[0] else {"result": self._last_result}
                send(state, to_rank, process.device)
            elif process.rank == to_rank:
                given = receive(source, process.device)
        return given

    def _lacks_nothing(self, place: list[int], ahead: list[int]) -> bool:
        """Whether a rank at `place` is given nothing: it makes its own step, or has begun fewer micro-batches."""
        return self._votes and (place[0] < ahead[0] or place[1] == ahead[1])

    def _take_level(self, accelerator: Accelerator, places: Places, given: Any) -> None:
        """Go on from this rank's place with the state that one of those ahead has given."""
        is_update = places.is_behind_update
        if self._lacks_nothing(places.own, places.ahead):
            return
        if is_update:
            self.note_update()  # which is complete with this
            self._share_out(accelerator)
            take_update(accelerator, given)
        self._given = [PROGRESS.updates if is_update else given["result"]]

    def leave_out_backward(self) -> None:
        """Compute no gradients of a micro-batch that was given up, in its forward or in a collective behind that.

        They would stay until the loop zeroes them, which may be behind the next step.
        """
        if self._is_aside:
            self._end_aside()

    def attempt(self, part: Callable[[], object]) -> bool:
        """Whether a part of an update was completed: False where a rank is lost in it, and the update begins again."""
        try:
            part()
        except RuntimeError as error:
            failure = error  # gone on from outside of its handler, which would keep the frames of the loop
        else:
            return True
        self.go_on(failure)
        return self._given is not None

    @contextmanager
    def ending_blocks(self) -> Iterator[None]:
        """Context of a micro-batch whose rest is left out where a rank is lost: shards cannot be had without others."""
        try:
            yield
        except RuntimeError as error:
            is_aside = self._is_aside and isinstance(error, RankLostError)
            if not self._votes or not (is_aside or self.is_loss(error)):
                raise
            failure = error  # gone on from outside of its handler, as in `attempt`
        else:
            return
        if is_aside:
            self._end_aside()
        else:
            self.go_on(failure)

    def _go_on_in_forward(self, error: RuntimeError) -> None:
        if self.takes_windows:
            raise error
        self.go_on(error)

    def _share_out(self, accelerator: Accelerator) -> None:
        """Share the updates out among the ranks of the present group."""
        process, num_rounds = accelerator.process, self._rounds_per_update
        self.left = RanksLeft(num_rounds, process.world_size, process.rank)
        for prepared in accelerator._prepared.units:
            prepared.unit.rejoin()
            if self._is_in_update:
                prepared.unit.drop_update()
                prepared.abandon()
        if self._is_in_update:
            PROGRESS.updates = self._num_before
            accelerator.gradient_state.sync_gradients = False
            if accelerator.nonfinite_guard is not None:
                accelerator.nonfinite_guard.drop()
        if not self.takes_windows:
            accelerator.gradient_accumulation_steps = self.left.num_steps(self.num_shards * num_rounds)
        self._share_loaders(accelerator, self._num_in_pass * num_rounds)
        self._is_in_update = self._is_aside = False
        self._num_in_pass = self._num_yielded = 0
        self.num_calls = 0
        self.announce()

    def _share_loaders(self, accelerator: Accelerator, rounds: int) -> None:
        assert self.left is not None
        loaders = accelerator.gradient_state.loaders
        for loader in {*loaders, *accelerator._prepared.dataloaders}:
            current = loader.current_pass
            if current is None and loader.bookmark not in self._trained:
                loader.resize(self.left.num_ranks, self.left.rank)
            elif current is None or current is self._pass:
                loader.share_out(self.left, self._num_samples, rounds)
            else:  # no update of this pass was complete
                self._pass, self._num_in_pass, self._num_yielded, self._num_samples = current, 0, 0, current.start[0]
                self._trained.add(loader.bookmark)
                loader.share_out(self.left, self._num_samples, 0)

    @contextmanager
    def counting_exchange(self) -> Iterator[None]:
        """Context of what a Trainer's ranks exchange between two updates: nobody goes on with one that is past it."""
        self._is_calling, self._is_alike = True, False
        try:
            yield
            self.num_calls += 1
        finally:
            self._is_calling = False

    # --- collectives of the loop -----------------------------------------------------------------------------------

    def call(self, collective: Callable[[], Any], *, is_alike: bool) -> Any:
        """Return the result of a collective of the loop; where a rank is lost in it, that of the ranks left.

        `is_alike`: it is the same on all ranks.
        """
        if self._is_calling or self.takes_windows:
            return collective()
        self._is_calling, self._is_alike = True, is_alike
        try:
            while True:
                failure: RuntimeError | None = None
                try:
                    result = collective()
                except RuntimeError as error:
                    failure = error
                if failure is None:
                    self.num_calls += 1
                    self._last_result = result
                    return result
                self.go_on(failure)
                if self._given is not None:
                    (result,), self._given = self._given, None
                    return result
        finally:
            self._is_calling = False


def repeated_by_those_left(method: F, *, is_alike: bool = True) -> F:
    """Have a collective of the Accelerator, where a rank is lost in it, be called again by those left. Decorator.

    `is_alike`: its result is the same on all ranks, so that one that has it can give it to others.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.lost_ranks is None:
            return method(self, *args, **kwargs)
        return self.lost_ranks.call(lambda: method(self, *args, **kwargs), is_alike=is_alike)

    return call  # type: ignore[return-value]
