"""Which releases of vLLM are known, and what their recorded probes say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleproof.vllm.sources import PatchError, numbers

if TYPE_CHECKING:
    from staleproof.vllm.patch import Patch

# What the probes say of each release's source distribution; written by tools/vllm_table.py.
TABLE = Path(__file__).with_name("versions.json")
# A version: its release, and what follows it.
VERSION = re.compile(r"(\d+(?:\.\d+)*)(.*)")
# What upstream appends to a release that it publishes for one platform.
PLATFORM = re.compile(r"(\+(cu\d+|cpu))?")


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return release -> patch -> ``needed`` and ``why``, as recorded from source distributions.

    Raises:
        PatchError: the file is missing or broken.

    >>> table()["0.20.2"]["decode_buffer"]["needed"]
    False
    """
    try:
        found = json.loads(TABLE.read_text(encoding="utf-8"))["releases"]
        if not all(isinstance(row["needed"], bool) for rows in found.values() for row in rows.values()):
            raise ValueError("a row is incomplete")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PatchError(f"{TABLE} is broken ({error}); install staleproof again") from error
    return dict(found)


def applies_to(patch: Patch) -> str:
    """Return the releases of the table that need a patch and get it.

    >>> from staleproof.vllm.plugin import patches
    >>> applies_to(patches()["scale_padding"])
    '0.18.0 to 0.19.1, 0.22.0 to 0.24.0, 0.30.0 to 0.33.0'
    """
    return spans(
        [name for name, row in table().items() if row[patch.name]["needed"] and patch.applies_to(name)]
    )


def spans(names: Iterable[str]) -> str:
    """Releases of the table, in its order, as spans of successive ones.

    >>> spans(["0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.2"])
    '0.18.0 to 0.19.1, 0.20.2'
    """
    place = {name: number for number, name in enumerate(table())}
    found: list[list[str]] = []
    for name in names:
        if found and place[name] == place[found[-1][-1]] + 1:
            found[-1].append(name)
        else:
            found.append([name])
    return ", ".join(part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in found)


def neighbours(version: str) -> tuple[str | None, str | None]:
    """Return the last known release up to a version, and the first one after it.

    >>> neighbours("0.20.3"), neighbours("99.0"), neighbours("main")
    (('0.20.2', '0.21.0'), ('0.33.0', None), (None, None))
    """
    wanted = numbers(version)
    known = [*table()] if wanted else []
    return (
        next((name for name in reversed(known) if numbers(name) <= wanted), None),
        next((name for name in known if numbers(name) > wanted), None),
    )


def kind(version: str) -> str | None:
    """Say why a version is not a release of the table; ``None`` if it is one, or a build of one.

    >>> kind("0.18.1+cu129"), kind("0.22.1rc1")
    (None, 'a pre-release of 0.22.1')
    """
    match = VERSION.fullmatch(version)
    if match is None:
        return "not a version"
    number, rest = match.groups()
    if PLATFORM.fullmatch(rest):
        if number in table():
            return None
        series = [name for name in table() if name.startswith(f"{number}.")]
        if series:
            return f"a series, not a release: name one of {', '.join(series)}"
        return "not a release we know"
    if "dev" in rest:
        return f"a development build near {number}"
    if rest.startswith("+"):
        return f"not a release, but a build of its own of {number}"
    if re.match(r"\.?(a|b|rc)\d", rest):
        return f"a pre-release of {number}"
    if "post" in rest:
        return f"a post-release of {number}"
    return "not a version"


def last_of_series(version: str) -> str:
    """Return the last release of a series, e.g. of 0.18; any other version as it is, without a ``v``.

    >>> last_of_series("v0.18"), last_of_series("0.18.0+cu129"), last_of_series("0.99")
    ('0.18.1', '0.18.0+cu129', '0.99')
    """
    version = version.strip().removeprefix("v")
    series = [name for name in table() if name.startswith(f"{version}.")] if version.count(".") == 1 else []
    return max(series, key=numbers, default=version)


def release(version: str) -> str:
    """Return the release of the table that a version string names, or is a build of.

    Raises:
        PatchError: it is not in the table; the message says what it is, and the nearest releases.

    >>> release("0.18.1+cu129"), release("v0.22.1")
    ('0.18.1', '0.22.1')
    """
    version = version.strip().removeprefix("v")
    why = kind(version)
    if why is None:
        return version.partition("+")[0]
    nearest = [name for name in neighbours(version) if name is not None]
    known = f" (nearest: {', '.join(nearest)})" if nearest and "series" not in why else ""
    raise PatchError(f"vLLM {version} is {why}{known}; nothing is patched")
