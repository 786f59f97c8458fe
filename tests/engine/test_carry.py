"""What is packed for a machine without a package index: device code of one GPU, and nothing else is lost."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import carry


def image(kind: int, capability: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", capability)
    return head.ljust(64, b"\0") + code


def fatbin(*found: bytes) -> bytes:
    body = b"".join(found)
    return struct.pack("<IHHQ", carry.MAGIC, 1, 16, len(body)) + body


SM80, SM90 = (image(carry.MACHINE_CODE, n, b"code%d!!" % n) for n in (80, 90))
PTX80, PTX90, PTX100 = (image(carry.PTX, n, b"text%d" % n) for n in (80, 90, 100))


@pytest.mark.parametrize(
    ("found", "ptx", "kept"),
    [
        ((SM80, SM90, PTX90), True, {b"code90!!"}),
        ((SM80, PTX80, PTX90, PTX100), True, {b"text90"}),
        ((SM80, PTX80, PTX90, PTX100), False, set()),
        ((SM80, PTX100), True, set()),
    ],
)
def test_code_of_other_gpus_becomes_zeros_and_sizes_stay(found, ptx, kept):
    before = b"host code" + fatbin(*found) + b"more" + fatbin(SM80, SM90) + b"end"
    library = bytearray(before)
    zeroed = carry.keep_only(library, 90, ptx)
    assert len(library) == len(before)
    assert library.startswith(b"host code")
    assert library.endswith(b"end")
    first = library[: library.index(b"more")]
    every = {b"code80!!", b"code90!!", b"text80", b"text90", b"text100"}
    assert {code for code in every if code in first} == kept
    assert b"code90!!" in library[len(first) :]
    assert zeroed == sum(a != 0 and b == 0 for a, b in zip(before, library, strict=True))


def test_a_number_that_only_looks_like_a_fatbin_changes_nothing():
    library = bytearray(b"x" * 8 + struct.pack("<IHHQ", carry.MAGIC, 1, 16, 2**40) + b"host code" * 9)
    before = bytes(library)
    assert carry.keep_only(library, 90) == 0
    assert library == before


def test_every_file_is_in_one_part_and_parts_are_of_a_size(tmp_path, monkeypatch):
    monkeypatch.setattr(carry, "PART_BYTES", 100)
    for number in range(9):
        (tmp_path / f"{number}.py").write_bytes(bytes(40))
    groups = carry.parts(tmp_path)
    assert sorted(path.name for group in groups for path in group) == [f"{n}.py" for n in range(9)]
    assert [len(group) for group in groups] == [3, 2, 3, 1]
