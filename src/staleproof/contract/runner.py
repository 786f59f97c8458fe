"""Runs the probes of subjects, each subject in a process of its own, with a time limit a clause.

A clause whose probe ends its process, by an illegal access or by the time limit, is a row; a new
process goes on with the next clause.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from staleproof import device as devices
from staleproof.cases import children
from staleproof.contract import binding, earlier, scripts
from staleproof.contract.contract import NO_REFERENCE, TIMED_OUT, Outcome, Row, Verdict, breaks, not_run
from staleproof.kernels import packages
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import Subject, load_module, subjects_of
from staleproof.kernels.vllm_sources import UnavailableError

# Modules with the subjects of packages that people use.
_PACKAGES = "ours torch vllm sglang fla liger transformers flashinfer quack wheels"
SUBJECTS = tuple(f"staleproof.kernels.{name}" for name in _PACKAGES.split())
# What Python says of a call that does not fit a signature.
_SIGNATURE = re.compile(r"\(\) (got an unexpected keyword|missing \d|takes \d|got multiple values)")
# What FlashInfer says where it may compile a module and cannot.
_UNBUILT = re.compile(r"RuntimeError: (Ninja build failed|Could not find nvcc)")
LIMIT_S = 60.0
START_S = 90.0
# Most of an audit is compiling; each process has a context of its own, so that a fault stays its own.
GPU_JOBS = 8


def _probes(subject: Subject) -> dict[str, Callable[[str], Outcome]]:
    """The probes of a subject by clause; each takes the device."""
    from staleproof.contract import attention_probes, row_probes
    from staleproof.contract.scenes import Shape, mla_shape

    sizes: dict[str, Any] = dict(subject.shape)
    kernel: Any = subject.call
    table: dict[str, Callable[..., Outcome]] = row_probes.PROBES.get(subject.kind, attention_probes.PROBES)
    if subject.kind == "attention":
        own = {name: sizes.pop(name) for name in ("prepared", "planned", "empty_lse") if name in sizes}
        kernel = attention_probes.Kernel(subject.call, **own)
    shape: Any = sizes
    if subject.kind == "attention":
        shape = (mla_shape if sizes.get("layout") == "mla" else Shape)(**sizes)
    return {clause: partial(probe, kernel, shape) for clause, probe in table.items()}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).partition(" Search for `")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _cause(error: BaseException) -> str:
    """The loader's own words where another error hides them."""
    return _one_line(error.__cause__ or error)


def _uncompiled(error: BaseException) -> str:
    """FlashInfer's error carries the module that the call asked for."""
    name = getattr(getattr(error, "spec", None), "name", "")
    module = f"its compiled module {name}" if name else "its compiled module"
    return f"{module} is not here; nvcc compiles it at a call without FLASHINFER_DISABLE_JIT"


def _answer(probe: Callable[[str], Outcome], subject: Subject, device: str) -> tuple[Outcome, bool]:
    """The answer, and whether the process can go on: after an error of the device it cannot."""
    try:
        return probe(device), True
    except Exception as error:
        text = _one_line(error)
        if type(error).__name__ == "InterpreterError":
            return not_run(f"Triton's interpreter cannot run it: {str(error)[:120]}"), True
        if isinstance(error, ImportError | UnavailableError) and subject.package:
            return not_run(f"does not import here: {text}"), True
        if isinstance(error, OSError) and subject.package and "Could not load" in text:
            return not_run(f"its library does not load here: {_cause(error)}"), True
        if isinstance(error, FileNotFoundError) and subject.package and error.filename:
            return not_run(f"a file of it is not here: {Path(error.filename).name}"), True
        if type(error).__name__ == "MissingJITCacheError":
            return not_run(_uncompiled(error)), True
        if subject.package and _UNBUILT.match(text):
            return not_run(f"a module of it could not be compiled here: {text}"), True
        if isinstance(error, TypeError) and subject.package and _SIGNATURE.search(text):
            return not_run(f"its calls do not fit this release: {text}"), True
        alive = "CUDA error" not in text and "illegal memory access" not in text
        return breaks(f"raises {text}"), alive


def _documented(outcome: Outcome, subject: Subject, clause: str) -> Outcome:
    if outcome.verdict is Verdict.BREAKS and clause in subject.documented:
        note = f"{outcome.note}; documented: {subject.documented[clause]}"
        return replace(outcome, verdict=Verdict.UNDEFINED, note=note)
    return outcome


def _judged(outcome: Outcome, subject: Subject, release: Release, clause: str) -> Outcome:
    """A break is not the kernel's where its library does not fit, or its documentation says so."""
    wrong = clause == "0" and outcome.verdict is Verdict.BREAKS
    if wrong and (why := packages.other_torch(subject, release)):
        return not_run(f"{why}; what came: {outcome.note}")
    return _documented(outcome, subject, clause)


def _goes_on(first: Outcome) -> bool:
    """Whether a subject with this answer to clause 0 is asked the others."""
    return first.verdict is Verdict.HOLDS or first.note.startswith(NO_REFERENCE)


def listed(module: str) -> list[Subject]:
    """In a child: the subjects of a module, without what cannot go to another process."""
    return [replace(subject, call=print, shape={}) for subject in subjects_of(load_module(module))]


def subjects_in(module: str) -> list[Subject]:
    """The subjects of a module. A module of the user's may end the process that imports it."""
    if module in SUBJECTS:
        return subjects_of(load_module(module))
    found: list[Subject] = children.call(listed, module, timeout_s=START_S).answer()
    return found


# What is still to be asked: (subject, clauses).
Questions = list[tuple[str, list[str]]]


def ask(module: str, questions: Questions, release: Release, device: str, limit_s: float) -> None:
    """In a child: put clauses to subjects of one release, and tell each answer at once."""
    import torch

    torch.set_num_threads(1)
    devices.select(device)
    known = {subject.name: subject for subject in subjects_of(load_module(module))}
    packages.make_importable([known[name] for name, _ in questions], release)
    for name, clauses in questions:
        subject = known[name]
        probes = _probes(subject)
        for clause in clauses:
            # Its counterexamples first: where the process ends, no child is left to make them.
            children.tell((name, clause, None, scripts.counterexamples(subject, release, clause)))
            faulthandler.dump_traceback_later(limit_s, exit=True)
            outcome, alive = _answer(probes[clause], subject, device)
            faulthandler.cancel_dump_traceback_later()
            if why := packages.imported_elsewhere(subject, release):
                outcome = not_run(why)
            if release.folder is not None:
                outcome = replace(outcome, note=outcome.note.replace(f"{release.folder}/", ""))
            case = outcome.case
            outcome = _judged(replace(outcome, case=()), subject, release, clause)
            # First without the script: an error in making it is no verdict.
            children.tell((name, clause, outcome, ()))
            if case:
                shown = scripts.counterexamples(subject, release, clause, case)
                children.tell((name, clause, outcome, shown))
            if not alive:
                os._exit(1)
            if clause == "0" and not _goes_on(outcome):
                break


def _ended(ended: children.Ended, limit_s: float) -> str:
    if ended.code is None or "Timeout (" in ended.stderr:
        return f"{TIMED_OUT} {limit_s:.0f} s"
    if ended.code < 0:
        return f"ended its process with signal {-ended.code}"
    return f"ended its process with {ended.code}: {ended.last_line[:160]}"


Answers = dict[str, dict[str, Outcome]]


def _left(subjects: Sequence[Subject], known: Answers) -> Questions:
    """What is not answered yet. A subject that is wrong on clean input is asked nothing more."""
    questions = []
    for subject in subjects:
        found = known[subject.name]
        first = found.get("0")
        if first is None or _goes_on(first):
            questions.append((subject.name, [clause for clause in subject.clauses if clause not in found]))
    return [(name, clauses) for name, clauses in questions if clauses]


def answers(
    module: str, subjects: Sequence[Subject], release: Release, device: str, limit_s: float = LIMIT_S
) -> Answers:
    """The answers of subjects of one release to each clause of their kinds.

    Args:
        module: where they are registered, a name or a path.
        subjects: of that module.
        release: of their package.
        device: ``cpu`` or ``cuda``.
        limit_s: for one clause, in seconds.

    Returns:
        Subject -> clause -> answer.
    """
    known: Answers = {
        subject.name: {c: not_run(why) for c, why in subject.skip.items() if c in subject.clauses}
        for subject in subjects
    }
    of = {subject.name: subject for subject in subjects}
    while questions := _left(subjects, known):
        count = sum(len(clauses) for _, clauses in questions)
        ended = children.call(
            ask, module, questions, release, device, limit_s, timeout_s=START_S + limit_s * count
        )
        begun: tuple[str, str] | None = None
        texts: dict[tuple[str, str], tuple[str, ...]] = {}
        for name, clause, outcome, made in ended.told:
            begun = (name, clause)
            texts[begun] = made or texts.get(begun, ())
            if outcome is not None:
                known[name][clause] = outcome
        if begun is None:
            # It ends before any question, for example because the package does not load.
            name, (clause, *_) = questions[0]
            known[name]["0"] = breaks(f"does not load: {_ended(ended, START_S)}")
        elif begun[1] not in known[begun[0]]:
            name, clause = begun
            known[name][clause] = _judged(breaks(_ended(ended, limit_s)), of[name], release, clause)
        for (name, clause), made in texts.items():
            outcome = known[name].get(clause)
            if outcome is not None and outcome.verdict in (Verdict.BREAKS, Verdict.UNDEFINED):
                known[name][clause] = scripts.tried(outcome, made, of[name], release, limit_s)
    return {subject.name: _complete(subject, known[subject.name]) for subject in subjects}


def _complete(subject: Subject, found: dict[str, Outcome]) -> dict[str, Outcome]:
    first = found["0"]
    why = first.note if first.verdict is Verdict.NOT_RUN else "not asked: wrong on clean input"
    return {clause: found.get(clause, not_run(why)) for clause in subject.clauses}


def _rows(subject: Subject, release: Release | None, found: dict[str, Outcome]) -> list[Row]:
    machine, provenance = devices.machine().name, str(devices.provenance())
    version = release.version if release else ""
    return [
        Row(
            subject.name,
            subject.package or "yours",
            version,
            clause,
            outcome.verdict,
            outcome.note,
            machine,
            provenance,
            outcome.script,
        )
        for clause, outcome in found.items()
    ]


def _binds(subject: Subject, release: Release) -> str:
    wrong = binding.problem(subject, release)
    return f"its calls do not fit: {wrong}" if wrong else "its calls fit the signatures of this release"


def _unloadable(module: str, note: str) -> list[Row]:
    machine, provenance = devices.machine().name, str(devices.provenance())
    return [Row(module, "yours", "", "0", Verdict.BREAKS, note, machine, provenance)]


def audit(
    modules: Sequence[str] = SUBJECTS,
    device: str = "cpu",
    *,
    only: str = "",
    limit_s: float = LIMIT_S,
    jobs: int = 0,
    known: Sequence[Row] = (),
    again: Collection[Verdict] = (),
) -> Iterator[list[Row]]:
    """Audit the subjects of modules.

    Args:
        modules: names or paths; those of known packages by default.
        device: ``cpu`` or ``cuda``.
        only: a text that package, version or name of a subject must hold.
        limit_s: for one clause of one subject, in seconds.
        jobs: processes at a time; by default one a core, and 8 at most on a GPU.
        known: rows of an earlier audit of this machine; what it answered is not asked again.
        again: verdicts of theirs that are asked again.

    Yields:
        The rows of one release of one subject, as they come.
    """
    device = devices.select(device)
    earlier.check_machine(known, devices.machine().name)
    cores = os.cpu_count() or 1
    workers = jobs or (min(cores, GPU_JOBS) if device == "cuda" else cores)
    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[Answers], tuple[list[Subject], Release]] = {}
        for module in modules:
            try:
                subjects = subjects_in(module)
            except children.ChildError as error:
                yield _unloadable(module, f"does not import: {error}")
                continue
            if not subjects and module not in SUBJECTS:
                yield _unloadable(module, "registers no kernel")
            # Executed sources have stand-ins for the rest of their package, which others need whole.
            together: dict[tuple[Release, bool], list[Subject]] = {}
            for subject in subjects:
                why = packages.unavailable_reason(subject)
                there = packages.releases(subject)
                there = [r for r in there if only in f"{subject.package} {r.version} {subject.name}"]
                if not there and only:
                    continue
                if not there and earlier.open_clauses(subject, "", known):
                    why = f"{subject.package} is not here" + (f"; {why}" if why else "")
                    yield _rows(subject, None, dict.fromkeys(subject.clauses, not_run(why)))
                whole = subject
                for release in there:
                    left = earlier.open_clauses(whole, release.version, known, again)
                    if not left:
                        continue
                    subject = replace(whole, asked=left)
                    if why:
                        note = f"{why}; {_binds(subject, release)}" if subject.package else why
                        yield _rows(subject, release, dict.fromkeys(subject.clauses, not_run(note)))
                    else:
                        together.setdefault((release, bool(subject.files)), []).append(subject)
            for (release, _), group in together.items():
                running[pool.submit(answers, module, group, release, device, limit_s)] = (group, release)
        try:
            for future in as_completed(running):
                group, release = running[future]
                for subject in group:
                    yield _rows(subject, release, future.result()[subject.name])
        finally:
            # Also when the reader stops early or is interrupted.
            for future in running:
                future.cancel()
            if not all(future.done() for future in running):
                children.end_all()
