"""The device code inside a compiled library: what is there for which GPU, and leaving out all but one's.

A wheel of vLLM holds device code for ten GPUs or so. Left-out code is overwritten with zeros, which pack to
almost nothing: the library keeps its size and all offsets in it.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC, PTX, MACHINE_CODE = 0xBA55ED50, 1, 2
# How the bytes of an image are compressed, from its header.
LZ4, ZSTD = 0x2000, 0x8000
_NAME = re.compile(rb"\.text\.([A-Za-z0-9_$.]+)")


class Image(NamedTuple):
    """Device code for one GPU inside a fatbin: position and size of its bytes, kind, capability, header."""

    at: int
    size: int
    kind: int
    capability: int
    header: int


def images(library: bytes | bytearray) -> Iterator[list[Image]]:
    """The images of each fatbin in a library, found by their magic number.

    A fatbin has a header (magic, version, header size, bytes behind it) and then one image after another,
    each with a header of its own (kind, version, header size, size, ..., capability at byte 28).
    """
    magic = struct.pack("<I", MAGIC)
    at = library.find(magic)
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, at)
        found, image, end = [], at + header, at + header + size
        while header == 16 and image + 32 <= end <= len(library):
            kind, _, own, length = struct.unpack_from("<HHIQ", library, image)
            if own == 0:
                break
            capability = struct.unpack_from("<I", library, image + 28)[0]
            found.append(Image(image + own, length, kind, capability, image))
            image += own + length
        if found:
            yield found
        at = library.find(magic, max(end if found else 0, at + 4))


def keep_only(
    library: bytearray, capability: int, ptx: bool = True, wanted: Callable[[str], object] | None = None
) -> int:
    """Overwrite the device code of other GPUs with zeros, and return how many bytes that were.

    PTX is kept only where a fatbin has no machine code for this GPU and PTX not newer than it, and only if
    ``ptx``: the driver compiles that at the first call.

    Args:
        library: the bytes of a compiled library, changed in place.
        capability: of the GPU, e.g. 90.
        ptx: whether to keep PTX where there is no machine code.
        wanted: takes the name of a kernel: a fatbin none of whose kernels is wanted is left out whole. One
            without kernels is kept.
    """
    zeroed = 0
    for found in images(library):
        exact = [x for x in found if x.kind == MACHINE_CODE and x.capability == capability]
        older = [x for x in found if ptx and x.kind == PTX and x.capability <= capability]
        kept = exact or sorted(older, key=lambda x: x.capability)[-1:]
        if kept and wanted is not None:
            # PTX holds the kernels of the machine code beside it.
            code = exact or [x for x in found if x.kind == MACHINE_CODE][:1]
            names = set[str]().union(*(kernels(library, image) for image in code))
            if names and not any(map(wanted, names)):
                kept = []
        for image in found:
            if image not in kept:
                library[image.at : image.at + image.size] = bytes(image.size)
                zeroed += image.size
    return zeroed


def kernels(library: bytes | bytearray, image: Image) -> set[str]:
    """The names of the kernels in an image of machine code, as its sections are named."""
    return {name.decode() for name in _NAME.findall(_unpacked(library, image))}


def _unpacked(library: bytes | bytearray, image: Image) -> bytes:
    code = bytes(library[image.at : image.at + image.size])
    if image.at - image.header < 64:
        return code
    packed = struct.unpack_from("<I", library, image.header + 16)[0] or image.size
    flags, size = (struct.unpack_from("<Q", library, image.header + at)[0] for at in (40, 56))
    # Neither is part of Python before 3.14, and only the audit's libraries are cut by kernel.
    if flags & ZSTD:
        import zstandard

        return zstandard.ZstdDecompressor().decompress(code[:packed], max_output_size=size)
    if flags & LZ4:
        import lz4.block

        return lz4.block.decompress(code[:packed], uncompressed_size=size)
    return code


def reduce(
    path: Path, capability: int, ptx: bool, wanted: Callable[[str], object] | None = None
) -> tuple[int, int]:
    """Leave one GPU's code in a library on disk; return its size, and how much of that is needed."""
    library = bytearray(path.read_bytes())
    zeroed = keep_only(library, capability, ptx, wanted)
    path.write_bytes(library)
    # Symbols that the loader does not need.
    subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
    return len(library), len(library) - zeroed
