"""Pack a vLLM, and what it imports, for a GPU machine that reaches no package index.

A wheel of vLLM holds device code for ten GPUs or so; kept is that of one compute capability. Where there is
none, PTX is kept, which the driver compiles at the first call; ``--no-ptx`` drops that too, and with it
Marlin's kernels. ``deep_gemm``, FlashAttention 2 and the HTTP front end's static pages are left out: the
questions of ``staleproof engine`` call none of all these. The machine has torch (the release that vLLM
pins), Triton, transformers and what these bring; everything else that ``vllm.LLM`` imports is packed, and
this checkout with the plugin's entry point.

Run: ``python tests/engine/carry.py 0.22.1 --to FOLDER``, here; then on the GPU machine
``sh FOLDER/setup.sh SITE && PYTHONPATH=SITE python -m staleproof engine mla``.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Where vLLM's own pins stop the import of another package, or several releases answer.
PINS = {
    "0.22.1": ("compressed-tensors==0.15.0.1", "humming-kernels==0.1.2", "xgrammar==0.2.8"),
    "0.26.0": ("compressed-tensors==0.17.0", "humming-kernels==0.1.10", "xgrammar==0.2.8"),
}
WHEELS = Path(__file__).with_name("carried.txt")
LEFT_OUT = (
    "vllm-rs*",
    "**/third_party/deep_gemm",
    "**/*_vllm_fa2_C*",
    "**/entrypoints/**/static",
    "**/__pycache__",
)
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
PART_BYTES = 24 * 2**20
MAGIC, PTX, MACHINE_CODE = 0xBA55ED50, 1, 2
SETUP = """#!/bin/sh
# setup.sh SITE: unpack all parts beside this file to SITE, one process each.
set -e
mkdir -p "$1"
unpack='import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="fully_trusted")'
for part in "$(dirname "$0")"/part*.tar.xz; do python3 -c "$unpack" "$part" "$1" & done
wait
"""


class Image(NamedTuple):
    """Device code for one GPU inside a fatbin: position and size of its bytes, kind, capability."""

    at: int
    size: int
    kind: int
    capability: int


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
            found.append(Image(image + own, length, kind, struct.unpack_from("<I", library, image + 28)[0]))
            image += own + length
        if found:
            yield found
        at = library.find(magic, max(end if found else 0, at + 4))


def keep_only(library: bytearray, capability: int, ptx: bool = True) -> int:
    """Overwrite the device code of other GPUs with zeros, and return how many bytes that were.

    PTX is kept only where a fatbin has no machine code for this GPU and PTX not newer than it, and only if
    ``ptx``: the driver compiles that at the first call.
    """
    zeroed = 0
    for found in images(library):
        exact = [x for x in found if x.kind == MACHINE_CODE and x.capability == capability]
        older = [x for x in found if ptx and x.kind == PTX and x.capability <= capability]
        kept = exact or sorted(older, key=lambda x: x.capability)[-1:]
        for image in found:
            if image not in kept:
                library[image.at : image.at + image.size] = bytes(image.size)
                zeroed += image.size
    return zeroed


def fetch(folder: Path, python: str, *wanted: str) -> None:
    """Download wheels for another machine: Linux on x86-64, this Python."""
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, "-d", str(folder), *wanted]
    subprocess.run(command, check=True)


def unpack(wheels: Path, site: Path, capability: int, ptx: bool) -> None:
    """Unpack all wheels into one folder, and leave out what is not needed there."""
    for wheel in sorted(wheels.glob("*.whl")):
        shutil.unpack_archive(wheel, site, "zip")
    for pattern in LEFT_OUT:
        for path in [*site.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (site / "vllm").rglob("*.so"):
        library = bytearray(path.read_bytes())
        zeroed = keep_only(library, capability, ptx)
        path.write_bytes(library)
        # Symbols that the loader does not need.
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
        size, left = (f"{count / 2**20:.0f} MiB" for count in (len(library), len(library) - zeroed))
        print(f"{path.relative_to(site)}: {size}, of which {left} are needed there")


def parts(site: Path) -> list[list[Path]]:
    """All files in groups that take about as long to unpack: a large library is one by itself."""
    groups: defaultdict[int, list[Path]] = defaultdict(list)
    filled = 0
    for path in sorted(p for p in site.rglob("*") if p.is_file()):
        groups[filled // PART_BYTES].append(path)
        filled += path.stat().st_size
    return [*groups.values()]


def pack(site: Path, folder: Path) -> None:
    """Write the parts and ``setup.sh``."""

    def one(numbered: tuple[int, list[Path]]) -> None:
        number, files = numbered
        with tarfile.open(folder / f"part{number}.tar.xz", "w:xz", preset=9) as archive:
            for file in files:
                archive.add(file, file.relative_to(site))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, enumerate(parts(site))))
    (folder / "setup.sh").write_text(SETUP)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", choices=[*PINS], help="the release of vLLM")
    parser.add_argument("--to", type=Path, required=True, help="a new folder for the parts")
    parser.add_argument("--gpu", type=int, default=90, help="compute capability of that machine, e.g. 90")
    parser.add_argument("--no-ptx", action="store_true", help="no kernels that the driver would compile")
    parser.add_argument("--python", default="3.12", help="its Python")
    given = parser.parse_args()
    given.to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        wheels, site = Path(place, "wheels"), Path(place, "site")
        fetch(wheels, given.python, f"vllm=={given.version}", *PINS[given.version], "-r", str(WHEELS))
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)]
        subprocess.run(command, check=True)
        unpack(wheels, site, given.gpu, not given.no_ptx)
        pack(site, given.to)
    size = sum(path.stat().st_size for path in given.to.iterdir())
    print(f"{given.to}: {size / 2**20:.1f} MiB; there: sh setup.sh SITE && export PYTHONPATH=SITE")


if __name__ == "__main__":
    main()
