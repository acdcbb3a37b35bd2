"""Pickles from strangers: none of them runs anything, all of them end in CheckpointError."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest

from accelight.checkpoint import CheckpointError, merge_fsdp_weights
from accelight.checkpoint.formats.dcp_metadata import read_dcp_metadata
from accelight.checkpoint.formats.safe_unpickler import CheckedDict, SafeCall, Sealed, load_restricted
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


def test_nested_keys_are_refused_in_every_dict() -> None:
    """Also where the tuple is fetched from the memo, and in an OrderedDict."""
    nested = b"\x80\x04))\x85\x85q\x00"
    for target in (b"}", b"ccollections\nOrderedDict\n)R", b"}q\x010h\x01"):
        with pytest.raises(CheckpointError, match="nested tuple as a key"):
            load_restricted(nested + target + b"h\x00Ns.", {("collections", "OrderedDict"): CheckedDict}, "it")


def test_keys_that_are_no_names() -> None:
    value = {3: "a", 2**70: "b", 0.5: "c", (1, "x"): "d", None: "e", True: "f"}
    assert load_restricted(pickle.dumps(value), {}, "it") == value
    many = {(number,): None for number in range(10_001)}
    with pytest.raises(CheckpointError, match="more than 10000 keys that are not strings"):
        load_restricted(pickle.dumps(many), {}, "it")
    with pytest.raises(CheckpointError, match="a tuple of 1001 elements as a key"):
        load_restricted(pickle.dumps({(None,) * 1001: None}), {}, "it")


def test_the_dicts_opcode_in_text_and_numbers_stays() -> None:
    """The scan replaces opcodes, and no operand that has their value."""
    value = {"}": ["}" * 300, "}" * 20_000, 0x7D, 0x7D7D, 0x7D7D7D7D, 0x7D7D7D7D7D, 2**800 + 0x7D, {"}}": {}}]}
    for protocol in (2, 3, 4, 5):
        assert load_restricted(pickle.dumps(value, protocol), {}, "it") == value


@pytest.mark.parametrize(
    ("pickled", "match"),
    [
        (b"\x80\x04Nr\xff\xff\xff\x0f.", "has 9 bytes and puts entry 268435455 into its memo"),
        (b"\x80\x04N2\x86.", r"opcode b'2' at byte 3 is unknown"),
        (b"\x80\x04\x8f.", r"opcode b'\\x8f' at byte 2 is unknown"),
        (b"\x80\x04(d.", r"opcode b'd' at byte 3 is unknown"),
        (b"\x80\x05\x97.", r"opcode b'\\x97' at byte 2 is unknown"),
        (b"\x80\x04\x8c\x05a.", "cut off after 6 bytes"),
        (b"\x80\x04J\1\1", "cut off after 5 bytes"),
        (b"\x80\x04h\x05.", "not a readable pickle"),
    ],
)
def test_opcodes_that_are_not_admitted(pickled: bytes, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_restricted(pickled, {}, "it")


def test_an_opcode_over_the_end_of_a_frame() -> None:
    """The C unpickler skips what is left of a frame, so that opcodes could hide in what looks like text."""
    pickled = b"\x80\x04\x95" + (7).to_bytes(8, "little") + text(b"ab" + b"c" * 18) + b"."
    with pytest.raises(pickle.UnpicklingError, match="truncated"):
        pickle.load(io.BytesIO(pickled))
    assert load_restricted(pickled, {}, "it") == "ab" + "c" * 18


def test_an_error_beside_a_deep_stack() -> None:
    with pytest.raises(CheckpointError, match="asks for os"):
        load_restricted(b"\x80\x04" + b")0" + b"))\x86" * 2000 + b"cos\nsystem\n.", {}, "it")


def test_what_was_found_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"it: the pickle asks for nt\.system, which is not allowed in a checkpoint"
    ):
        load_restricted(b"cnt\nsystem\n.", {}, "it")


def test_outside_data_is_refused() -> None:
    with pytest.raises(CheckpointError, match="refers to external data"):
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
    with pytest.raises(CheckpointError, match="has protocol 16, which is not allowed"):
        load_restricted(b"\x80\x10N.", {}, "it")


def test_a_frame_that_is_longer_than_the_pickle() -> None:
    frame = b"\x80\x04\x95" + (2).to_bytes(8, "little")
    assert load_restricted(frame + b"N.", {}, "it") is None
    with pytest.raises(CheckpointError, match="it: the pickle is cut off after 12 bytes, or damaged"):
        load_restricted(frame + b".", {}, "it")
    with pytest.raises(pickle.UnpicklingError, match="truncated"):
        pickle.loads(frame + b".")
