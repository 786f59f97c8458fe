"""The audit's table: a case for each kernel, release of its package and clause, one scene for each release.

An audit can go on from an earlier one of the same machine: packages come one at a time to a machine without a
network, and an audit may end early. Then only what is open is asked, and both become one file:
``staleproof audit --onto h200.jsonl --json h200.jsonl``.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.case import Case, Reading, Scene
from staleproof.cases.finding import REPLICA, Evidence, Finding, Grade, Key, RunFileError
from staleproof.cases.run import Progress, run, silent
from staleproof.contract import binding, runner
from staleproof.contract.contract import (
    CONTRACT,
    HOLDS,
    NO_IMPORT,
    NO_KERNEL,
    TIMED_OUT,
    YOURS,
    breaks,
    is_unasked,
    package_of,
)
from staleproof.contract.runner import Answers
from staleproof.kernels import (
    fla,
    flashinfer,
    liger,
    ours,
    packages,
    quack,
    sglang,
    torch,
    transformers,
    vllm,
    wheels,
)
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import Subject, load_module, subjects_of

# The modules with the kernels of packages that people use, in the order in which they are asked.
SUBJECTS = tuple(
    module.__name__
    for module in (ours, torch, vllm, sglang, fla, liger, transformers, flashinfer, quack, wheels)
)
# Most of an audit is compiling; each process has a context of its own, so that a fault stays its own.
GPU_JOBS = 8
# Kernels that must keep every clause that their documentation does not leave to the caller.
MUST_HOLD = (YOURS, "staleproof")


def subjects_in(module: str) -> list[Subject]:
    """The subjects of a module. A module of the user's may end the process that imports it."""
    if module in SUBJECTS:
        return subjects_of(load_module(module))
    ended = children.call(runner.listed, module, timeout_s=runner.START_S)
    try:
        found: list[Subject] = ended.answer()
    except children.ChildError as error:
        said = str(error).removeprefix("ended with 1 and said: ")
        raise children.ChildError(f"{said}{_place(ended.stderr)}") from error
    return found


def _place(traceback: str) -> str:
    """Where it last was in the user's code: `` (file, line 3)``, or nothing."""
    others = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    others.append(str(Path(__file__).parents[1]))
    places = re.findall(r'^ *File "(/.+)", line (\d+)', traceback, re.MULTILINE)
    mine = [place for place in places if not any(Path(place[0]).is_relative_to(one) for one in others)]
    return f" ({mine[-1][0]}, line {mine[-1][1]})" if mine else ""


def check_machine(known: Sequence[Finding], machine: str) -> None:
    """Refuse an audit of another machine.

    Raises:
        RunFileError: an answer in it came from elsewhere.
    """
    if others := sorted({found.machine.get("name", "") for found in known} - {machine}):
        raise RunFileError(f"onto: expected an audit of {machine}, got one of {', '.join(others)}")


def open_clauses(
    subject: Subject, release: str, known: Sequence[Finding], again: Collection[str] = ()
) -> tuple[str, ...]:
    """The clauses that a subject is still to be asked.

    Args:
        subject: the kernel.
        release: package and version, or the package alone if no release of it is here.
        known: the answers of an earlier audit.
        again: verdicts that count as open, for example to renew the scripts of broken clauses.

    Returns:
        All clauses of its kind, if it did not run; ``0``, those with a verdict of ``again`` and those that
        the earlier audit did not know; or none.

    >>> subject = Subject("decode", "merge", print, package="kernels")
    >>> known = [Finding(CONTRACT, c, "decode", HOLDS, "good", "kernels 1.0") for c in "0ERO"]
    >>> open_clauses(subject, "kernels 1.0", known), open_clauses(subject, "kernels 2.0", known)
    ((), ('0', 'E', 'R', 'O'))
    """
    mine = [
        found
        for found in known
        if found.variant == subject.name and release in (found.release, package_of(found))
    ]
    # A decorator that was at fault may have been mended.
    ran = [found for found in mine if found.ran and not is_unasked(found)]
    answered = {found.question: found.verdict for found in ran}
    if not answered:
        return subject.clauses
    wanted = {clause for clause, verdict in answered.items() if verdict in again}
    wanted |= set(subject.clauses) - {found.question for found in mine}
    return tuple(clause for clause in subject.clauses if clause in wanted | {"0"}) if wanted else ()


def merged(known: Sequence[Finding], new: Sequence[Finding]) -> list[Finding]:
    """The answers of two audits of one machine, each kernel, release and clause once.

    A new answer takes the place of the old one. A new ``not run`` takes the place of an old ``not run`` only,
    and so does an answer that did not come in time: limits and loads differ between audits. What says that a
    package was not there goes when another audit has a release of it.

    Args:
        known, new: answers, in their order.

    >>> old = Finding(CONTRACT, "E", "decode", "not run", "not run", "kernels 1.0", note="no GPU")
    >>> now = Finding(CONTRACT, "E", "decode", HOLDS, "good", "kernels 1.0")
    >>> merged([old], [now]) == merged([now], [old]) == [now]
    True
    """
    found: dict[Key, Finding] = {}
    for one in [*known, *new]:
        gap = not one.ran or one.note.startswith(TIMED_OUT)
        if one.key not in found or not gap or not found[one.key].ran:
            found[one.key] = one
    here = {(package_of(one), one.variant) for one in found.values() if " " in one.release}
    return [one for one in found.values() if " " in one.release or (package_of(one), one.variant) not in here]


def _told(clause: str, subject: Subject, device: str, answers: Future[Answers]) -> Reading:
    return answers.result()[subject.name][clause]


def _cases(
    subject: Subject, release: str, ask: Callable[..., Reading], *, why: str = "", scene: Scene | None = None
) -> list[Case]:
    """A case a clause; ``ask`` takes the clause first. ``why``: what is missing here."""
    must_hold = release.partition(" ")[0] in MUST_HOLD
    return [
        Case(
            Key(CONTRACT, clause, subject.name, release),
            CONTRACT,
            partial(ask, clause),
            subject,
            expect=HOLDS if must_hold and clause not in subject.documented else None,
            reason="an audit records what other packages do",
            needs=lambda subject, device: why or None,
            evidence=Evidence(Grade.REAL, release) if subject.package != "staleproof" else REPLICA,
            scene=scene,
            limit_s=math.inf,
        )
        for clause in subject.clauses
    ]


def _unloadable(module: str, note: str) -> list[Case]:
    nothing = Subject(module, "operands", print, asked=("0",))
    return _cases(nothing, YOURS, lambda clause, subject, device: breaks(note))


def table(
    modules: Sequence[str],
    begin: Callable[[str, list[Subject], Release, str], Future[Answers]],
    *,
    only: str = "",
    known: Sequence[Finding] = (),
    again: Collection[str] = (),
) -> list[Case]:
    """The cases of an audit; see :func:`audit`.

    Args:
        modules: names or paths.
        begin: starts asking subjects of one release on a device, and returns at once.
        only, known, again: as for :func:`audit`.

    Raises:
        RunFileError: two modules have a kernel of one name; one's answers would replace the other's.
    """
    cases = []
    owners: dict[tuple[str, str], str] = {}
    for module in modules:
        try:
            subjects = subjects_in(module)
        except children.ChildError as error:
            cases += _unloadable(module, f"{NO_IMPORT}: {error}")
            continue
        if not subjects and module not in SUBJECTS:
            cases += _unloadable(module, NO_KERNEL)
        # Executed sources have stand-ins for the rest of their package, which others need whole.
        scenes: dict[tuple[Release, bool], tuple[list[Subject], Scene]] = {}
        for subject in subjects:
            package = subject.package or YOURS
            missing = packages.unavailable_reason(subject)
            there = {f"{package} {found.version}".strip(): found for found in packages.releases(subject)}
            there = {name: found for name, found in there.items() if only in f"{name} {subject.name}"}
            if not there and not only and (left := open_clauses(subject, package, known)):
                why = f"{package} is not here" + (f"; {missing}" if missing else "")
                cases += _cases(replace(subject, asked=left), package, _told, why=why)
            for name, release in there.items():
                if (owner := owners.setdefault((name, subject.name), module)) != module:
                    got = f"{subject.name!r} in {owner} and in {module}"
                    raise RunFileError(f"modules: expected another name for each kernel, got {got}")
                if not (left := open_clauses(subject, name, known, again)):
                    continue
                asked = replace(subject, asked=left)
                if missing:
                    binds = f"{missing}; {_binds(subject, release)}" if subject.package else missing
                    cases += _cases(asked, name, _told, why=binds)
                    continue
                key = release, bool(subject.files)
                if key not in scenes:
                    group: list[Subject] = []
                    tell = partial(begin, module, group, release)
                    scenes[key] = group, Scene(name, tell, early=True, limit_s=math.inf)
                scenes[key][0].append(asked)
                cases += _cases(asked, name, _told, scene=scenes[key][1])
    return cases


def _binds(subject: Subject, release: Release) -> str:
    wrong = binding.problem(subject, release)
    return f"its calls do not fit: {wrong}" if wrong else "its calls fit the signatures of this release"


def audit(
    modules: Sequence[str] = SUBJECTS,
    device: str = "cpu",
    *,
    only: str = "",
    limit_s: float = runner.LIMIT_S,
    known: Sequence[Finding] = (),
    again: Collection[str] = (),
    progress: Progress = silent,
) -> Generator[Finding]:
    """Put the kernels of modules through the contract. However it ends, no child process is left.

    Args:
        modules: names or paths; those of known packages by default.
        device: ``cpu`` or ``cuda``.
        only: a text that package, version or name of a kernel must hold.
        limit_s: for one clause of one kernel, in seconds.
        known: an earlier audit of this machine; what it answered is not asked again.
        again: verdicts of it that are asked again.
        progress: takes one line about the case that is next.

    Yields:
        A finding a clause, kernel after kernel.
    """
    device = devices.select(device)
    check_machine(known, devices.machine().name)
    cores = os.cpu_count() or 1
    begun: list[Future[Answers]] = []
    stop = threading.Event()
    with ThreadPoolExecutor(min(cores, GPU_JOBS) if device == "cuda" else cores) as pool:

        def begin(module: str, subjects: list[Subject], release: Release, device: str) -> Future[Answers]:
            begun.append(pool.submit(runner.answers, module, subjects, release, device, limit_s, stop=stop))
            return begun[-1]

        try:
            yield from run(table(modules, begin, only=only, known=known, again=again), device, progress)
        finally:
            # Also when the reader stops early or is interrupted.
            stop.set()
            while not all(future.done() for future in begun):
                children.end_all()
                time.sleep(0.05)
