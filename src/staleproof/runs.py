"""Recorded runs: the findings and measurements of one machine, in a folder for each machine.

A run folder holds ``findings.jsonl``, ``measurements.jsonl`` (timings, from a GPU only) and
``environment.json``: machine, commit, date, versions, and how many lines the other two files have, so that a
truncated one is noticed. The findings of this machine's own last runs are one file, in which a run of one
incident replaces that incident's findings and leaves those of the others.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from staleproof import device, machine
from staleproof.device import Provenance
from staleproof.lab import FIXED, NOT_FIXED, NOT_REPRODUCED, SCHEMA, WRONG, Finding, Key

# Of findings and runs that can be read.
SCHEMAS = (3, SCHEMA)
_READ = " and ".join(map(str, SCHEMAS))
FINDINGS, MEASUREMENTS, ENVIRONMENT = "findings.jsonl", "measurements.jsonl", "environment.json"


class RunFileError(RuntimeError):
    """A run file is truncated, of another schema, or cannot be read or written."""


class CheckoutError(RunFileError):
    """The package is installed without the repository around it."""


def checkout() -> Path:
    """The repository that this package is installed from in editable mode.

    Raises:
        CheckoutError: the package is installed without its repository.
    """
    root = machine.root()
    if root is None:
        raise CheckoutError(
            "notebooks, benchmarks and recorded runs live in the checkout, and staleproof is "
            "installed without one: clone the repository and run pip install -e . there"
        )
    return root


def runs_folder() -> Path:
    """Where recorded runs are kept."""
    return checkout() / "workbook" / "runs"


def build_folder() -> Path:
    """Where the report and the findings of the last run go; git ignores it."""
    return checkout() / "workbook" / "_build"


def benchmarks() -> dict[str, Path]:
    """The files of ``benchmarks/`` by name, without those that begin with ``_``."""
    files = sorted((checkout() / "benchmarks").glob("*.py"))
    return {path.stem: path for path in files if path.stem[0] != "_"}


@dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        folder: where it was read from.
        environment: machine, date, versions and capabilities.
        findings: each marked RECORDED.
        measurements: rows of ``measurements.jsonl``.
    """

    folder: Path
    environment: Mapping[str, Any]
    findings: list[Finding]
    measurements: list[dict[str, Any]]

    @property
    def machine(self) -> str:
        """Name of the machine, e.g. ``NVIDIA H200``."""
        return str(self.environment["machine"]["name"])

    @property
    def date(self) -> str:
        """UTC day it was recorded, ISO; if it was recorded on several days, the first and the last."""
        day = str(self.environment["date"])
        days = [f.date for f in self.findings] + [row.get("date", day) for row in self.measurements]
        first, last = min(days, default=day), max(days, default=day)
        return first if first == last else f"{first} to {last}"

    def only(self, findings: Sequence[Finding] = (), rows: Sequence[dict[str, Any]] = ()) -> Run:
        """The run with these findings and measurements alone, so that its title speaks of nothing else."""
        return replace(self, findings=[*findings], measurements=[*rows])

    @property
    def title(self) -> str:
        """Machine, commit and date in one line; runs of schema 3 hold no commit."""
        return ", ".join(filter(None, (self.machine, self.environment.get("commit"), self.date)))


def read(folder: Path) -> Run:
    """Read one recorded run.

    Raises:
        RunFileError: missing, truncated, of a newer schema, or not a run.
    """
    path = folder / ENVIRONMENT
    try:
        about = json.loads(path.read_text())
        schema, lines = about["schema"], about["lines"]
        complete = isinstance(about["machine"]["name"], str) and isinstance(about["date"], str)
    except OSError as error:
        raise RunFileError(f"{folder}: not a recorded run: {ENVIRONMENT} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFileError(f"{path}: truncated or not a run's environment: {error!r}") from error
    if not complete or not isinstance(lines, dict):
        raise RunFileError(f"{path}: truncated or not a run's environment")
    if schema not in SCHEMAS:
        raise RunFileError(f"{path}: schema {schema}, and this staleproof reads {_READ}")
    findings = read_findings(folder / FINDINGS)
    measurements = read_lines(folder / MEASUREMENTS)
    for name, got in ((FINDINGS, len(findings)), (MEASUREMENTS, len(measurements))):
        if got != lines.get(name):
            raise RunFileError(f"{folder / name}: truncated: expected {lines.get(name)} lines, got {got}")
    return Run(folder, about, findings, measurements)


def read_all(
    folder: Path | None = None, *, on_error: Callable[[RunFileError], object] | None = None
) -> list[Run]:
    """Every recorded run of ``workbook/runs``, or of another folder, sorted by name.

    Args:
        folder: instead of ``workbook/runs``.
        on_error: called with the error of each run that cannot be read; the others are returned.

    Raises:
        RunFileError: a run cannot be read, and ``on_error`` is ``None``.
    """
    folder = folder or runs_folder()
    runs: list[Run] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir() or path.name.endswith(".part"):
            continue
        try:
            runs.append(read(path))
        except RunFileError as error:
            if on_error is None:
                raise
            on_error(error)
    return runs


def find(name: str) -> Run:
    """The recorded run of this name: a run folder, or a machine under ``workbook/runs``.

    Raises:
        RunFileError: neither is there, or see :func:`read`.
    """
    if Path(name).is_dir():
        return read(Path(name))
    folder = runs_folder()
    if "/" not in name and (folder / name).is_dir():
        return read(folder / name)
    known = ", ".join(sorted(p.name for p in folder.glob("*") if p.is_dir())) or "none"
    raise RunFileError(f"{name}: neither a run folder nor a recorded machine (recorded: {known})")


def open_for_writing(folder: Path) -> Path:
    """An empty draft folder beside ``folder``.

    Called before the long work too, so that a folder that cannot be written is noticed first.

    Raises:
        RunFileError: it cannot be made, or ``folder`` exists and is not a recorded run.
    """
    if folder.exists() and not (folder / ENVIRONMENT).is_file():
        raise RunFileError(f"{folder}: exists and is not a recorded run; it is left as it is")
    draft = folder.with_name(folder.name + ".part")
    with writing(folder):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    return draft


def write(folder: Path, findings: Iterable[Finding], measurements: Iterable[Mapping[str, Any]]) -> None:
    """Write a run of this process, replacing an earlier run in the folder, completely or not at all.

    Raises:
        RunFileError: it cannot be written; an earlier run is unchanged.
    """
    rows = {
        FINDINGS: [found.to_json() for found in findings],
        MEASUREMENTS: [json.dumps(dict(row), sort_keys=True) for row in measurements],
    }
    about = {
        "schema": SCHEMA,
        "commit": machine.commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": device.machine().as_dict(),
        "packages": machine.packages(),
        "capabilities": [asdict(found) for found in machine.capabilities()],
        "lines": {name: len(lines) for name, lines in rows.items()},
    }
    draft = open_for_writing(folder)
    earlier = folder.with_name(folder.name + ".earlier.part")
    try:
        with writing(folder):
            for name, lines in rows.items():
                write_lines(draft / name, lines)
            write_lines(draft / ENVIRONMENT, [json.dumps(about, indent=1, sort_keys=True)])
            if folder.exists():
                folder.replace(earlier)
            draft.replace(folder)
    finally:
        if earlier.exists() and not folder.exists():
            earlier.replace(folder)
        shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(earlier, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Check that ``path`` can be written, before the long work rather than after it.

    A file is replaced as a whole: a device, a pipe, or the file that this process prints into would be lost.

    Raises:
        RunFileError: the file cannot be written.
    """
    with writing(path):
        if path.is_dir():
            raise RunFileError(f"{path}: cannot be written: it is a folder")
        with contextlib.suppress(FileNotFoundError):
            path.stat()
            if not path.is_file() or any(_is_stream(path, number) for number in (1, 2)):
                got = "a device, a pipe or this command's output"
                raise RunFileError(f"{path}: cannot be written: expected a plain file, got {got}")
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own: another run may be writing.
        tempfile.NamedTemporaryFile(dir=target.parent, prefix=f"{target.name}.").close()


def _is_stream(path: Path, number: int) -> bool:
    """Whether this process prints into the file through this descriptor."""
    try:
        return os.path.samestat(path.stat(), os.fstat(number))
    except OSError:
        return False


def read_kept(path: Path) -> list[Finding]:
    """The findings of earlier runs, with the provenance they were given; none if there is no file.

    Raises:
        RunFileError: the file cannot be read, so a run could not keep what is in it.

    >>> read_kept(Path("no-such-file.jsonl"))
    []
    """
    if not path.exists():
        return []
    try:
        return read_findings(path, recorded=False)
    except RunFileError as error:
        raise RunFileError(f"{error}; its findings would be lost: move the file, or name another") from error


def merged(
    earlier: Iterable[Finding], answers: Sequence[Finding], complete: Collection[str], order: Sequence[str]
) -> list[Finding]:
    """Earlier findings, and those of a run, which replace them.

    Args:
        earlier: findings of the file.
        answers: findings of the run.
        complete: incidents of which every question ran. All their earlier findings are dropped, those
            of removed questions too. An interrupted incident keeps its earlier findings of questions that
            did not run again.
        order: incidents in the order in which they are listed; others come last.

    >>> from staleproof.lab import bad, finding, good
    >>> old = [finding(Key(name, "q", name), good("clean")) for name in "ba"]
    >>> new = [finding(Key("a", "q", "v"), bad("leaked"))]
    >>> [(found.incident, found.variant) for found in merged(old, new, ["a"], ["a", "b"])]
    [('a', 'v'), ('b', 'b')]
    """
    again = {found.key for found in answers}
    left = [f for f in earlier if f.incident not in complete and f.key not in again]
    place = {incident: number for number, incident in enumerate(order)}
    return sorted([*answers, *left], key=lambda found: place.get(found.incident, len(place)))


def origins(findings: Iterable[Finding]) -> list[str]:
    """One line for each incident, machine, commit and day that its findings are of: how many.

    >>> from staleproof.lab import finding, good
    >>> (line,) = origins([finding(Key("mla_padding", "q", "v"), good("clean"))])
    >>> line.startswith("mla_padding: 1 finding, INTERPRETED on ")
    True
    """
    groups: dict[tuple[str, str], int] = {}
    for found in findings:
        where = f"{found.provenance} on {found.machine.get('name', 'an unknown machine')}"
        group = found.incident, ", ".join(filter(None, (where, found.origin)))
        groups[group] = groups.get(group, 0) + 1
    return [f"{name}: {n} finding{'s' * (n != 1)}, {where}" for (name, where), n in groups.items()]


TIMING_KEY = ("kernel", "provider", "mode", "x_name", "x_value")


@dataclass(frozen=True)
class Comparison:
    """Whether two sets of findings say the same.

    Attributes:
        match: keys with the same verdict in both.
        mismatch: keys with different verdicts: the first's and the second's.
        only_first: keys with a verdict in the first only.
        only_second: keys with a verdict in the second only.
        neither: keys that were not run in either.
    """

    match: list[Key]
    mismatch: dict[Key, tuple[str, str]]
    only_first: list[Key]
    only_second: list[Key]
    neither: list[Key]

    @property
    def summary(self) -> str:
        """The counts in one line."""
        counts = f"{len(self.match)} match, {len(self.mismatch)} mismatch"
        counts += f", {len(self.only_first)} only in the first"
        counts += f", {len(self.only_second)} only in the second"
        return counts + (f", {len(self.neither)} not run in either" if self.neither else "")


def compare(first: Iterable[Finding], second: Iterable[Finding]) -> Comparison:
    """Compare verdicts. A question that was not run has none, so it never matches."""
    one, two = ({f.key: f.verdict if f.ran else None for f in findings} for findings in (first, second))
    result = Comparison([], {}, [], [], [])
    for key in one | two:
        a, b = one.get(key), two.get(key)
        if a is None and b is None:
            result.neither.append(key)
        elif b is None:
            result.only_first.append(key)
        elif a is None:
            result.only_second.append(key)
        elif a == b:
            result.match.append(key)
        else:
            result.mismatch[key] = (a, b)
    return result


def compare_timings(first: Run, second: Run) -> list[tuple[dict[str, Any], float]]:
    """The rows measured in both runs, each with the median of the second divided by the first's."""
    two = {_timing_key(row): row for row in second.measurements}
    pairs = []
    for row in first.measurements:
        other = two.get(_timing_key(row))
        if other is None or row.get("unit") != other.get("unit"):
            continue
        a, b = float(row["p50"]), float(other["p50"])
        pairs.append((row | {"p50_second": b}, b / a if a else math.nan))
    return pairs


def _timing_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row.get(name)) for name in TIMING_KEY)


# The outcomes of a remedy's three runs that gave these verdicts. Rows of schema 3 do not hold them.
_GIVEN = {
    FIXED: ("bad", "good", "bad"),
    WRONG: ("bad", "good", "bad"),
    NOT_FIXED: ("bad", "bad", "bad"),
    NOT_REPRODUCED: ("open", "open", "open"),
}


def _of_schema_3(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of schema 3, with a family of words, digests of source and a script, as one of this schema."""
    gone = ("words", "source_digest", "machinery", "script")
    kept = {name: value for name, value in row.items() if name not in gone} | {"schema": SCHEMA}
    if kept.get("three"):
        three = {name: value for name, value in kept["three"].items() if name != "words"}
        kept["three"] = three | {"outcomes": _GIVEN.get(str(kept.get("verdict")), ("not run",) * 3)}
    return kept


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write findings as JSON lines, completely or not at all.

    Raises:
        RunFileError: the file cannot be written; an earlier file is unchanged.
    """
    write_lines(path, [f.to_json() for f in findings])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write to a file beside ``path``, then rename it: a failure leaves the earlier file as it was.

    If ``path`` is a link, this writes the file that it points to.
    """
    text = "".join(line + "\n" for line in lines)
    target = path.resolve()
    draft = target.with_name(target.name + ".part")
    with writing(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(target)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line that a file or folder cannot be written.

    Raises:
        RunFileError: the body raised an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise RunFileError(f"{path}: cannot be written: {error.strerror}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file of a run.

    Raises:
        RunFileError: unreadable, truncated, not JSON lines, or of a newer schema.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunFileError(f"{path}: cannot be read: {why}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RunFileError(
                f"{path}:{number}: truncated or not JSON: {error.msg}: column {error.colno}"
            ) from error
        if not isinstance(row, dict):
            raise RunFileError(f"{path}:{number}: expected an object, got {type(row).__name__}")
        rows.append(row)
    if text and not text.endswith("\n"):
        raise RunFileError(f"{path}: truncated: the last line has no end")
    return rows


def read_findings(path: Path, *, recorded: bool = True) -> list[Finding]:
    """The findings of a file.

    Args:
        path: JSON lines.
        recorded: mark each RECORDED; else they keep the provenance that they were given.

    Raises:
        RunFileError: as :func:`read_lines`, or a line is no finding: a field is missing or unknown, or shows
            something else than it claims.
    """
    found = []
    for number, row in enumerate(read_lines(path), 1):
        try:
            one = Finding.from_json(_of_schema_3(row) if row.get("schema") == 3 else row)
            found.append(replace(one, provenance=Provenance.RECORDED) if recorded else one)
        except (TypeError, ValueError) as error:
            raise RunFileError(f"{path}:{number}: not a finding: {error}") from error
    return found
