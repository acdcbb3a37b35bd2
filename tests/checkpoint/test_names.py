"""Names in the output: wrappers, prefixes, patterns, ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelight.checkpoint import CheckpointError, Manifest, merge_fsdp_weights
from accelight.checkpoint.names import clean_name, select
from tests.checkpoint.saving import save


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("a.weight", "a.weight"),
        ("_fsdp_wrapped_module.a.weight", "a.weight"),
        ("_orig_mod.a._orig_mod.weight", "a.weight"),
        ("blocks.0._checkpoint_wrapped_module._fsdp_wrapped_module.up.bias", "blocks.0.up.bias"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("not_fsdp_wrapped_module_at_all.weight", "not_fsdp_wrapped_module_at_all.weight"),
    ],
)
def test_wrapper_names(name: str, cleaned: str) -> None:
    assert clean_name(name) == cleaned


def test_wrapper_names_never_appear(tmp_path: Path) -> None:
    wrapped: Any = torch.compile(torch.nn.Linear(2, 3), backend="eager")
    save(tmp_path / "in", {"model": {"net." + name: value for name, value in wrapped.state_dict().items()}})
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"net.weight", "net.bias"}


def test_two_names_that_are_one_without_wrappers() -> None:
    with pytest.raises(CheckpointError, match=r"'a\.w' and '_orig_mod\.a\.w' are both named 'a\.w'"):
        select(["a.w", "_orig_mod.a.w"], None)


# --- strip_prefix


@pytest.mark.parametrize("prefix", ["model", "model.", "auto"])
def test_strip_prefix(prefix: str) -> None:
    assert select(["model.a.w", "_orig_mod.model.b"], None, strip_prefix=prefix).names == {
        "a.w": "model.a.w",
        "b": "_orig_mod.model.b",
    }


def test_strip_prefix_leaves_out_what_lies_beside() -> None:
    selection = select(["model.w", "loss.w", "modelx.w"], None, strip_prefix="model")
    assert selection.names == {"w": "model.w"}
    assert selection.skipped == {"loss.w": "outside the prefix 'model.'", "modelx.w": "outside the prefix 'model.'"}


def test_strip_prefix_of_two_attributes() -> None:
    assert select(["outer.model.w", "outer.x"], None, strip_prefix="outer.model").names == {"w": "outer.model.w"}


def test_strip_prefix_that_fits_nothing() -> None:
    with pytest.raises(CheckpointError, match=r"begins with 'net\.' .*They start with: model \(2 names\)"):
        select(["model.a", "model.b"], None, strip_prefix="net")


@pytest.mark.parametrize("names", [["model.w", "loss.w"], ["weight", "bias"], ["model.w", "scale"]])
def test_auto_that_cannot_tell(names: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"strip_prefix='auto' needs one attribute .* names start with: "):
        select(names, None, strip_prefix="auto")


def test_auto_counts_tied_names_too() -> None:
    """Else the only stored head, of which 'lm_head' is an alias, would look like the attribute of a module."""
    with pytest.raises(CheckpointError, match=r"transformer \(1 names\), lm_head \(1 names\)"):
        select(["transformer.wte"], Manifest("model", {"lm_head.weight": "transformer.wte"}), strip_prefix="auto")


def test_auto_takes_what_the_checkpoint_recorded() -> None:
    manifest = Manifest("model", {}, "net")
    assert select(["net.w", "loss.w"], manifest, strip_prefix="auto").names == {"w": "net.w"}
    assert select(["w", "net.w"], Manifest("model", {}, ""), strip_prefix="auto").names == {"w": "w", "net.w": "net.w"}


@pytest.mark.parametrize("prefix", ["", ".", 3])
def test_strip_prefix_that_is_none(tmp_path: Path, prefix: Any) -> None:
    with pytest.raises(ValueError, match="strip_prefix must be an attribute's name, 'auto' or None"):
        merge_fsdp_weights(tmp_path, tmp_path / "out", strip_prefix=prefix)


# --- include, exclude


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("a.*", None, ["a.x", "a.y"]),
        (["a.x", "b.*"], None, ["a.x", "b.x"]),
        (None, "*.x", ["a.y"]),
        ("a.*", ["*.x"], ["a.y"]),
        ("?.[xy]", None, ["a.x", "a.y", "b.x"]),
    ],
)
def test_include_and_exclude(tmp_path: Path, include: Any, exclude: Any, left: list[str]) -> None:
    save(tmp_path / "in", {"model": {name: torch.ones(2) for name in ("a.x", "a.y", "b.x")}})
    report = merge_fsdp_weights(tmp_path / "in", tmp_path / "out", include=include, exclude=exclude)
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == left
    assert sorted(report.skipped) == sorted(
        {"model.a.x", "model.a.y", "model.b.x"} - {f"model.{name}" for name in left}
    )


def test_patterns_are_over_the_names_of_the_output() -> None:
    assert select(["model.a", "model.b"], None, strip_prefix="model", include=("a",)).names == {"a": "model.a"}


def test_what_is_left_out_is_not_looked_at(tmp_path: Path) -> None:
    """A damaged tensor that nobody asked for stops nothing."""
    from tests.checkpoint import damage

    folder = damage.good(tmp_path / "in")
    damage.replace_record(folder, "model.a", b"damaged")
    merge_fsdp_weights(folder, tmp_path / "out", exclude="a")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"b"}


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize("value", ["", [], [""], [3]])
def test_patterns_that_are_none(tmp_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be one or more patterns"):
        merge_fsdp_weights(tmp_path, tmp_path / "out", **{argument: value})


def test_patterns_that_fit_nothing(tmp_path: Path) -> None:
    save(tmp_path / "in", {"model": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match="No tensors to write: not selected by include and exclude"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out", include="v")


# --- ties


TIES = Manifest("model", {"head.w": "embed.w", "tail.w": "embed.w"})


def test_ties_are_written_once() -> None:
    selection = select(["embed.w", "x"], TIES)
    assert selection.names == {"embed.w": "embed.w", "x": "x"}
    assert selection.ties == {"head.w": "embed.w", "tail.w": "embed.w"}
    assert selection.duplicates == {}


def test_ties_stored_twice_are_compared() -> None:
    assert select(["embed.w", "head.w"], TIES).duplicates == {"head.w": ("head.w", "embed.w")}


def test_an_alias_takes_the_place_of_a_tensor_that_is_left_out() -> None:
    selection = select(["embed.w"], TIES, exclude=("embed.*",))
    assert selection.names == {"head.w": "embed.w"}
    assert selection.ties == {"tail.w": "head.w"}


def test_an_alias_inside_the_prefix_of_a_tensor_outside() -> None:
    selection = select(["embed.w", "x.y"], Manifest("model", {"x.head": "embed.w"}), strip_prefix="x")
    assert selection.names == {"head": "embed.w", "y": "x.y"}


def test_a_tied_group_that_is_left_out() -> None:
    selection = select(["embed.w", "head.w", "x"], TIES, include=("x",))
    assert selection.names == {"x": "x"}
    assert selection.ties == {}
    assert selection.duplicates == {}


def test_a_tie_to_nothing() -> None:
    with pytest.raises(CheckpointError, match=r"ties 'head\.w' to 'embed\.w', which the checkpoint does not hold"):
        select(["x"], TIES)


def test_ties_that_are_one_name_without_wrappers() -> None:
    with pytest.raises(CheckpointError, match="which is an alias itself"):
        select(["a"], Manifest("model", {"_orig_mod.a": "a"}))
