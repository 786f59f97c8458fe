"""Puts kernels through the contract in child processes, with a time limit per clause.

If a probe ends its process, by an illegal access or by the time limit, that is the answer to its clause; a
new process goes on with the next clause.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch

from staleproof import child as children
from staleproof import device as devices
from staleproof.audit import _MARK, SettingError, Subject, load_module, subjects_of
from staleproof.check import require
from staleproof.contract import attention_probes, reproducer, row_probes
from staleproof.contract.contract import (
    BREAKS,
    HOLDS,
    NO_IMPORT,
    NO_KERNEL,
    NO_REFERENCE,
    NOT_RUN,
    NOT_TESTED,
    TIMED_OUT,
    UNDEFINED,
    WRONG_SETTING,
    Answer,
    breaks,
    not_run,
    not_tested,
)
from staleproof.contract.scenes import LAUNCH, attention_shape

# Torch's error about a tensor on a GPU, in its build for CPUs.
_NO_CUDA = "Torch not compiled with CUDA enabled"
# A line on a child's standard error, before each clause.
_BEGINS = "staleproof: the next clause"
LIMIT_S = 60.0
START_S = 90.0


def probes_of(subject: Subject) -> dict[str, Callable[[str], Answer]]:
    """The probes of a subject by clause; each takes the device."""
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


def ask_one(probe: Callable[[str], Answer], device: str) -> tuple[Answer, bool]:
    """The answer, and whether the process can go on: after an error of the device it cannot."""
    try:
        return probe(device), True
    except SettingError as error:
        return not_tested(f"{WRONG_SETTING}: {error}"), True
    except Exception as error:
        text = _one_line(error)
        if type(error).__name__ == "InterpreterError":
            if wrong := _misspelt(error):
                return breaks(f"raises {_one_line(wrong)}"), True
            return not_run(f"Triton's interpreter cannot run it: {str(error)[:120]}"), True
        if _NO_CUDA in text:
            text += '; say needs="cuda" if the kernel needs a GPU'
        alive = "CUDA error" not in text and "illegal memory access" not in text
        return breaks(f"raises {text}"), alive


def judged(answer: Answer, subject: Subject, clause: str) -> Answer:
    """A break that the kernel's documentation leaves to the caller is undefined."""
    if answer.verdict != BREAKS or clause not in subject.documented:
        return answer
    note = f"{answer.note}; documented: {subject.documented[clause]}"
    return replace(answer, verdict=UNDEFINED, note=note)


def _goes_on(first: Answer) -> bool:
    """Whether a subject with this answer to clause 0 is asked the others."""
    return first.verdict == HOLDS or first.note.startswith(NO_REFERENCE)


def unavailable_reason(subject: Subject) -> str:
    """Why this machine cannot run a subject, or ``""``."""
    capability = devices.machine().capability
    if subject.needs in ("cuda", "sm90", "sm100") and capability is None:
        return "needs a CUDA GPU"
    if subject.needs == "sm90" and (why := devices.needs_sm90()):
        return why
    if subject.needs == "sm100" and capability not in ("sm_100", "sm_103"):
        return f"needs an SM100 GPU (B200, GB200); this is {capability}"
    if subject.needs == "cpu" and capability is not None:
        return "runs on CPU tensors only"
    return ""


def listed(module: str) -> list[Subject]:
    """In a child: the subjects of a module, without what cannot go to another process.

    Raises:
        SettingError: two kernels of one name, whose answers nothing would tell apart.
    """
    loaded = load_module(module)
    found = {subject.name: subject for subject in subjects_of(loaded)}
    for value in vars(loaded).values():
        for one in getattr(value, "__dict__", {}).get(_MARK, ()):
            if found[one.name] is not one:
                raise SettingError(f"name: expected another for each kernel, got {one.name!r}")
    return [replace(subject, call=print, shape={}) for subject in found.values()]


def subjects_in(module: str) -> list[Subject]:
    """The subjects of a module, which may end the process that imports it.

    Args:
        module: a name, or a path that ends in ``.py``.

    Raises:
        ChildError: it does not import, or a decorator was given something wrong; the text says so, and where.
    """
    ended = children.call(listed, module, timeout_s=START_S)
    try:
        found: list[Subject] = ended.answer()
    except children.ChildError as error:
        reason, place = str(error).removeprefix("ended with 1: "), _place(ended.stderr)
        wrong = reason.removeprefix(f"{SettingError.__module__}.{SettingError.__name__}: ")
        if wrong != reason:
            text = f"{WRONG_SETTING}: {wrong}{place}; no kernel of this module was tested"
        else:
            text = f"{NO_IMPORT}: {reason}{place}"
        raise children.ChildError(text) from error
    return found


def check_modules(modules: Sequence[str]) -> None:
    """Check that modules are there, without importing one; a child also looks in the current folder.

    Raises:
        ValueError: one is not, or there is no list of names.
    """
    is_list = isinstance(modules, list | tuple) and all(isinstance(one, str) for one in modules)
    require(is_list, "modules", 'names or files, such as ["my_kernels.py"]', repr(modules))
    for name in modules:
        if not _is_there(name):
            raise ValueError(f"modules: {name}: expected a Python file or a module, and none is there")


def _is_there(module: str) -> bool:
    if module.endswith(".py"):
        return Path(module).is_file()
    top, *rest = module.split(".")
    if not all(map(str.isidentifier, (top, *rest))):
        return False
    spec = find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    for part in rest:
        folders = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(part, [*folders]) if folders else None
    return spec is not None


def _place(stack: str) -> str:
    """Where it last was in the user's code: `` (file, line 3)``, or nothing."""
    others = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    others.append(str(Path(__file__).parents[1]))
    places = re.findall(r'^ *File "(/.+)", line (\d+)', stack, re.MULTILINE)
    inside = [place for place in places if not any(Path(place[0]).is_relative_to(one) for one in others)]
    return f" ({inside[-1][0]}, line {inside[-1][1]})" if inside else ""


# What is still to be asked: (subject, clauses).
Questions = list[tuple[str, list[str]]]


def ask(module: str, questions: Questions, device: str, limit_s: float, folder: Path | None) -> None:
    """In a child: put clauses to the subjects of a module, and tell each answer at once.

    Args:
        module: a name or a path.
        questions: subjects and clauses.
        device: ``cpu`` or ``cuda``.
        limit_s: for one clause, in seconds.
        folder: where the inputs of breaks go; ``None``: no reproducers are made.
    """
    torch.set_num_threads(1)
    devices.select(device)
    if devices.interpreting() and devices.has_triton():
        devices.load_triton()
        from staleproof.contract import interpreter

        interpreter.repair()
    known = {subject.name: subject for subject in subjects_of(load_module(module))}
    for name, clauses in questions:
        subject = known[name]
        probes = probes_of(subject)
        for clause in clauses:
            file = folder and folder / f"{reproducer.name_of(name, clause)}.pt"
            reproducer.keep_in(file)
            # First the script of a call that ends the process: then no child is left to make it.
            text = reproducer.script(subject, clause, "", None) if file else ""
            children.report((name, clause, None, text))
            # What earlier kernels printed is not this one's.
            print(_BEGINS, file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(limit_s, exit=True)
            answer, alive = ask_one(probes[clause], device)
            faulthandler.cancel_dump_traceback_later()
            answer = judged(answer, subject, clause)
            if answer.example and file:
                torch.save(answer.example, file)
                text = reproducer.script(subject, clause, answer.note, answer.example)
            children.report((name, clause, replace(answer, example=None), text))
            if not alive:
                os._exit(1)
            if clause == "0" and not _goes_on(answer):
                break


def _ended(ended: children.Ended, limit_s: float) -> str:
    ended = replace(ended, stderr=ended.stderr.rpartition(f"{_BEGINS}\n")[2])
    if ended.code is None or "Timeout (" in ended.stderr:
        return f"{TIMED_OUT} {limit_s:.0f} s"
    if ended.code < 0:
        return f"ended its process with signal {-ended.code}"
    return f"ended its process with {ended.code}: {ended.last_line[:160]}".removesuffix(": ")


Answers = dict[str, dict[str, Answer]]


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
    module: str, subjects: Sequence[Subject], device: str, limit_s: float, scripts: Path | None = None
) -> Answers:
    """The answers of the subjects of a module to each clause of their kinds.

    Args:
        module: where they are registered, a name or a path.
        subjects: of that module.
        device: ``cpu`` or ``cuda``.
        limit_s: for one clause, in seconds.
        scripts: folder for reproducers; a break without one that works has none.

    Returns:
        Subject -> clause -> answer.
    """
    known: Answers = {
        subject.name: {c: not_run(why) for c, why in subject.skip.items() if c in subject.clauses}
        for subject in subjects
    }
    of = {subject.name: subject for subject in subjects}
    with tempfile.TemporaryDirectory(prefix="staleproof-") as name:
        folder = Path(name) if scripts is not None else None
        while questions := _left(subjects, known):
            limit = START_S + limit_s * sum(len(clauses) for _, clauses in questions)
            ended = children.call(ask, module, questions, device, limit_s, folder, timeout_s=limit)
            texts: dict[tuple[str, str], str] = {}
            for kernel, clause, answer, text in ended.answers:
                texts[kernel, clause] = text
                if answer is not None:
                    known[kernel][clause] = answer
            if not texts:
                # It ends before any question, for example because the module does not load here.
                known[questions[0][0]]["0"] = breaks(f"does not load: {_ended(ended, START_S)}")
                continue
            kernel, clause = next(reversed(texts))
            if clause not in known[kernel]:
                known[kernel][clause] = judged(breaks(_ended(ended, limit_s)), of[kernel], clause)
            for (kernel, clause), text in texts.items():
                answer = known[kernel][clause]
                if answer.verdict in (BREAKS, UNDEFINED) and folder and scripts:
                    stem = reproducer.name_of(kernel, clause)
                    known[kernel][clause] = _with_script(answer, text, folder / stem, scripts, limit_s)
    return {subject.name: _complete(subject, known[subject.name]) for subject in subjects}


def _with_script(answer: Answer, text: str, draft: Path, scripts: Path, limit_s: float) -> Answer:
    """The answer with its reproducer, if that shows the break; its two files then go to ``scripts``."""
    script, inputs = draft.with_name(f"{draft.name}.py"), draft.with_name(f"{draft.name}.pt")
    # One that hangs would be waited for once more.
    if not inputs.is_file() or answer.note.startswith(TIMED_OUT):
        return answer
    script.write_text(text)
    if not reproducer.is_shown(answer.note, script, limit_s):
        return answer
    scripts.mkdir(parents=True, exist_ok=True)
    for file in (script, inputs):
        shutil.copy(file, scripts / file.name)
    return replace(answer, script=text)


def _complete(subject: Subject, found: dict[str, Answer]) -> dict[str, Answer]:
    first = found.get("0", not_run("not asked: ended before"))
    why = "not asked: wrong on clean input"
    if first.verdict == NOT_RUN:
        why = first.note
    elif first.verdict == NOT_TESTED:
        why = f"not asked: {WRONG_SETTING}"
    return {clause: found.get(clause, not_run(why)) for clause in subject.clauses}


def audit_here(kernel: Callable[..., object], device: str | None = None) -> list[Answer]:
    """Put one registered kernel through the contract in this process, as a notebook wants it.

    No clause has a time limit, and a kernel that ends its process ends this one; :func:`audit` uses children.

    Args:
        kernel: a function with a decorator of :mod:`staleproof.audit`.
        device: ``cpu`` or ``cuda``; by default the best that this machine has.

    Returns:
        An answer a clause; for a kernel that is wrong on clean input the others are "not run".

    Raises:
        ValueError: the function has no such decorator.

    >>> from staleproof.contract.examples import fp8_per_tensor
    >>> [f"{one.clause} {one.verdict}" for one in audit_here(fp8_per_tensor, "cpu")]
    ['0 holds', 'R breaks', 'W holds', 'O holds']
    """
    subjects: Sequence[Subject] = getattr(kernel, "__dict__", {}).get(_MARK, ())
    name = getattr(kernel, "__name__", repr(kernel))
    require(bool(subjects), "kernel", "a function under a decorator of staleproof.audit", name)
    device, found = devices.select(device), []
    for subject in subjects:
        why = unavailable_reason(subject)
        known = {clause: not_run(why) for clause in subject.clauses if why}
        known |= {clause: not_run(text) for clause, text in subject.skip.items() if clause in subject.clauses}
        probes = {} if why else probes_of(subject)
        for _, left in _left([subject], {subject.name: known}):
            for clause in left:
                known[clause] = judged(ask_one(probes[clause], device)[0], subject, clause)
                if clause == "0" and not _goes_on(known[clause]):
                    break
        answers = _complete(subject, known)
        found += [replace(one, kernel=subject.name, clause=clause) for clause, one in answers.items()]
    return found


def audit(
    modules: Sequence[str],
    device: str | None = None,
    *,
    limit_s: float = LIMIT_S,
    scripts: Path | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Iterator[Answer]:
    """Put the kernels of modules through the contract, each in a process of its own.

    Args:
        modules: a list of names, or paths that end in ``.py``.
        device: ``cpu`` or ``cuda``; by default the best that this machine has.
        limit_s: for one clause of one kernel, in seconds.
        scripts: folder for reproducers, each a script and a file of inputs.
        progress: takes one line about the kernel that is next.

    Returns:
        An answer a clause, kernel after kernel, each when it is known. A module that does not import, that
        registers no kernel, or in which a decorator is at fault is one answer, "not tested".

    Raises:
        ValueError: a module that is not there, or ``limit_s`` is no number of seconds above 0; while it is
            iterated: two modules have a kernel of one name.
        DeviceError: there is no such device here.
        OSError: ``scripts`` cannot be written, while it is iterated.

    >>> for answer in audit(["typing"], "cpu"):
    ...     print(answer.kernel, answer.verdict, answer.note, sep=", ")
    typing, not tested, registers no kernel
    """
    check_modules(modules)
    is_number = type(limit_s) in (int, float) and 0 < limit_s < math.inf
    require(is_number, "limit_s", "seconds, more than 0", repr(limit_s))
    return _audited(modules, devices.select(device), limit_s, scripts, progress)


def _audited(
    modules: Sequence[str],
    device: str,
    limit_s: float,
    scripts: Path | None,
    progress: Callable[[str], object],
) -> Iterator[Answer]:
    owners: dict[str, str] = {}
    for module in modules:
        try:
            subjects = subjects_in(module)
        except children.ChildError as error:
            yield Answer(NOT_TESTED, str(error), module, "0")
            continue
        if not subjects:
            yield Answer(NOT_TESTED, NO_KERNEL, module, "0")
        for subject in subjects:
            owner = owners.setdefault(subject.name, module)
            got = f"{subject.name!r} in {owner} and in {module}"
            require(owner == module, "modules", "another name for each kernel", got)
        for subject in subjects:
            progress(subject.name)
            if why := unavailable_reason(subject):
                found = {clause: not_run(why) for clause in subject.clauses}
            else:
                found = answers(module, [subject], device, limit_s, scripts)[subject.name]
            for clause, answer in found.items():
                yield replace(answer, kernel=subject.name, clause=clause)
