"""The device code of one GPU is kept in a library, and nothing else of it is lost."""

from __future__ import annotations

import _ctypes
import ctypes
import re
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "offline"))

import device_code


def image(kind: int, capability: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", capability)
    return head.ljust(64, b"\0") + code


def fatbin(*found: bytes) -> bytes:
    body = b"".join(found)
    return struct.pack("<IHHQ", device_code.MAGIC, 1, 16, len(body)) + body


SM80, SM90 = (image(device_code.MACHINE_CODE, n, b"code%d!!" % n) for n in (80, 90))
PTX80, PTX90, PTX100 = (image(device_code.PTX, n, b"text%d" % n) for n in (80, 90, 100))


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
    zeroed = device_code.keep_only(library, 90, ptx)
    assert len(library) == len(before)
    assert library.startswith(b"host code")
    assert library.endswith(b"end")
    first = library[: library.index(b"more")]
    every = {b"code80!!", b"code90!!", b"text80", b"text90", b"text100"}
    assert {code for code in every if code in first} == kept
    assert b"code90!!" in library[len(first) :]
    assert zeroed == sum(a != 0 and b == 0 for a, b in zip(before, library, strict=True))


def test_a_number_that_only_looks_like_a_fatbin_changes_nothing():
    library = bytearray(b"x" * 8 + struct.pack("<IHHQ", device_code.MAGIC, 1, 16, 2**40) + b"host code" * 9)
    before = bytes(library)
    assert device_code.keep_only(library, 90) == 0
    assert library == before


def elf(*names: str) -> bytes:
    """As much of machine code as tells the names of its kernels."""
    return b"".join(b".text.%s\0" % name.encode() for name in names).ljust(64, b"!")


def test_fatbins_without_a_wanted_kernel_are_left_out_and_those_without_kernels_are_kept():
    wanted, other = (fatbin(image(device_code.MACHINE_CODE, 90, elf(name))) for name in ("topk", "gemm"))
    plain = fatbin(image(device_code.MACHINE_CODE, 90, b"data only"))
    library = bytearray(wanted + other + plain)
    device_code.keep_only(library, 90, wanted=re.compile("top").search)
    assert b"topk" in library
    assert b"gemm" not in library
    assert b"data only" in library


def test_ptx_has_the_kernels_of_the_machine_code_beside_it():
    code = [image(device_code.MACHINE_CODE, 80, elf(name)) for name in ("topk", "gemm")]
    texts = [image(device_code.PTX, 80, text) for text in (b"text of topk", b"text of gemm")]
    library = bytearray(b"".join(fatbin(*pair) for pair in zip(code, texts, strict=True)))
    device_code.keep_only(library, 90, wanted=re.compile("top").search)
    assert b"text of topk" in library
    assert b"text of gemm" not in library
    assert b".text." not in library


def test_a_library_on_disk_stays_one_that_loads(tmp_path):
    library = tmp_path / "library.so"
    library.write_bytes(Path(_ctypes.__file__).read_bytes() + fatbin(SM80, SM90))
    size, left = device_code.reduce(library, 90, ptx=False)
    assert size - left == len(b"code80!!")
    ctypes.CDLL(str(library))
