"""Writing a sharded checkpoint: each rank its shards, rank 0 the rest; only a first save is planned together.

[Note: a later save] Each rank looks for a plan of its own for what it is to save, writes by it, and tells rank 0 where
everything is; rank 0 completes the folder, and tells the others. Nobody asks beforehand whether the others have the
same plan: if one has another, or none, rank 0 tells that, and all plan together, over what was written.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from ....checkpoint.digests import FileDigest
from ....checkpoint.manifest import Manifest, write_manifest
from ...common.agreed_outcome import told_by_rank
from ...common.new_checkpoints import NewFolder
from ...common.store_messages import store_messages
from .dcp_writer import FolderWriter
from .kept_plans import KeptPlan, KeptPlans, Places, form_of
from .saving_plan import FullFromRankZero
from .sharded_checkpoints import METADATA_FILE, naming_ranks, write_metadata


@dataclass
class _Report:
    """What a rank has to say of its part."""

    plan: int | None
    """Number of the plan that it has; None without one."""
    places: Places | None = None
    error: str | None = None


@dataclass
class _Outcome:
    complete: bool
    problems: list[str]


def save_sharded(
    folder: NewFolder,
    state: dict[str, Any],
    metadata: bytes,
    manifest: Manifest,
    plans: KeptPlans,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write one folder, every rank its own shards; it has its name only when it is complete.

    Args:
        folder: Where; a checkpoint that is there already is replaced, last of all.
        state: Weights under the engine's key, and optimizer state under ``optimizer_0`` and so on.
        metadata: The file for everything else, written by rank 0.
        manifest: For the merger.
        plans: Of earlier saves, for states of the same form; a new one is kept.
        group: Through which the ranks plan a first save, and notice who ends; the default group by default.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """
    path, messages, what = folder.path, plans.messages, f"saving {folder.path}"
    writer, planner = FolderWriter(folder.unfinished), FullFromRankZero()
    complete = partial(_complete, writer, metadata, manifest)

    def finish(kept: KeptPlan | None, reports: list[_Report]) -> _Outcome:
        """What rank 0 does when it knows what all have done."""
        problems = told_by_rank([[one.error] if one.error else [] for one in reports])
        if problems or kept is None or kept.metadata is None or any(one.plan != kept.number for one in reports):
            if problems:
                folder.drop()  # before anybody is told
            return _Outcome(complete=False, problems=problems)
        places = [one.places for one in reports if one.places is not None]
        finish_folder(folder, writer, kept.metadata, kept.indices, places, metadata, manifest)
        return _Outcome(complete=True, problems=[])

    made = messages.from_rank_zero(folder.begin, f"preparing {folder.unfinished}")
    try:
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=dist.get_rank() == 0)
        form = form_of(planner)
        kept = plans.find(form)
        report, error = _write(kept, writer, planner, partial(folder.check_shared, made))
        outcome = messages.through_rank_zero(
            report, partial(finish, kept), f"finishing {path}", group or dist.group.WORLD
        )
        if outcome.problems:
            raise RuntimeError("\n".join([f"{what} failed.", *outcome.problems])) from error
        if not outcome.complete:
            for name in () if report.places is None else report.places.files:
                (folder.unfinished / name).unlink()
            with naming_ranks(what):
                whole = save(state, storage_writer=writer, planner=planner, process_group=group)
            plans.keep(form, planner, whole)
            messages.from_rank_zero(partial(folder.finish, complete), f"finishing {path}")
        folder.finish_own()
    except BaseException:
        folder.drop_own()
        raise


def finish_folder(
    folder: NewFolder,
    writer: FolderWriter,
    planned: Metadata,
    indices: Sequence[Sequence[MetadataIndex]],
    places: Sequence[Places],
    metadata: bytes,
    manifest: Manifest,
) -> None:
    """Write what tells of all ranks' parts, when they are written, and give the folder its name; on one process.

    Args:
        folder: Where they are.
        writer: Into it.
        planned: As `KeptPlan.metadata`.
        indices: As `KeptPlan.indices`.
        places: Where each rank wrote its part.
        metadata: The file for everything else.
        manifest: For the merger.
    """
    writer.finish(planned, [one.results(own) for one, own in zip(places, indices, strict=True)])
    folder.finish(partial(_complete, writer, metadata, manifest))


def _complete(writer: FolderWriter, metadata: bytes, manifest: Manifest, unfinished: Path) -> None:
    write_metadata(unfinished, metadata)
    write_manifest(
        unfinished,
        ties=manifest.ties,
        model_prefix=manifest.model_prefix,
        module_attribute=manifest.module_attribute,
        digests={METADATA_FILE: FileDigest.of(metadata), **writer.digests},
    )


def _write(
    kept: KeptPlan | None, writer: FolderWriter, planner: FullFromRankZero, check_folder: Callable[[], None]
) -> tuple[_Report, Exception | None]:
    """Write this rank's part by a kept plan."""
    number = None if kept is None else kept.number
    try:
        check_folder()
        if kept is None:
            return _Report(None), None
        writer.set_up_storage_writer(dist.get_rank() == 0, rank=dist.get_rank(), use_collectives=True)
        plan = planner.finish_plan(kept.plan)
        places = Places.of(plan, writer.write_data(plan, planner).wait())
    except Exception as error:  # noqa: BLE001 (raised on all ranks when rank 0 has told them)
        return _Report(number, error=f"{type(error).__name__}: {error}"), error
    return _Report(number, places), None


def serialised_on_rank_zero(metadata: Mapping[str, Any], what: str) -> bytes:
    """Return the metadata file's content, which rank 0 alone needs: a snapshot, whatever is changed afterwards.

    Raises:
        RuntimeError: On every rank, if something cannot be pickled.
    """
    buffer = io.BytesIO()
    store_messages().from_rank_zero(lambda: torch.save(dict(metadata), buffer), what)
    return buffer.getvalue()
