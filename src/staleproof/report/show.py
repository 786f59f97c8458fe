"""What notebook cells call: the banner, tables, verdict lines, recorded runs, a slider.

A table is HTML in a notebook, coloured by outcome, and the same words as plain text, which nbval compares.
A verdict line begins with the provenance.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from staleproof import device as devices
from staleproof import runs as store
from staleproof.check import require
from staleproof.grades import REPLICA, Evidence
from staleproof.lab import Finding, Key, Outcome, finding, good_if
from staleproof.report import matrix
from staleproof.triage.text import aligned

Expected = str | Sequence[str] | Mapping[str, str] | None


def start(device: str) -> str:
    """Choose the device of this notebook and print the banner.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        ``cpu`` or ``cuda``.

    Raises:
        DeviceError: unknown or absent device.
    """
    chosen = devices.select(device)
    m = devices.machine()
    driver = f" · driver {m.driver}" if m.driver else ""
    print(
        f"machine: {m.name}{driver} · Python {m.python} · torch {m.torch} · triton {m.triton} · "
        f"flashinfer {m.flashinfer} · vllm {m.vllm} · {devices.provenance()}"
    )
    return chosen


def observed(what: str, verdict: object, expected: object, evidence: Evidence = REPLICA) -> Finding:
    """What a cell computed by itself, as a finding that :func:`verdict` takes.

    Args:
        what: the question in a few words.
        verdict: what came out.
        expected: what the verdict line claims.
        evidence: whose code ran.

    >>> observed("rows with NaN", 5, 5).ok
    True
    """
    ok = str(verdict) == str(expected)
    answer = good_if(ok, "as claimed" if ok else "otherwise", found=str(verdict), claimed=str(expected))
    return finding(Key("notebook", what, "here"), answer, expected="as claimed", evidence=evidence)


class Printed(int):
    """Whether a verdict line was printed: true or false. A cell that ends in it shows nothing more."""

    def _ipython_display_(self) -> None:
        pass

    def __repr__(self) -> str:
        return str(bool(self))


def ran(findings: Finding | Iterable[Finding]) -> bool:
    """Whether all findings were run; prints a line for each that was not.

    For cells that compute with the numbers of findings: a finding that was not run has none.

    >>> from staleproof.lab import not_run
    >>> absent = finding(Key("an_incident", "served", "theirs"), not_run("needs a CUDA device"))
    >>> ran([observed("rows", 5, 5), absent])
    not run, so no verdict: served, theirs: needs a CUDA device
    False
    """
    absent = [f for f in _as_list(findings) if not f.ran]
    for f in absent:
        print(f"not run, so no verdict: {f.question}, {f.variant}: {f.note}")
    return not absent


def _as_list(findings: Finding | Iterable[Finding]) -> list[Finding]:
    found = [findings] if isinstance(findings, Finding) else list(findings)
    require(bool(found), "findings", "those that the verdict rests on", "none")
    return found


def verdict(text: str, findings: Finding | Iterable[Finding], expected: Expected = None) -> Printed:
    """Print one verdict line, if its findings say so: provenance, grade, then ``text``.

    Args:
        text: what the findings show.
        findings: all findings that the text rests on.
        expected: the verdicts that it rests on: one for all findings, one each in order, or by variant.
            By default each finding's own expected verdict, which it must have.

    Returns:
        Whether the line was printed. If a finding was not run, a line with the reason is printed
        instead: nothing speaks for what did not run.

    Raises:
        ValueError: no findings, or a finding without any expected verdict.
        AssertionError: a finding ran and has another verdict.

    >>> verdict("five rows hold NaN", observed("rows with NaN", 5, 5))
    INTERPRETED replica: five rows hold NaN
    True
    >>> from staleproof.lab import not_run
    >>> absent = finding(Key("an_incident", "served", "theirs"), not_run("needs a CUDA device"))
    >>> verdict("it leaks", absent, "leaked")
    not run, so no verdict: served, theirs: needs a CUDA device
    False
    """
    found = _as_list(findings)
    if isinstance(expected, str) or expected is None:
        wanted: list[str | None] = [expected or f.expected for f in found]
    elif isinstance(expected, Mapping):
        wanted = [expected[f.variant] for f in found]
    else:
        require(len(expected) == len(found), "expected", f"{len(found)} verdicts", len(expected))
        wanted = list(expected)
    answers = [(f, want) for f, want in zip(found, wanted, strict=True) if f.ran]
    missing = [f.variant for f, want in answers if want is None]
    require(not missing, "expected", "a verdict for every finding", f"none for {missing}")
    other = [f for f, want in answers if f.verdict != want]
    assert not other, [(f.question, f.variant, f.verdict) for f in other]
    printed = Printed(ran(found))
    if printed:
        print(f"{matrix.provenance(found)} {matrix.grades(found)}: {text}")
    return printed


# Outcome -> the look of its cell: translucent, so that it is legible on a light and on a dark page. The words
# say the same without colours.
STYLES: Mapping[str, str] = {
    Outcome.GOOD: "background: #56b4e940",
    Outcome.BAD: "background: #d55e0055; font-weight: 600",
    Outcome.OPEN: "background: #e69f0033",
    Outcome.NOT_RUN: "opacity: .75; font-style: italic",
}


class Table:
    """Rows under their column names: aligned text, and in a notebook HTML.

    Args:
        columns: names of the columns.
        rows: cells of each row. A finding is its verdict, in the colour of its outcome; so is a pair of a
            verdict and an outcome. Other cells have no colour: the same word can be good for one question and
            bad for another.

    Raises:
        ValueError: a row of another length.

    >>> from staleproof.lab import bad
    >>> leaked = finding(Key("an_incident", "live count", "1 of 16"), bad("leaked"))
    >>> shown = Table(("live", "verdict"), [(1, leaked)])
    >>> print(shown)
    live  verdict
    ----  -------
    1     leaked
    >>> "font-weight: 600" in shown._repr_html_()
    True
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.columns = [*map(str, columns)]
        cells = [[_cell(cell) for cell in row] for row in rows]
        for row in cells:
            require(len(row) == len(self.columns), "rows", f"{len(self.columns)} cells a row", len(row))
        self.rows = [[text for text, _ in row] for row in cells]
        self.styles = [[STYLES.get(outcome, "") for _, outcome in row] for row in cells]

    def __repr__(self) -> str:
        return "\n".join(aligned(self.columns, self.rows))

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align: left'>{html.escape(name)}</th>" for name in self.columns)
        lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
        for texts, styles in zip(self.rows, self.styles, strict=True):
            cells = (
                f"<td style='text-align: left; {style}'>{html.escape(text)}</td>"
                for text, style in zip(texts, styles, strict=True)
            )
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</tbody></table>"])


def _cell(cell: object) -> tuple[str, str]:
    """The text of a cell, and the outcome that colours it."""
    if isinstance(cell, Finding):
        return cell.verdict, cell.outcome
    if isinstance(cell, tuple) and len(cell) == 2 and isinstance(cell[1], Outcome):
        return str(cell[0]), cell[1]
    return str(cell), ""


def _show(shown: object) -> None:
    """Display an object in a notebook; elsewhere print it."""
    if "IPython" in sys.modules:
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is not None:
            display(shown)
            return
    print(shown)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Show rows under their column names; see :class:`Table`.

    >>> table(("row", "state"), [(0, "finite"), (127, "nan")])
    row  state
    ---  ------
    0    finite
    127  nan
    """
    _show(Table(columns, rows))


def answers(findings: Iterable[Finding]) -> None:
    """Show a row for each variant, a column for each question, and what was not run and why."""
    found = list(findings)
    questions = list(dict.fromkeys(f.question for f in found))
    variants = list(dict.fromkeys(f.variant for f in found))
    rows: list[list[object]] = [[variant, *(matrix.NOT_ASKED for _ in questions)] for variant in variants]
    for f in found:
        rows[variants.index(f.variant)][1 + questions.index(f.question)] = f
    _show(Table(("", *questions), rows))
    for variant, note in dict.fromkeys((f.variant, f.note) for f in found if not f.ran):
        print(f"not run: {variant}: {note}")


def fixes(findings: Iterable[Finding]) -> None:
    """Show a row for each remedy that ran: the verdicts off / on / off, and what they show.

    >>> from staleproof.lab import Three, good
    >>> three = Three("leaked", "clean", "leaked", ("bad", "good", "bad"), right=True)
    >>> fixes([finding(Key("an_incident", "off/on/off", "ours"), good("fixed"), three=three)])
    variant  off     on     off again  verdict
    -------  ------  -----  ---------  -------
    ours     leaked  clean  leaked     fixed
    """
    rows = []
    for f in findings:
        if three := f.three:
            runs = zip((three.off, three.on, three.again), three.outcomes, strict=True)
            rows.append((f.variant, *runs, f))
    table(("variant", "off", "on", "off again", "verdict"), rows)


class Badge:
    """One verdict as a badge in the colour of its outcome.

    >>> Badge("leaked", Outcome.BAD)
    leaked
    """

    def __init__(self, verdict: str, outcome: Outcome) -> None:
        self.text, self.style = verdict, STYLES[outcome]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<p style='padding: .3em .6em; {self.style}'>{html.escape(self.text)}</p>"


def recorded_answers(incident: str, *questions: str, variants: str | Sequence[str] = "") -> None:
    """Show what each recorded run answered to some questions. It proves nothing about this machine.

    Args:
        incident: folder name, e.g. ``mla_padding``; ``engine`` for the runs of a whole vLLM.
        questions: a table has their answers in the order of the run.
        variants: only variants with this text in their name, or with one of these.
    """
    texts = (variants,) if isinstance(variants, str) else tuple(variants)
    shown = False
    for run in store.read_all(on_error=_not_shown):
        own = [f for f in run.findings if f.incident == incident and f.question in questions]
        found = [f for f in own if any(text in f.variant for text in texts)]
        if not found:
            continue
        shown = True
        answered = [f for f in found if f.ran]
        release = {f.of for f in answered}
        of = f"{release.pop()}, " if len(release) == 1 and "" not in release else ""
        print(f"RECORDED {of}{run.only(found).title}")
        if len(questions) == 1:
            table(("variant", *questions), ((f.variant, f) for f in answered))
        else:
            table(("question", "variant", "answer"), ((f.question, f.variant, f) for f in answered))
        if len(answered) < len(found):
            print(f"not run there: {len(found) - len(answered)}")
    if not shown:
        print("no recorded run has this question yet: staleproof record makes one")


def _not_shown(error: Exception) -> None:
    print(f"not shown: {error}")


def has_front_end() -> bool:
    """Whether a reader can move a widget: in JupyterLab or VS Code, with ipywidgets installed.

    nbclient, nbconvert and nbval set neither of the two marks that are looked for.
    """
    try:
        import ipywidgets  # noqa: F401
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    in_code = shell is not None and "__vsc_ipynb_file__" in shell.user_ns
    return in_code or "JPY_SESSION_NAME" in os.environ


def turn(
    draw: Callable[..., object], instead: Callable[[], object], **knobs: range | Sequence[object]
) -> None:
    """Show a control for each knob if a reader can move it, otherwise call ``instead``.

    Args:
        draw: shows one state: called with a value of each knob, by its name.
        instead: shows a table of states, for who has no kernel.
        knobs: the values of each: a range becomes a slider, two values a toggle, more a menu.
    """
    if not has_front_end():
        instead()
        return
    import ipywidgets

    handles = {}
    for name, values in knobs.items():
        if isinstance(values, range):
            handles[name] = ipywidgets.IntSlider(
                *(values[0], values[0], values[-1], values.step), description=name, continuous_update=False
            )
        else:
            kind = ipywidgets.ToggleButtons if len(values) == 2 else ipywidgets.Dropdown
            handles[name] = kind(options=list(values), description=name)
    ipywidgets.interact(draw, **handles)
