"""Writing a sharded checkpoint: each rank its shards, rank 0 the rest.

Each rank writes by its own plan, and tells rank 0 what and where, once; rank 0 completes the folder, and tells the
others. Nobody waits for anybody before, and no Python object is sent in a collective.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ....checkpoint.digests import FileDigest
from ....checkpoint.manifest import Manifest, write_manifest
from ...common.agreed_outcome import told_by_rank
from ...common.new_checkpoints import NewFolder
from ...common.store_messages import store_messages
from .dcp_writer import FolderWriter
from .kept_plans import KeptPlan, KeptPlans, ToldPlan
from .packed_plans import MergedPlan
from .saving_plan import OwnPart
from .sharded_checkpoints import METADATA_FILE, write_metadata
from .written_parts import Places, RankResults


@dataclass
class _Report:
    """What a rank has to say of its part."""

    plan: ToldPlan | None = None
    places: Places | None = None
    error: str | None = None


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
        group: Through which the ranks notice who ends; the default group by default.

    Raises:
        RuntimeError: On every rank, if any rank failed; it names the rank.
    """
    path, messages, what = folder.path, plans.messages, f"saving {folder.path}"
    writer = FolderWriter(folder.unfinished)

    def finish(reports: list[_Report]) -> list[str]:
        """What rank 0 does when it knows what all have done."""
        if problems := told_by_rank([[one.error] if one.error else [] for one in reports]):
            folder.drop()  # before anybody is told
            return problems
        merged = plans.merge([one.plan for one in reports if one.plan is not None])
        places = [one.places for one in reports if one.places is not None]
        finish_folder(folder, writer, merged, places, metadata, manifest)
        return []

    made = messages.from_rank_zero(folder.begin, f"preparing {folder.unfinished}")
    kept = error = None
    try:
        try:
            folder.check_shared(made)
            kept, report = _write(state, writer, plans)
        except Exception as caught:  # noqa: BLE001 (raised on all ranks when rank 0 has told them)
            report, error = _Report(error=f"{type(caught).__name__}: {caught}"), caught
        problems = messages.through_rank_zero(report, finish, f"finishing {path}", group or dist.group.WORLD)
        if problems or kept is None:
            raise RuntimeError("\n".join([f"{what} failed.", *problems])) from error
        plans.keep(kept)
        folder.finish_own()
    except BaseException:
        folder.drop_own()
        raise


def _write(state: dict[str, Any], writer: FolderWriter, plans: KeptPlans) -> tuple[KeptPlan, _Report]:
    """Write this rank's part."""
    rank, planner = dist.get_rank(), OwnPart()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
    kept = plans.of(planner)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plan = planner.finish_plan(kept.plan)
    return kept, _Report(plans.told(kept), Places.of(plan, writer.write_data(plan, planner).wait()))


def finish_folder(
    folder: NewFolder,
    writer: FolderWriter,
    merged: MergedPlan,
    places: Sequence[Places],
    metadata: bytes,
    manifest: Manifest,
) -> None:
    """Write what tells of all ranks' parts, when they are written, and give the folder its name; on one process.

    Args:
        folder: Where they are.
        writer: Into it.
        merged: What all ranks were to write.
        places: Where each rank wrote its part.
        metadata: The file for everything else.
        manifest: For the merger.
    """
    results = [RankResults(indices, own) for indices, own in zip(merged.indices, places, strict=True)]
    writer.finish(merged.metadata, results)
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


def serialised_on_rank_zero(metadata: Mapping[str, Any], what: str) -> bytes:
    """Return the metadata file's content, which rank 0 alone needs: a snapshot, whatever is changed afterwards.

    Raises:
        RuntimeError: On every rank, if something cannot be pickled.
    """
    buffer = io.BytesIO()
    store_messages().from_rank_zero(lambda: torch.save(dict(metadata), buffer), what)
    return buffer.getvalue()
