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
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from ....checkpoint.manifest import Manifest
from ....state.process_group import timeout_of
from ...common.agreed_outcome import told_by_rank
from ...common.new_checkpoints import NewFolder
from .dcp_writer import FolderWriter
from .kept_plans import KeptPlan, KeptPlans, form_of
from .saving_orders import Begun, Ending, Part, Plan, Record
from .saving_plan import FullFromRankZero
from .saving_process import SavingProcess, SavingProcessEnded
from .sharded_checkpoints import naming_ranks
from .shared_memory import SharedStager


class _PlanningOnly(FolderWriter):
    """Writes nothing: torch plans with it."""

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch would make the folder

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        return


@dataclass
class _Begun:
    """What rank 0 says of a save that all want."""

    problems: list[str]
    number: str = ""
    """Of the folder."""
    made: str = ""
    """What is to be seen there: see `NewFolder.check_shared`."""
    is_planned: bool = False
    """Whether all have the same plan."""


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

    def hand_over(self, group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup | None], None]:
        """Let it be written by other processes; every rank must call it.

        Args:
            group: Through which the ranks plan a first save, and notice who ends.

        Returns:
            What waits until it is written, on every rank, with a group to notice who ends.

        Raises:
            RuntimeError: On every rank, if any rank failed; it names the rank.
        """
        messages, what = self.plans.messages, f"saving {self.path}"
        writer, planner = _PlanningOnly(NewFolder(self.path).unfinished), FullFromRankZero()
        form = kept = problem = error = None
        try:
            staged = self.stager.copy(self.state)
            planner.set_up_planner(staged, writer.storage_meta(), is_coordinator=dist.get_rank() == 0)
            form = form_of(planner)
            kept = self.plans.find(form)
        except Exception as caught:  # noqa: BLE001 (raised on all ranks when rank 0 has told them)
            problem, error = f"{type(caught).__name__}: {caught}", caught
        wish = problem, None if kept is None else kept.number
        begun = messages.through_rank_zero(wish, self._begin, what, group)
        if begun.problems:
            raise RuntimeError("\n".join([f"{what} failed.", *begun.problems])) from error
        folder = NewFolder(self.path, begun.number)
        try:
            if kept is None or not begun.is_planned:
                with naming_ranks(what):
                    whole = save(staged, storage_writer=writer, planner=planner, process_group=group)
                kept = self.plans.keep(form, planner, whole)
            if dist.get_rank() != 0:
                problem = self._tell(planner, begun, kept, None)
            ending = Ending(self.metadata, self.manifest, timeout_of(group).total_seconds())
            commit = partial(self._commit, partial(self._tell, planner, begun, kept, ending))
            if problems := messages.through_rank_zero(problem, commit, what, group):
                raise RuntimeError("\n".join([f"{what} failed.", *problems]))
        except BaseException:
            self.process.close()
            if dist.get_rank() == 0:
                folder.drop()
            raise
        return partial(self._wait, folder)

    @property
    def _absolute(self) -> Path:
        return self.path.absolute()  # the other process is where this one was when it was started

    def _begin(self, wishes: list[tuple[str | None, int | None]]) -> _Begun:
        """What rank 0 does when all want to save: make the folder, and compare their plans."""
        if problems := _told_by_rank([problem for problem, _ in wishes]):
            return _Begun(problems)
        number = secrets.token_hex(8)
        self.process.tell(Begun(self._absolute, number))
        made = NewFolder(self.path, number).begin()
        plan_numbers = {plan_number for _, plan_number in wishes}
        return _Begun([], number, made, is_planned=None not in plan_numbers and len(plan_numbers) == 1)

    @staticmethod
    def _commit(tell: Callable[[], str | None], problems: list[str | None]) -> list[str]:
        """What rank 0 does when all others' processes know their parts: see [Note: whole or not at all]."""
        if not any(problems):
            problems[0] = tell()
        return _told_by_rank(problems)

    def _tell(self, planner: FullFromRankZero, begun: _Begun, kept: KeptPlan, ending: Ending | None) -> str | None:
        """Tell this rank's process its part; return what went wrong."""
        folder = NewFolder(self.path, begun.number)
        try:
            folder.check_shared(begun.made)
            if ending is not None:  # all others have seen it
                (folder.unfinished / begun.made).unlink()
            data = [planner.resolve_data(item) for item in planner.finish_plan(kept.plan).items]
            plan = None
            if kept.number not in self.process.known_plans:
                plan = Plan(kept.plan, kept.metadata, kept.indices)
            part = Part(
                path=self._absolute,
                known_as=NewFolder(self.path).unfinished,
                number=begun.number,
                rank=dist.get_rank(),
                num_ranks=dist.get_world_size(),
                plan_number=kept.number,
                plan=plan,
                kept_plans=self.plans.numbers,
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
