"""Pack what a GPU machine that reaches no package index needs, and compile here what would take it long.

A part is a folder below ``--to`` that travels by itself: its packed files, ``setup.sh`` and ``env``.

- ``engine``: a vLLM and what ``vllm.LLM`` imports, for ``staleproof engine``; with ``--serve`` also what
  ``vllm serve`` imports.
- ``vllm``, ``flashinfer``, ``moe``: what all findings and the benchmarks ask. ``findings`` is these three.
- ``routers``: two more peers of ``benchmarks/topk.py``.
- ``audit-vllm``, ``audit-rest``: the releases that ``staleproof audit`` asks. ``audit`` is these two.

Kept is the device code of one GPU. Where there is none, the engine keeps PTX, which the driver compiles at
the first call; ``--no-ptx`` drops that too, and with it Marlin's kernels. The machine has torch (the release
that vLLM pins), Triton, transformers and what these bring; for the engine also aiohttp, OpenCV,
prometheus_client, protobuf, sentencepiece and tiktoken.

Run: ``python tools/offline/bundle.py findings --to FOLDER``, here. FOLDER also gets ``kept``, which stays:
downloads, the compiler and each module as it is done. Stopped and called again, it goes on where it was, and
a part made from the same versions is not made again. Then on the GPU machine, in the checkout::

    export PYTHONPATH=$PWD/src
    for part in vllm flashinfer moe; do sh FOLDER/$part/setup.sh SITE/$part && . SITE/$part/env; done
"""

from __future__ import annotations

import argparse
import fcntl
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NoReturn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import compiled
from parts import GROUPS, PARTS, PINS, Order, Part, engine, environment, listed, make, once

PART_BYTES = 24 * 2**20
SETUP = """#!/bin/sh
# setup.sh SITE: unpack all parts beside this file to SITE, one process each; then `. SITE/env`.
set -e
mkdir -p "$1"
here=$(cd "$(dirname "$0")" && pwd)
site=$(cd "$1" && pwd)
# Processes that make the same folder at once: extractall would fail for one of them.
unpack='
import os, sys, tarfile
with tarfile.open(sys.argv[1]) as packed:
    for one in packed:
        os.makedirs(os.path.join(sys.argv[2], os.path.dirname(one.name)), exist_ok=True)
        packed.extract(one, sys.argv[2], filter="fully_trusted")
'
started=
for part in "$here"/part*.tar.xz; do python3 -c "$unpack" "$part" "$site" & started="$started $!"; done
for each in $started; do wait "$each"; done
{ echo "CARRIED='$site'"; cat "$here/env"; } > "$site/env"
"""


def env(part: Part) -> str:
    """The lines that set a part's variables, with its folder in ``$CARRIED``."""
    lines = []
    for name, value in part.env.items():
        before = f"${{{name}:+${name}:}}" if name in ("PYTHONPATH", "LD_LIBRARY_PATH") else ""
        lines.append(f'export {name}="{before}{value.replace("SITE", "$CARRIED", 1)}"')
    return "".join(f"{line}\n" for line in lines)


def groups(site: Path) -> list[list[Path]]:
    """All files in groups that take about as long to unpack: a large library is one by itself."""
    found: defaultdict[int, list[Path]] = defaultdict(list)
    filled = 0
    for path in sorted(p for p in site.rglob("*") if p.is_file()):
        found[filled // PART_BYTES].append(path)
        filled += path.stat().st_size
    return [*found.values()]


def pack(site: Path, folder: Path) -> None:
    """Write the packed files and ``setup.sh``."""

    def one(numbered: tuple[int, list[Path]]) -> None:
        number, files = numbered
        with tarfile.open(folder / f"part{number}.tar.xz", "w:xz", preset=9) as archive:
            for file in files:
                archive.add(file, file.relative_to(site))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, enumerate(groups(site))))
    (folder / "setup.sh").write_text(SETUP)


def told(part: Part, order: Order) -> object:
    """All that a part is made from: versions and arguments."""
    asked = [listed(wanted) for wheels in part.wheels for wanted in wheels.wanted]
    plain = part._replace(more=None), order._replace(kept=Path(), ptx=order.ptx and part.ptx is None)
    return asked, plain, SETUP, PART_BYTES


def bundled(name: str, part: Part, order: Order, to: Path) -> None:
    """Make one part, unless it is there."""

    def packed(folder: Path) -> None:
        site = order.kept / "site"
        # Of a call that was stopped.
        shutil.rmtree(site, ignore_errors=True)
        make(part, order, site)
        pack(site, folder)
        (folder / "env").write_text(env(part))
        shutil.rmtree(site)

    folder = once(to / name, told(part, order), packed)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 2**20:.1f} MiB", flush=True)


def _refuse(text: str, code: int = 2) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(code)


def _checked(names: Sequence[str], given: argparse.Namespace) -> dict[str, Part]:
    """The parts asked for, in the order in which they are made; nothing is downloaded before."""
    table = PARTS | {"engine": engine(given.vllm, given.serve)}
    for name in names:
        if name not in table and name not in GROUPS:
            _refuse(f"{name}: no such part; there are {', '.join([*table, *GROUPS])}")
    wanted = {part for name in names for part in GROUPS.get(name, (name,))}
    parts = {name: part for name, part in table.items() if name in wanted}
    compiles = [name for name, part in parts.items() if part.compiles]
    if compiles and given.gpu != compiled.CAPABILITY:
        _refuse(f"--gpu {given.gpu}: {', '.join(compiles)} can be compiled for {compiled.CAPABILITY} only")
    for program in ("strip", *(("cc", "c++") if compiles else ())):
        if shutil.which(program) is None:
            _refuse(f"{program} was not found on PATH")
    return parts


def _locked(to: Path) -> IO[str]:
    """A file that says, while it is open, that this process works in the folder."""
    try:
        (to / "kept").mkdir(parents=True, exist_ok=True)
        lock = (to / "kept" / "lock").open("w")
    except OSError as error:
        _refuse(f"--to {to}: cannot be written: {error.strerror}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        _refuse(f"--to {to}: another process works there")
    return lock


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", metavar="PART", help=", ".join([*PARTS, *GROUPS]))
    parser.add_argument("--to", type=Path, required=True, help="the folder of the parts")
    parser.add_argument("--vllm", choices=[*PINS], default="0.22.1", help="the engine's release")
    parser.add_argument("--serve", action="store_true", help="also what `vllm serve` imports")
    parser.add_argument("--gpu", type=int, default=90, help="compute capability of that machine, e.g. 90")
    parser.add_argument("--no-ptx", action="store_true", help="no kernels that the driver would compile")
    parser.add_argument("--python", default="3.12", help="its Python")
    given = parser.parse_args(arguments)
    # Compilations run in folders of their own.
    given.to = given.to.resolve()
    order = Order(given.to / "kept", given.gpu, given.python, not given.no_ptx)
    parts = _checked(given.parts, given)
    with _locked(given.to):
        for name, part in parts.items():
            try:
                bundled(name, part, order, given.to)
            except subprocess.CalledProcessError as error:
                # It has said why itself.
                _refuse(f"{name}: {shlex.join(map(str, error.cmd))}: exit code {error.returncode}", 1)
            except environment.UnavailableError as error:
                _refuse(f"{name}: {error}", 1)


if __name__ == "__main__":
    main()
