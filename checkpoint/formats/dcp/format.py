"""Folders of torch.distributed.checkpoint as formats: with a ``.metadata`` file, and its safetensors format without."""

from __future__ import annotations

from pathlib import Path

from ...errors import CheckpointError
from ...files import is_regular
from ...manifest import Manifest, read_manifest
from ..description import CheckpointInfo
from ..format import Format
from ..source import Source
from .description import describe_dcp
from .metadata import METADATA_NAME, DCPMetadata, read_dcp_metadata
from .reader import dcp_source
from .safetensors_shards import SHARD_PATTERN, has_safetensors_shards, read_safetensors_shards

_TORCH_CHECKPOINTING_NAME = "metadata.pkl"
"""meta-pytorch/torch_checkpointing's description, beside a file for each of the checkpoint's items and processes."""


class DCPFormat(Format):
    """Records in ``.distcp`` files, and ``.metadata``, which says where each lies."""

    signs: tuple[str, ...] = (f"{METADATA_NAME} (torch.distributed.checkpoint; Lightning's and accelight's folders)",)
    kind = "torch-dcp"
    """What it is called where nothing tells who saved it."""

    def detect(self, folder: Path) -> bool:
        """Whether there is a ``.metadata`` file."""
        return (folder / METADATA_NAME).is_file()

    def open(self, folder: Path) -> tuple[Source, Manifest | None]:
        """Read the metadata, of which ``accelight.json`` may say where the model is."""
        manifest = read_manifest(folder)
        return dcp_source(folder, self.read_metadata(folder, manifest), manifest), manifest

    def describe(self, folder: Path) -> CheckpointInfo:
        """Describe it from its metadata, ``accelight.json`` and ``meta.pt``."""
        manifest = read_manifest(folder)
        return describe_dcp(folder, self.read_metadata(folder, manifest), manifest, self.kind)

    def why_unreadable(self, folder: Path) -> str | None:
        """Tell of folders with a description for each process, with one that is no file, or with files by rank."""
        try:
            is_regular(folder / METADATA_NAME)
        except CheckpointError as error:
            return f"cannot be read: {error}"
        by_rank = sorted(path.name for path in folder.glob("pytorch_model_fsdp*_rank*.bin"))
        if by_rank:
            return (
                f"holds {by_rank[0]}, one of {len(by_rank)} files that Accelerate wrote with use_dcp=False or as "
                "LOCAL_STATE_DICT: they belong to that number of processes, and do not say where their parts lie in "
                "the whole. Load them there with load_fsdp_model(), and save with use_dcp=True and SHARDED_STATE_DICT."
            )
        of_first_rank = next((path.name for path in sorted(folder.glob("*_0.pt"))), None)
        if of_first_rank is not None and (folder / _TORCH_CHECKPOINTING_NAME).is_file():
            return (
                f"holds {_TORCH_CHECKPOINTING_NAME} and {of_first_rank}: torch_checkpointing's layout, which newer "
                "versions of torchtitan write. Its description is a pickle that may run any code, and is not read "
                "here. Load it with torch_checkpointing, and save it with torch.distributed.checkpoint."
            )
        if not any(folder.glob(f"__*{METADATA_NAME}")):
            return None
        return (
            f"was saved without coordination (__0_{METADATA_NAME} and so on, one a process). "
            f"Save it with use_collectives=True to merge it."
        )

    def read_metadata(self, folder: Path, manifest: Manifest | None) -> DCPMetadata:
        """Read where the tensors of a folder lie."""
        digest = None if manifest is None else manifest.digests.get(METADATA_NAME)
        return read_dcp_metadata(folder / METADATA_NAME, digest)


class DCPSafetensorsFormat(DCPFormat):
    """Shards in safetensors files, whose headers say where each lies."""

    signs = (
        f"{SHARD_PATTERN} (its safetensors format)",
        f"a folder such as pytorch_model_fsdp_0/{METADATA_NAME} (Accelerate)",  # of DCP's, too: said after both
    )
    kind = "torch-dcp-safetensors"

    def detect(self, folder: Path) -> bool:
        """Whether there are files named as its writer names them."""
        return has_safetensors_shards(folder)

    def why_unreadable(self, folder: Path) -> str | None:
        """Nothing: `DCPFormat` has told."""
        return None

    def read_metadata(self, folder: Path, manifest: Manifest | None) -> DCPMetadata:
        """Read the headers of the shards."""
        return read_safetensors_shards(folder)
