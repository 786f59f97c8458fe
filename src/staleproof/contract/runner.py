"""Runs the probes of subjects in child processes, with a time limit per clause.

If a probe ends its process, by an illegal access or by the time limit, that is the answer to its clause; a
new process goes on with the next clause.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.case import Reading, absent
from staleproof.cases.words import NOT_RUN
from staleproof.check import require
from staleproof.contract import scripts
from staleproof.contract.contract import (
    BREAKS,
    HOLDS,
    NO_REFERENCE,
    TIMED_OUT,
    UNDEFINED,
    WRONG_SETTING,
    SettingError,
    breaks,
)
from staleproof.kernels import packages
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import _MARK, Subject, load_module, subjects_of
from staleproof.kernels.vllm_sources import UnavailableError

# Python's error about a call that does not fit a signature.
_SIGNATURE = re.compile(r"\(\) (got an unexpected keyword|missing \d|takes \d|got multiple values)")
# FlashInfer's error when it may compile a module but cannot.
_UNBUILT = re.compile(r"RuntimeError: (Ninja build failed|Could not find nvcc)")
# Torch's error about a tensor on a GPU, in its build for CPUs.
_NO_CUDA = "Torch not compiled with CUDA enabled"
# A line on a child's standard error, before each clause.
_BEGINS = "staleproof: the next clause"
LIMIT_S = 60.0
START_S = 90.0


def probes_of(subject: Subject) -> dict[str, Callable[[str], Reading]]:
    """The probes of a subject by clause; each takes the device."""
    from staleproof.contract import attention_probes, row_probes
    from staleproof.contract.scenes import LAUNCH, attention_shape

    if subject.kind == "attention":
        own = {name: subject.shape[name] for name in LAUNCH if name in subject.shape}
        kernel, shape = attention_probes.Kernel(subject.call, **own), attention_shape(subject.shape)
        return {clause: partial(ask, kernel, shape) for clause, ask in attention_probes.PROBES.items()}
    probes, sizes = row_probes.PROBES[subject.kind], dict(subject.shape)
    call = row_probes.returning_x(subject.call) if sizes.get("in_place") else subject.call
    return {clause: partial(ask, call, sizes) for clause, ask in probes.items()}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).partition(" Search for `")[0]
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _uncompiled(error: BaseException) -> str:
    """FlashInfer's error carries the module that the call asked for."""
    name = getattr(getattr(error, "spec", None), "name", "")
    module = f"its compiled module {name}" if name else "its compiled module"
    return f"{module} is not here; nvcc compiles it at a call without FLASHINFER_DISABLE_JIT"


def _misspelt(error: BaseException) -> BaseException | None:
    """The error of a name that an interpreted kernel uses and that nothing defines; a compiler refuses it."""
    frames = []
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        frames += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__
    if isinstance(error, AttributeError):
        return error if re.match(r"module 'triton\.language(\.math)?' has no", str(error)) else None
    if not isinstance(error, NameError):
        return None
    # The compiler knows the variables of a function around the kernel; the interpreter does not.
    frames += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    kernels = [getattr(frame.f_locals.get("self"), "fn", None) for frame in frames]
    around = [getattr(kernel, "__code__", None) for kernel in kernels]
    return None if any(code and error.name in code.co_freevars for code in around) else error


def answer(probe: Callable[[str], Reading], subject: Subject, device: str) -> tuple[Reading, bool]:
    """The answer, and whether the process can go on: after an error of the device it cannot."""
    try:
        return probe(device), True
    except SettingError as error:
        return breaks(f"{WRONG_SETTING}: {error}"), True
    except Exception as error:
        text = _one_line(error)
        if type(error).__name__ == "InterpreterError":
            if subject.package in ("", "staleproof") and (wrong := _misspelt(error)):
                return breaks(f"raises {_one_line(wrong)}"), True
            return absent(f"Triton's interpreter cannot run it: {str(error)[:120]}"), True
        if isinstance(error, ImportError | UnavailableError) and subject.package:
            return absent(f"does not import here: {text}"), True
        if isinstance(error, OSError) and subject.package and "Could not load" in text:
            # The loader's own words where another error hides them.
            return absent(f"its library does not load here: {_one_line(error.__cause__ or error)}"), True
        if isinstance(error, FileNotFoundError) and subject.package and error.filename:
            return absent(f"a file of it is not here: {Path(error.filename).name}"), True
        if type(error).__name__ == "MissingJITCacheError":
            return absent(_uncompiled(error)), True
        if subject.package and _UNBUILT.match(text):
            return absent(f"a module of it could not be compiled here: {text}"), True
        if isinstance(error, TypeError) and subject.package and _SIGNATURE.search(text):
            return absent(f"its calls do not fit this release: {text}"), True
        if _NO_CUDA in text and not subject.package:
            text += '; say needs="cuda" if the kernel needs a GPU'
        alive = "CUDA error" not in text and "illegal memory access" not in text
        return breaks(f"raises {text}"), alive


def judged(said: Reading, subject: Subject, release: Release, clause: str) -> Reading:
    """A break is not the kernel's where its library does not fit, or its documentation says so."""
    if said.verdict != BREAKS:
        return said
    if clause == "0" and (why := packages.other_torch(subject, release)):
        return absent(f"{why}; what came: {said.note}")
    if clause in subject.documented:
        note = f"{said.note}; documented: {subject.documented[clause]}"
        return replace(said, verdict=UNDEFINED, note=note)
    return said


def _goes_on(first: Reading) -> bool:
    """Whether a subject with this answer to clause 0 is asked the others."""
    return first.verdict == HOLDS or first.note.startswith(NO_REFERENCE)


# Sizes by what they must be.
_FUNCTIONS = "reference", "inverse", "make"
_COUNTS = (
    *("hidden", "experts", "top_k", "heads", "kv_heads", "head_dim", "value_dim", "page_size"),
    *("inner", "dim", "width", "live_rows"),
)


def listed(module: str) -> list[Subject]:
    """In a child: the subjects of a module, without what cannot go to another process.

    Raises:
        ValueError: two kernels of one name, whose answers nothing would tell apart, a wrong size, or a
            documentation of a wrong result on clean input.
    """
    import torch

    from staleproof.contract.scenes import LAYOUTS, attention_shape

    loaded = load_module(module)
    found = {subject.name: subject for subject in subjects_of(loaded)}
    for value in vars(loaded).values():
        for one in getattr(value, "__dict__", {}).get(_MARK, ()):
            require(found[one.name] is one, "name", "another for each kernel", repr(one.name))
    for subject in found.values():
        for clause, text in subject.documented.items():
            where = f"documented of {subject.name}"
            # A kernel that is wrong on clean input is wrong, whatever its documentation says.
            require(clause != "0", where, "clauses other than 0", "0")
            require(bool(text.strip()), where, f"what the documentation says about {clause}", repr(text))
        for name, given in subject.shape.items():
            where = f"{name} of {subject.name}"
            if name in _FUNCTIONS:
                require(callable(given), where, "a function", repr(given))
            elif name == "dtype":
                is_dtype = isinstance(getattr(torch, str(given), None), torch.dtype)
                require(is_dtype, where, "a dtype of torch by name, such as float16", repr(given))
            elif name in _COUNTS:
                require(type(given) is int and given > 0, where, "a positive integer", repr(given))
            elif name == "q_len":
                require(type(given) is int and given >= 0, where, "an integer of 0 or more", repr(given))
            elif name == "layout":
                require(given in LAYOUTS, where, " or ".join(LAYOUTS), repr(given))
        if subject.kind == "attention":
            shape = attention_shape(subject.shape)
            whole = shape.heads % shape.kv_heads == 0
            require(
                whole, f"heads of {subject.name}", f"a multiple of kv_heads={shape.kv_heads}", shape.heads
            )
    return [replace(subject, call=print, shape={}) for subject in found.values()]


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
        probes = probes_of(subject)
        for clause in clauses:
            # Its counterexamples first: where the process ends, no child is left to make them.
            children.tell((name, clause, None, scripts.counterexamples(subject, release, clause)))
            # What earlier kernels printed is not this one's.
            print(_BEGINS, file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(limit_s, exit=True)
            said, alive = answer(probes[clause], subject, device)
            faulthandler.cancel_dump_traceback_later()
            if why := packages.imported_elsewhere(subject, release):
                said = absent(why)
            if release.folder is not None:
                said = replace(said, note=said.note.replace(f"{release.folder}/", ""))
            said = judged(said, subject, release, clause)
            # First without the script: an error in making it is no verdict.
            children.tell((name, clause, said, ()))
            if case := said.numbers.get("case"):
                shown = scripts.counterexamples(subject, release, clause, case)
                children.tell((name, clause, said, shown))
            if not alive:
                os._exit(1)
            if clause == "0" and not _goes_on(said):
                break


def _ended(ended: children.Ended, limit_s: float) -> str:
    ended = replace(ended, stderr=ended.stderr.rpartition(f"{_BEGINS}\n")[2])
    if ended.code is None or "Timeout (" in ended.stderr:
        return f"{TIMED_OUT} {limit_s:.0f} s"
    if ended.code < 0:
        return f"ended its process with signal {-ended.code}"
    return f"ended its process with {ended.code}: {ended.last_line[:160]}".removesuffix(": ")


Answers = dict[str, dict[str, Reading]]


def _left(subjects: Sequence[Subject], known: Answers) -> Questions:
    """What is not answered yet. A subject that is wrong on clean input is asked nothing more."""
    questions = []
    for subject in subjects:
        found = known[subject.name]
        left = [clause for clause in subject.clauses if clause not in found]
        if left and ("0" not in found or _goes_on(found["0"])):
            questions.append((subject.name, left))
    return questions


def answers(
    module: str,
    subjects: Sequence[Subject],
    release: Release,
    device: str,
    limit_s: float = LIMIT_S,
    stop: threading.Event | None = None,
) -> Answers:
    """The answers of subjects of one release to each clause of their kinds.

    Args:
        module: where they are registered, a name or a path.
        subjects: of that module.
        release: of their package.
        device: ``cpu`` or ``cuda``.
        limit_s: for one clause, in seconds.
        stop: once it is set, no further process is started.

    Returns:
        Subject -> clause -> answer.
    """
    known: Answers = {
        subject.name: {c: absent(why) for c, why in subject.skip.items() if c in subject.clauses}
        for subject in subjects
    }
    of = {subject.name: subject for subject in subjects}
    stop = stop or threading.Event()
    while (questions := _left(subjects, known)) and not stop.is_set():
        count = sum(len(clauses) for _, clauses in questions)
        limit = START_S + limit_s * count
        ended = children.call(ask, module, questions, release, device, limit_s, timeout_s=limit)
        texts: dict[tuple[str, str], tuple[str, ...]] = {}
        for name, clause, said, made in ended.told:
            texts[name, clause] = made or texts.get((name, clause), ())
            if said is not None:
                known[name][clause] = said
        if not texts:
            # It ends before any question, for example because the package does not load.
            known[questions[0][0]]["0"] = breaks(f"does not load: {_ended(ended, START_S)}")
            continue
        name, clause = next(reversed(texts))
        if clause not in known[name]:
            known[name][clause] = judged(breaks(_ended(ended, limit_s)), of[name], release, clause)
        for (name, clause), made in texts.items():
            said = known[name][clause]
            if said.verdict in (BREAKS, UNDEFINED) and not stop.is_set():
                known[name][clause] = scripts.tried(said, made, of[name], release, limit_s)
    return {subject.name: _complete(subject, known[subject.name]) for subject in subjects}


def _complete(subject: Subject, found: dict[str, Reading]) -> dict[str, Reading]:
    first = found.get("0", absent("not asked: ended before"))
    why = "not asked: wrong on clean input"
    if first.verdict == NOT_RUN:
        why = first.note
    elif first.note.startswith(WRONG_SETTING):
        why = f"not asked: {WRONG_SETTING}"
    return {clause: found.get(clause, absent(why)) for clause in subject.clauses}
