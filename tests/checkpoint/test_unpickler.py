"""Pickles from strangers: none of them runs anything, all of them end in CheckpointError."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from accelight.checkpoint import CheckpointError, merge_fsdp_weights
from accelight.checkpoint.formats.dcp_metadata import read_dcp_metadata
from accelight.checkpoint.formats.safe_unpickler import SafeCall, Sealed, load_restricted
from tests.checkpoint import damage
from tests.checkpoint.hostile import NAMES, hostile, text


@pytest.mark.parametrize("name", NAMES)
def test_hostile_metadata(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    marker = tmp_path / "marker"
    (tmp_path / "in/.metadata").write_bytes(hostile(f"touch {marker}".encode())[name])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        merge_fsdp_weights(tmp_path / "in", tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
def test_hostile_record(tmp_path: Path, name: str) -> None:
    folder = damage.good(tmp_path / "in")
    marker = tmp_path / "marker"
    pickled = hostile(f"touch {marker}".encode())[name]
    damage.replace_record(folder, "model.a", damage.rebuild(damage.record_of(folder, "model.a"), data_pkl=pickled))
    with pytest.raises(CheckpointError, match=r"other\.distcp: tensor 'model\.a'"):
        merge_fsdp_weights(folder, tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_hostile_pickles_leave_the_reader_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    for pickled in hostile(b"true").values():
        path.write_bytes(pickled)
        with pytest.raises(CheckpointError):
            read_dcp_metadata(path)
    damage.good(tmp_path / "in")
    merge_fsdp_weights(tmp_path / "in", tmp_path / "out", verify=True)


def test_an_extension_code_in_the_processs_cache(tmp_path: Path) -> None:
    """The C unpickler takes cached extension codes without asking find_class; none may get that far."""
    import copyreg
    import os

    copyreg.add_extension("os", "system", 77)
    try:
        pickle.loads(pickle.dumps(os.system, protocol=2))  # fills the cache
        with pytest.raises(CheckpointError, match=r"opcode b'\\x82'"):
            load_restricted(b"\x80\x02\x82\x4d.", {}, "it")
    finally:
        copyreg.remove_extension("os", "system", 77)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize("num_levels", [1, 10_000])
def test_nested_keys_are_refused(num_levels: int) -> None:
    """A dict key that is a tuple in a tuple in a tuple: hashing it recurses in C."""
    with pytest.raises(CheckpointError, match="nested tuple as a key"):
        load_restricted(b"\x80\x04})\x85" + b"\x85" * num_levels + b"Ns.", {}, "it")


def test_an_error_beside_a_deep_stack() -> None:
    with pytest.raises(CheckpointError, match="asks for os"):
        load_restricted(b"\x80\x04" + b")0" + b"))\x86" * 2000 + b"cos\nsystem\n.", {}, "it")


def test_what_was_found_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"it: the pickle asks for nt\.system, which is not on the list"):
        load_restricted(b"cnt\nsystem\n.", {}, "it")


def test_outside_data_is_refused() -> None:
    with pytest.raises(CheckpointError, match="refers to outside data"):
        load_restricted(b"\x80\x04NQ.", {}, "it")


def test_sealed_things_stay_as_they_are() -> None:
    class One(metaclass=Sealed):
        pass

    with pytest.raises(TypeError, match="One is sealed"):
        One.x = 3
    fn = SafeCall(int)
    with pytest.raises(TypeError, match="sealed"):
        fn.x = 3
    with pytest.raises(TypeError, match="sealed"):
        fn.__setstate__({})


def test_an_error_is_one_line_of_printable_text() -> None:
    """A name from a checkpoint may neither break the line nor reach the terminal as a command."""
    with pytest.raises(CheckpointError, match=r"asks for a\\nb\.\\x1b\[2Jc, which"):
        load_restricted(text(b"a\nb") + text(b"\x1b[2Jc") + b"\x93.", {}, "it")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_out_as_they_went_in(protocol: int) -> None:
    """Numbers of every width, text of every length, containers of every size, and what is fetched from the memo."""
    shared = [1, (2, 3)]
    value = {
        "numbers": [0, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**63), 2**100, 0.5, True, False, None],
        "text": ["", "a", "\u00e4" * 200, "b" * 70_000],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "lists": [[], [1], list(range(2000))],
        "dicts": [{}, {"a": 1}, {str(number): number for number in range(2000)}],
        "shared": [shared, shared, {"again": shared}],
    }
    found = load_restricted(pickle.dumps(value, protocol=protocol), {}, "it")
    assert found == value
    assert isinstance(found, dict)
    assert found["shared"][0] is found["shared"][2]["again"]


def test_a_protocol_of_the_future_is_refused() -> None:
    """As CPython and torch refuse it: what its opcodes mean is not known."""
    with pytest.raises(CheckpointError, match="is of protocol 16, which it may not"):
        load_restricted(b"\x80\x10N.", {}, "it")


def test_a_frame_that_is_longer_than_the_pickle() -> None:
    frame = b"\x80\x04\x95" + (2).to_bytes(8, "little")
    assert load_restricted(frame + b"N.", {}, "it") is None
    with pytest.raises(CheckpointError, match="it: the pickle is cut off after 12 bytes, or damaged"):
        load_restricted(frame + b".", {}, "it")
    with pytest.raises(pickle.UnpicklingError, match="truncated"):
        pickle.loads(frame + b".")
