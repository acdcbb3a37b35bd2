"""What a merge did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import printable


@dataclass(frozen=True)
class MergeReport:
    """Result of `merge_fsdp_weights`."""

    destination: Path
    """The output folder."""
    files: tuple[str, ...]
    """Names of the written files; the index, where there is one, comes last."""
    num_tensors: int
    num_bytes: int
    """Of all files together."""
    seconds: float
    ties: dict[str, str]
    """Alias to the name of the tensor it shares, as in the output."""
    skipped: dict[str, str]
    """What the output lacks of the checkpoint, or of the model that was saved: names in the checkpoint, and why."""
    verified: bool
    """Whether the output was read back and compared with its sources."""
    num_linked_bytes: int = 0
    """Those that were not copied: the file system lets the output share them with the checkpoint."""

    def skipped_by_reason(self) -> dict[str, list[str]]:
        """Return the names of what was left out under each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            reasons.setdefault(reason, []).append(name)
        return reasons

    def to_dict(self) -> dict[str, object]:
        """Return plain values, as ``--json`` prints them."""
        return {**vars(self), "destination": str(self.destination), "files": list(self.files)}

    def __str__(self) -> str:
        """Return one line for people."""
        rate = self.num_bytes / max(self.seconds, 1e-9)
        extras = [f"{human_bytes(self.num_linked_bytes)} linked"] if self.num_linked_bytes else []
        extras += [f"{len(self.ties)} tied"] if self.ties else []
        extras += [f"{len(self.skipped)} left out"] if self.skipped else []
        extras += ["verified"] if self.verified else []
        where = self.destination / self.files[0] if len(self.files) == 1 else self.destination
        what = f"{self.num_tensors} tensors, {human_bytes(self.num_bytes)} in {self.seconds:.2f} s"
        return ", ".join([f"{what} ({human_bytes(rate)}/s)", *extras]) + f" -> {printable(str(where))}"


def human_bytes(num_bytes: float) -> str:
    """Return a size in the unit people read best, powers of 1000 as Hugging Face counts."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
