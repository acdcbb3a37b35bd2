"""Sharded saves that other processes complete: when `hand_over` returns, all ranks may be killed.

[Note: whole or not at all] Each rank plans and tells the process that writes for it, and then rank 0. When all have
done so, rank 0 tells its own process how to complete the checkpoint, and then the other ranks. Whoever is killed
before, no process knows how to complete it, and that of rank 0 removes the folder; whoever is killed afterwards, they
complete it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ....checkpoint.manifest import Manifest
from ....state.process_group import timeout_of
from ...common.agreed_outcome import told_by_rank
from ...common.new_checkpoints import NewFolder
from .kept_plans import KeptPlan, KeptPlans, ToldPlan
from .packed_plans import MergedPlan
from .saving_orders import Begun, Ending, Part, Plan, Record
from .saving_plan import OwnPart
from .saving_process import SavingProcess, SavingProcessEnded
from .shared_memory import SharedStager


@dataclass
class _Begun:
    """What rank 0 says of a save that all want."""

    problems: list[str]
    number: str = ""
    """Of the folder."""
    made: str = ""
    """What is to be seen there: see `NewFolder.check_shared`."""


@dataclass
class HandedSave:
    """One checkpoint, on its way from the ranks to the processes that write it."""

    path: Path
    state: dict[str, Any]
    metadata: bytes
    """The file for everything else, on rank 0."""
    manifest: Manifest
    plans: KeptPlans
    stager: SharedStager
    process: SavingProcess
    _merged: MergedPlan | None = None
    """On rank 0, what all ranks write."""

    def hand_over(self, group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup | None], None]:
        """Let it be written by other processes; every rank must call it.

        Args:
            group: Through which the ranks notice who ends.

        Returns:
            What waits until it is written, on every rank, with a group to notice who ends.

        Raises:
            RuntimeError: On every rank, if any rank failed; it names the rank.
        """
        messages, what = self.plans.messages, f"saving {self.path}"
        planner, kept, error = OwnPart(), None, None
        try:
            planner.set_up_planner(self.stager.copy(self.state), is_coordinator=dist.get_rank() == 0)
            kept = self.plans.of(planner)
            wish: str | ToldPlan = self.plans.told(kept)
        except Exception as caught:  # noqa: BLE001 (raised on all ranks when rank 0 has told them)
            wish, error = f"{type(caught).__name__}: {caught}", caught
        begun = messages.through_rank_zero(wish, self._begin, what, group)
        if begun.problems or kept is None:
            raise RuntimeError("\n".join([f"{what} failed.", *begun.problems])) from error
        folder = NewFolder(self.path, begun.number)
        try:
            problem = None if dist.get_rank() == 0 else self._tell(planner, begun, kept, None)
            ending = Ending(self.metadata, self.manifest, timeout_of(group).total_seconds())
            commit = partial(self._commit, partial(self._tell, planner, begun, kept, ending))
            if problems := messages.through_rank_zero(problem, commit, what, group):
                raise RuntimeError("\n".join([f"{what} failed.", *problems]))
            self.plans.keep(kept)
        except BaseException:
            self.process.close()
            if dist.get_rank() == 0:
                folder.drop()
            raise
        return partial(self._wait, folder)

    @property
    def _absolute(self) -> Path:
        return self.path.absolute()  # the other process is where this one was when it was started

    def _begin(self, wishes: list[str | ToldPlan]) -> _Begun:
        """What rank 0 does when all want to save: make the folder, and put their plans together."""
        if problems := _told_by_rank([wish if isinstance(wish, str) else None for wish in wishes]):
            return _Begun(problems)
        self._merged = self.plans.merge([wish for wish in wishes if isinstance(wish, ToldPlan)])
        number = secrets.token_hex(8)
        self.process.tell(Begun(self._absolute, number))
        return _Begun([], number, NewFolder(self.path, number).begin())

    @staticmethod
    def _commit(tell: Callable[[], str | None], problems: list[str | None]) -> list[str]:
        """What rank 0 does when all others' processes know their parts: see [Note: whole or not at all]."""
        if not any(problems):
            problems[0] = tell()
        return _told_by_rank(problems)

    def _tell(self, planner: OwnPart, begun: _Begun, kept: KeptPlan, ending: Ending | None) -> str | None:
        """Tell this rank's process its part; return what went wrong."""
        folder = NewFolder(self.path, begun.number)
        try:
            folder.check_shared(begun.made)
            if ending is not None:  # all others have seen it
                (folder.unfinished / begun.made).unlink()
            data = [planner.resolve_data(item) for item in planner.finish_plan(kept.plan).items]
            merged, plan = self._merged, None
            number = kept.number if merged is None else merged.number
            if number not in self.process.known_plans:
                plan = Plan(kept.plan, merged)
            part = Part(
                path=self._absolute,
                known_as=NewFolder(self.path).unfinished,
                number=begun.number,
                rank=dist.get_rank(),
                num_ranks=dist.get_world_size(),
                plan_number=number,
                plan=plan,
                kept_plans=self.plans.told(kept).kept if merged is None else self.plans.merged_numbers,
                ending=ending,
            )
            self.process.tell(part, data, self.stager.memory)
        except Exception as error:  # noqa: BLE001 (raised on all ranks when rank 0 has told them)
            return f"{type(error).__name__}: {error}"
        return None

    def _wait(self, folder: NewFolder, group: dist.ProcessGroup | None) -> None:
        """Wait until the checkpoint has its name.

        Raises:
            RuntimeError: On every rank, if it has not got it.
        """
        what, problem, complete = f"saving {self.path}", None, False
        try:
            answer = self.process.answer()
            problem, complete = answer.problem, answer.complete
        except SavingProcessEnded as ended:
            problem = str(ended)
            if dist.get_rank() != 0:
                _leave_word(folder, problem)

        def outcome(problems: list[str | None]) -> list[str]:
            if complete:
                return []
            folder.drop()
            return _told_by_rank(problems) or [f"{folder.unfinished} was not completed."]

        problems = self.plans.messages.through_rank_zero(problem, outcome, f"finishing {self.path}", group)
        if problems:
            self.process.close()
            raise RuntimeError("\n".join([f"{what} failed.", *problems]))


def _told_by_rank(problems: Sequence[str | None]) -> list[str]:
    return told_by_rank([[] if problem is None else [problem] for problem in problems])


def _leave_word(folder: NewFolder, problem: str) -> None:
    """Tell rank 0's process in the place of one that is gone."""
    try:
        Record(None, problem).leave(folder.unfinished, dist.get_rank())
    except OSError:  # the folder is gone: so is the save
        return
