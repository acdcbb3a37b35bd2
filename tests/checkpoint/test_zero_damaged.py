"""DeepSpeed checkpoints that are hostile, incomplete or contradictory: an error that names the place, and no output."""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelight.checkpoint import CheckpointError, inspect_checkpoint, merge_fsdp_weights
from accelight.checkpoint.formats.torch_save import read_torch_file
from tests.checkpoint import zero_damage
from tests.checkpoint.damage import rebuild
from tests.checkpoint.hostile import NAMES, call, hostile, stack_global, text
from tests.checkpoint.zero_damage import MODEL, OPTIMIZER, SHARD, edit

Saved = tuple[Path, dict[str, str]]
Content = dict[str, Any]


def copy(saved: Saved, tmp_path: Path, stage: int, kind: str = "stage {}, 2 processes") -> Path:
    return zero_damage.copy(saved[0] / kind.format(stage), tmp_path / "in")


def assert_refused(folder: Path, match: str) -> None:
    output = folder.parent / "out"
    with pytest.raises(CheckpointError, match=match):
        merge_fsdp_weights(folder, output)
    assert not output.exists()


# --- pickles


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER.format(1)])
@pytest.mark.parametrize("name", NAMES)
def test_hostile_pickles(zero_checkpoints: Saved, tmp_path: Path, name: str, file: str) -> None:
    folder, marker = copy(zero_checkpoints, tmp_path, 2), tmp_path / "marker"
    zero_damage.replace_pickle(folder / file, hostile(f"touch {marker}".encode())[name])
    assert_refused(folder, file)
    assert not marker.exists()


def _in_client_state(folder: Path, attack: bytes) -> None:
    """Put an object into the model states, beside everything that is needed."""
    with zipfile.ZipFile(folder / MODEL) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        good = archive.read(name)
    assert good.endswith(b"u.")  # the last entries of the dict are set
    zero_damage.replace_pickle(folder / MODEL, good[:-2] + text(b"evil") + attack + good[-2:])


def test_an_attack_where_nothing_is_read(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder, marker = copy(zero_checkpoints, tmp_path, 2), tmp_path / "marker"
    _in_client_state(folder, call(b"cos\nsystem\n", f"touch {marker}".encode()))
    assert_refused(folder, rf"{MODEL}: The pickle asks for os\.system\. No training run writes such a file")
    assert not marker.exists()


def test_unknown_classes_where_nothing_is_read_are_not_imported(zero_checkpoints: Saved, tmp_path: Path) -> None:
    """Client state may hold any class: it is neither imported nor called, and does not stop a merge."""
    folder, package = copy(zero_checkpoints, tmp_path, 2), tmp_path / "package"
    package.mkdir()
    (package / "zero_marker.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nrun = print\n")
    _in_client_state(folder, call(stack_global(b"zero_marker", b"run"), b"x") + b"}" + text(b"a") + b"Nsb")
    sys.path.insert(0, str(package))
    try:
        report = merge_fsdp_weights(folder, tmp_path / "out")
    finally:
        sys.path.remove(str(package))
    assert report.num_tensors == 14
    assert "zero_marker" not in sys.modules
    assert not (tmp_path / "marker").exists()


STORAGE = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x0ctQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0K\x0c\x85K\x01\x85\x89NtR"
ODD = {
    "fields set in a list": TENSOR + b"(NNJ\xff\xff\xff\xffNNlb",
    "fields set by name": TENSOR + b"}" + text(b"offset") + b"J\xff\xff\xff\xffsb",
    "fields set as slots": TENSOR + b"N}" + text(b"offset") + b"J\xff\xff\xff\xffs\x86b",
    "class of a size changed": b"ctorch\nSize\nN}" + text(b"__new__") + b"cos\nsystem\ns\x86b",
    "function replaced": b"ctorch._utils\n_rebuild_tensor_v2\nN}" + text(b"_fn") + TENSOR + b"s\x86b",
    "size negative": b"ctorch\nSize\n(J\xff\xff\xff\xfft\x85R",
    "size enormous": b"ctorch\nSize\n(\x8a\x09" + b"\xff" * 8 + b"\0t\x85R",
    "state of an inert class": b"cmine\nThing\n}" + text(b"__call__") + b"Nsb",
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_rebuilt_cannot_be_changed(tmp_path: Path, name: str) -> None:
    """A frozen dataclass takes its fields from BUILD, behind all checks: tensors were described by one."""
    torch.save({"a": torch.arange(12.0)}, tmp_path / "file.pt")
    zero_damage.replace_pickle(tmp_path / "file.pt", b"\x80\x02" + ODD[name] + b".")
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        read_torch_file(tmp_path / "file.pt")


# --- contents


def _optimizer(change: Callable[[Content], object]) -> Callable[[Content], object]:
    return lambda content: change(content["optimizer_state_dict"])


def _groups(change: Callable[[list[torch.Tensor]], object]) -> Callable[[Content], object]:
    def apply(content: Content) -> None:
        state = content["optimizer_state_dict"]
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
        state[key] = [one.detach().clone() for one in state[key]]
        change(state[key])

    return apply


def _replace(index: int, new: Callable[[torch.Tensor], object]) -> Callable[[Content], object]:
    return _groups(lambda groups: groups.__setitem__(index, new(groups[index])))  # type: ignore[call-overload]


def _shape(name: str, shape: object) -> Callable[[Content], object]:
    return lambda content: next(group for group in content["param_shapes"] if name in group).update({name: shape})


def _set(key: str, value: object) -> Callable[[Content], object]:
    return lambda content: content.update({key: value})


RANK_0, RANK_1 = OPTIMIZER.format(0), OPTIMIZER.format(1)
SHARD_0, SHARD_1 = SHARD.format(0), SHARD.format(1)
CONTENTS: dict[str, tuple[int, str, Callable[[Content], object], str]] = {
    "world size": (
        2,
        RANK_1,
        _optimizer(lambda s: s.update(partition_count=[2, 3])),
        r"1_.*partition_count is 3, .* 2",
    ),
    "world size hostile": (
        2,
        RANK_0,
        _optimizer(lambda s: s.update(partition_count=2**61)),
        r"partition_count is 2, but in",
    ),
    "world size negative": (
        2,
        RANK_0,
        _optimizer(lambda s: s.update(partition_count=-1)),
        r"partition_count .* found -1",
    ),
    "stage": (
        2,
        RANK_1,
        _optimizer(lambda s: s.update(zero_stage=1)),
        r"rank_1.* zero_stage is 1, but in .*rank_0.* it is 2",
    ),
    "stage unknown": (2, RANK_0, _optimizer(lambda s: s.update(zero_stage=7)), r"zero_stage is 7, but single_part"),
    "stage no number": (2, RANK_0, _optimizer(lambda s: s.update(zero_stage="2")), r"zero_stage should be a number"),
    "stage of another": (
        2,
        RANK_0,
        _optimizer(lambda s: s.update(zero_stage=3)),
        r"zero_stage is 3, but single_part",
    ),
    "no groups": (3, RANK_0, _optimizer(lambda s: s.pop("fp32_flat_groups")), r"holds no flat fp32 groups"),
    "no optimizer": (2, RANK_0, lambda c: c.pop("optimizer_state_dict"), r"optimizer_state_dict should be a dict"),
    "group short": (2, RANK_0, _replace(0, lambda t: t[:-9]), r"rank_1.*group 0 has \d+ elements, that of .*rank_0"),
    "group short on both": (2, RANK_1, _replace(0, lambda t: t[:9]), r"'up\.bias'.* should end at element \d+ of flat"),
    "group long": (2, RANK_1, _replace(1, lambda t: t.repeat(3)), r"group 1 has \d+ elements, that of .* Do these"),
    "group missing": (2, RANK_1, _groups(lambda g: g.pop()), r"number of flat fp32 groups is 1, but in .* it is 2"),
    "group of numbers": (2, RANK_0, _replace(0, lambda t: 3), r"groups\[0\] should be a tensor, found int"),
    "group of ints": (
        2,
        RANK_0,
        _replace(0, lambda t: t.long()),
        r"groups\[0\] has dtype int64, expected floating point",
    ),
    "group of another dtype": (
        2,
        RANK_1,
        _replace(0, lambda t: t.half()),
        r"dtype of flat fp32 group 0 is float16, but in",
    ),
    "group of two dimensions": (2, RANK_0, _replace(0, lambda t: t[None]), r"groups\[0\] should be flat, found shape"),
    "group with steps": (2, RANK_0, _replace(0, lambda t: t[::2]), r"should be flat, found shape .* strides \[2\]"),
    "group sparse": (
        2,
        RANK_0,
        _replace(0, lambda t: t.to_sparse()),
        r"groups\[0\] should be a tensor, found an object",
    ),
    "share short": (3, RANK_1, _replace(0, lambda t: t[:-1]), r"rank_1.*elements of flat fp32 group 0 is \d+, but in"),
    "paddings": (
        2,
        RANK_0,
        _optimizer(lambda s: s.update(param_alignment_paddings=[[0], [0]])),
        r"param_alignment_padd",
    ),
    "shape longer": (
        2,
        MODEL,
        _shape("up.weight", torch.Size((99, 7))),
        r"'up\.weight' is stored with shape \[13, 7\], but p",
    ),
    "shape enormous": (
        3,
        SHARD_0,
        _shape("up.weight", torch.Size((2**40, 2**20))),
        r"shape of 'up\.weight' in param_sh",
    ),
    "shape overflow": (
        2,
        MODEL,
        _shape("up.weight", (2**63, 1)),
        r"param_shapes\['up\.weight'\] should be a number from 0",
    ),
    "shape negative": (
        2,
        MODEL,
        _shape("up.weight", (-13, 7)),
        r"param_shapes\['up\.weight'\] should be .*, found -13",
    ),
    "shape no shape": (
        2,
        MODEL,
        _shape("up.weight", "13x7"),
        r"param_shapes\['up\.weight'\] should be a shape, found str",
    ),
    "name no text": (2, MODEL, _shape("up.weight", (1,)), r"'up\.weight'"),
    "name twice": (
        2,
        MODEL,
        lambda c: c["param_shapes"][0].update(dict(c["param_shapes"][1])),
        r"number of parameters in each group is \[\d+, \d+\], but in .* it is",
    ),
    "no shapes": (2, MODEL, _set("param_shapes", None), r"param_shapes, which names ZeRO's fp32 weights"),
    "fewer groups": (2, MODEL, lambda c: c["param_shapes"].pop(), r"param_shapes has 1 groups, .* has 2"),
    "shapes disagree": (
        3,
        SHARD_1,
        _shape("up.weight", torch.Size((7, 13))),
        r"rank_1.*'up\.weight' .* is \[7, 13\], but in ",
    ),
    "names disagree": (
        3,
        SHARD_1,
        lambda c: c["param_shapes"].__setitem__(0, OrderedDict(reversed(c["param_shapes"][0].items()))),
        r"rank_1.*a name in param_shapes is '.*', but in .*rank_0",
    ),
    "steps disagree": (
        3,
        SHARD_1,
        _set("global_steps", 9),
        r"rank_1.*global_steps is 9, but in .*rank_0.* it is 1\. Do",
    ),
    "versions disagree": (3, SHARD_1, _set("ds_version", "0.1"), r"ds_version is 0\.1, but in .* it is 0\.19"),
    "frozen disagree": (
        3,
        SHARD_1,
        lambda c: c["frozen_param_shapes"].update({"base.bias": torch.Size((4,))}),
        r"shape of 'base\.bias' in frozen_param_shapes is \[4\], but in .* \[13\]",
    ),
    "frozen missing": (
        3,
        SHARD_1,
        lambda c: c["frozen_param_fragments"].pop("base.bias"),
        "in frozen_param_shapes but not in",
    ),
    "frozen part": (
        3,
        SHARD_1,
        lambda c: c["frozen_param_fragments"].update({"base.bias": torch.ones(5)}),
        r"'base\.bias' of shape \[13\] has a part of 5 elements, expected 7 on each of 2 ranks",
    ),
    "frozen shape": (
        2,
        MODEL,
        lambda c: c["frozen_param_fragments"].update({"base.bias": torch.ones(5)}),
        r"'base\.bias' is stored with shape \[5\], but frozen_param_shapes says \[13\]",
    ),
    "tie of a tie": (
        2,
        MODEL,
        lambda c: c["shared_params"].update(a="head.weight"),
        r"ties 'a' to 'head\.weight', which is an al",
    ),
    "tie no text": (
        2,
        MODEL,
        lambda c: c["shared_params"].update(a=3),
        r"a name in shared_params should be a string, found int",
    ),
    "no buffer names": (2, MODEL, lambda c: c.pop("buffer_names"), r"it has no buffer_names: not a model states file"),
    "no module": (2, MODEL, _set("module", None), r"pipeline parallelism"),
    "lazy buffer": (
        2,
        MODEL,
        lambda c: c["module"].update(table=torch.view_as_complex(torch.ones(5, 2)).conj()),
        r"module\['table'\] is a lazy tensor",
    ),
    "tensor parallel": (
        2,
        MODEL,
        _set("mp_world_size", 2),
        r"mp_world_size 2: tensor-parallel weights .*save_16bit_model",
    ),
    "expert parallel": (2, MODEL, _set("ds_autoep_layers", [{"a": 1}]), r"expert-parallel layers"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_that_cannot_be(zero_checkpoints: Saved, tmp_path: Path, name: str) -> None:
    stage, file, change, match = CONTENTS[name]
    folder = copy(zero_checkpoints, tmp_path, stage)
    edit(folder / file, change)
    if name == "group short on both":
        edit(folder / RANK_0, change)
    assert_refused(folder, match)


# --- files


def test_a_missing_rank(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = copy(zero_checkpoints, tmp_path, 3)
    (folder / RANK_1).unlink()
    assert_refused(folder, r"saved by 2 processes, 1 \*_optim_states\.pt files exist: that of rank 1 is missing")
    shutil.copy(folder / RANK_0, folder / RANK_1)
    (folder / SHARD_0).unlink()
    assert_refused(folder, r"1 \*_model_states\.pt files exist: that of rank 0 is missing")


def test_a_missing_model_file(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    (folder / MODEL).unlink()
    assert_refused(folder, r"mp_rank_00_model_states\.pt, which names the weights, is missing")


@pytest.mark.parametrize("stage", [2, 3])
def test_all_optimizer_files_missing(zero_checkpoints: Saved, tmp_path: Path, stage: int) -> None:
    folder = copy(zero_checkpoints, tmp_path, stage)
    for rank in range(2):
        (folder / OPTIMIZER.format(rank)).unlink()
    assert_refused(folder, r"fp32 weights are in \*_optim_states\.pt files, but no such file exists")


def test_a_file_of_an_earlier_save(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    shutil.copy(folder / RANK_1, folder / OPTIMIZER.format(2))
    assert_refused(folder, r"saved by 2 processes, but zero_pp_rank_2_.* exists, too, left from another save")


@pytest.mark.parametrize(
    ("file", "match"),
    [
        (f"bf16_{RANK_1}", r"bf16_zero_pp_rank_1.* and zero_pp_rank_1.* both belong to rank 1"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", r"belongs to model-parallel rank 1; tensor-parallel"),
        ("mp_rank_01_model_states.pt", r"belongs to model-parallel rank 1"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", r"is a file of mixture of experts"),
        ("layer_01-model_00-model_states.pt", r"is a file of pipeline parallelism"),
    ],
)
def test_files_of_other_parallelisms(zero_checkpoints: Saved, tmp_path: Path, file: str, match: str) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    shutil.copy(folder / RANK_1, folder / file)
    assert_refused(folder, match)


@pytest.mark.parametrize("file", [MODEL, RANK_1])
def test_files_cut_off_anywhere(zero_checkpoints: Saved, tmp_path: Path, file: str) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    data = (folder / file).read_bytes()
    for length in {*range(0, len(data), 331), len(data) - 1}:
        (folder / file).write_bytes(data[:length])
        for read in (lambda: merge_fsdp_weights(folder, tmp_path / "out"), lambda: inspect_checkpoint(folder)):
            with pytest.raises(CheckpointError, match=file):
                read()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"data_0": b"\0" * 8}, r"rank_0.*: tensor '.*': data/0 has 8 bytes, but data\.pkl says \d+ elements"),
        ({"data_0": None}, r"has no .*data/0"),
        ({"byteorder": b"big"}, r"byte order b'big'"),
    ],
)
def test_storages_that_cannot_be(zero_checkpoints: Saved, tmp_path: Path, members: Any, match: str) -> None:
    folder = copy(zero_checkpoints, tmp_path, 3)
    edit(folder / RANK_0, lambda content: content["optimizer_state_dict"].pop("optimizer_state_dict"))
    (folder / RANK_0).write_bytes(rebuild((folder / RANK_0).read_bytes(), **members))
    assert_refused(folder, match)


def test_a_compressed_file(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    (folder / MODEL).write_bytes(rebuild((folder / MODEL).read_bytes(), zipfile.ZIP_DEFLATED))
    assert_refused(folder, rf"{MODEL}: zip member .* is compressed, encrypted or duplicated")


def test_torchs_old_format(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    torch.save({"module": {}}, folder / MODEL, _use_new_zipfile_serialization=False)
    assert_refused(folder, rf"{MODEL}: saved in torch's old format, not as a zip")


# --- places


@pytest.mark.parametrize(
    ("tag", "match"),
    [
        ("../elsewhere", r"latest names the folder '\.\./elsewhere', which is not a plain path inside"),
        ("/etc", r"latest names the folder '/etc', which is not a plain path"),
        ("", r"latest names the folder '', which is not a plain path"),
        ("a\\b", r"not a plain path"),
        ("global_step9", r"latest names the folder 'global_step9', which does not exist"),
        ("empty", r"latest names the folder 'empty', which holds none of DeepSpeed's files"),
        ("link", r"latest names 'link', a link out of the folder to"),
        ("circle", r"latest names the folder 'circle', which does not exist"),
    ],
)
def test_a_bad_latest(zero_checkpoints: Saved, tmp_path: Path, tag: str, match: str) -> None:
    shutil.copytree(zero_checkpoints[0] / "stage 2, 2 processes", tmp_path / "in")
    zero_damage.copy(tmp_path / "in", tmp_path / "elsewhere")
    (tmp_path / "in/empty").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/circle").symlink_to("circle")
    (tmp_path / "in/latest").write_text(tag)
    assert_refused(tmp_path / "in", match)


def test_a_link_out_of_the_folder(zero_checkpoints: Saved, tmp_path: Path) -> None:
    folder = copy(zero_checkpoints, tmp_path, 2)
    shutil.move(folder / RANK_1, tmp_path / "other.pt")
    (folder / RANK_1).symlink_to(tmp_path / "other.pt")
    assert_refused(folder, r"names the file '.*', a link out of the checkpoint's folder")


def test_several_tags_without_latest(zero_checkpoints: Saved, tmp_path: Path) -> None:
    copy(zero_checkpoints, tmp_path / "in", 2)
    (tmp_path / "in/in").rename(tmp_path / "in/step1")
    assert merge_fsdp_weights(tmp_path / "in", tmp_path / "out").num_tensors == 14
    shutil.copytree(tmp_path / "in/step1", tmp_path / "in/step2")
    with pytest.raises(CheckpointError, match=r"holds several checkpoints: step1, step2\. Pass one of these folders"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")


# --- universal checkpoints


UNIVERSAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), r"'up\.bias' needs the file 'zero/up\.bias/fp32\.pt', not found"),
    "another size": (
        lambda path: torch.save(torch.ones(3), path),
        r"fp32\.pt: tensor 'up\.bias' is stored with shape \[3\], but param_shapes says \[13\]",
    ),
    "no tensor": (lambda path: torch.save({"param": 3}, path), r"expected one floating-point tensor, found int"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:100]), r"up\.bias/fp32\.pt"),
}


@pytest.mark.parametrize("name", UNIVERSAL)
def test_universal_files_that_cannot_be(zero_universal: Path, tmp_path: Path, name: str) -> None:
    change, match = UNIVERSAL[name]
    shutil.copytree(zero_universal / "2", tmp_path / "in")
    change(tmp_path / "in/zero/up.bias/fp32.pt")
    assert_refused(tmp_path / "in", match)


def test_a_universal_name_that_leads_elsewhere(zero_universal: Path, tmp_path: Path) -> None:
    shutil.copytree(zero_universal / "2", tmp_path / "in")
    edit(tmp_path / "in" / MODEL, lambda content: content["param_shapes"][0].update({"../../x": torch.Size((1,))}))
    assert_refused(tmp_path / "in", r"names the file 'zero/\.\./\.\./x/fp32\.pt', which is not a plain path inside")
