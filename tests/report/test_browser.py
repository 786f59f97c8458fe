"""The report in a real browser: what it loads, how it looks, where its links lead, how it prints."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from staleproof import runs as store
from staleproof.report import html
from staleproof.report.notebooks import Execution

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@contextmanager
def opened(browser: Any, path: Path, size: dict[str, int], scheme: str = "light") -> Iterator[Any]:
    """The file in a window of this size, in the light or the dark theme.

    Yields:
        ``page``, Playwright's; ``said``, what it wrote to the console, and its errors; ``asked``, the
        addresses that it requested.
    """
    context = browser.new_context(viewport=size, color_scheme=scheme)
    try:
        found = SimpleNamespace(page=context.new_page(), said=[], asked=[])
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.goto(path.as_uri())
        yield found
    finally:
        context.close()


for package in ("axe_playwright_python", "playwright"):
    pytest.importorskip(package, reason=f'{package} is not installed: pip install -e ".[browser]"')
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

# What somebody on call types, and the incident whose card then says what to do.
JOURNEYS = {
    "gb200 garbage": "mla_padding",
    "oom upgrade": "decode_buffer",
    "illegal fused moe": "moe_routing",
}
UNFOLD = "for (const one of document.querySelectorAll('details')) one.open = true"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """The page of the committed notebooks and recorded runs, in a folder of its own: moved alone."""
    runs = store.read_all()
    sources = sorted((store.checkout() / "notebooks").glob("*.ipynb"))
    made = html.page(runs[0].findings, runs, [Execution(path) for path in sources])
    path = tmp_path_factory.mktemp("moved") / "report.html"
    path.write_text(made)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A container's root has no sandbox of its own; the page is our own file.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield started
        started.close()


@pytest.fixture(scope="module")
def page(browser, report) -> Iterator[Any]:
    """The page on a desktop, for tests that only look at it."""
    with opened(browser, report, DESKTOP) as seen:
        yield seen.page


def test_it_loads_nothing_and_says_nothing(browser, report):
    with opened(browser, report, DESKTOP) as seen:
        seen.page.emulate_media(color_scheme="dark")
        seen.page.evaluate(UNFOLD)
        seen.page.wait_for_timeout(200)
        assert seen.said == []
        assert seen.asked == [report.as_uri()]


def test_it_is_short_and_light_on_screen_and_on_paper(page, report, tmp_path):
    assert report.stat().st_size < 4_000_000
    assert page.evaluate("document.documentElement.scrollHeight") < 12 * DESKTOP["height"]
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    paper = (tmp_path / "report.pdf").read_bytes()
    assert len(paper) < 5_000_000
    assert 3 < len(re.findall(rb"/Type\s*/Page\b", paper)) < 25


def test_nothing_scrolls_sideways_and_tables_wrap_on_a_phone(browser, report):
    width = "document.documentElement.scrollWidth"
    with opened(browser, report, DESKTOP) as seen:
        for unfold in ("", UNFOLD):
            seen.page.evaluate(unfold)
            for size in (DESKTOP, {"width": 768, "height": 1024}, PHONE):
                seen.page.set_viewport_size(size)
                assert seen.page.evaluate(width) == size["width"]
        wide = seen.page.evaluate(
            "[...document.querySelectorAll('main table')].filter("
            "(one) => one.getBoundingClientRect().right > 390).map((one) => one.textContent.slice(0, 60))"
        )
        assert wide == []
        # Each value says which column it is of.
        first_row = "#triage tbody tr:first-child td"
        labels = f"[...document.querySelectorAll('{first_row}')].map((one) => one.dataset.label)"
        assert "Do now" in seen.page.evaluate(labels)


def test_every_link_is_alive(page):
    dead = page.evaluate(
        """[...document.querySelectorAll('a[href]')].map((one) => one.getAttribute('href')).filter(
        (to) => !/^https:/.test(to) && !(to[0] === '#' && document.getElementById(to.slice(1))))"""
    )
    assert dead == []


def test_a_link_opens_the_fold_that_its_target_is_in(browser, report):
    with opened(browser, report, DESKTOP) as seen:
        target = seen.page.locator("p:has(> #live-row)")
        assert not target.is_visible()
        seen.page.evaluate("location.hash = 'live-row'")
        target.wait_for(state="visible", timeout=5_000)
        assert seen.page.locator("#doc-glossary").bounding_box()


def test_one_click_leads_from_a_symptom_to_what_to_do_its_proof_and_its_cost(browser, report):
    with opened(browser, report, DESKTOP) as seen:
        page = seen.page
        assert page.locator("#filter").bounding_box()["y"] < 300
        for words, incident in JOURNEYS.items():
            page.fill("#filter", words)
            page.locator("#triage tbody tr:visible").first.locator("th a").click()
            card = page.locator(".card:target")
            assert card.get_attribute("id") == incident
            for what in ("Do now", "STALEPROOF_PATCHES=", "Off / on / off", "Cost"):
                assert what in card.inner_text(), what
            assert card.locator("img").count() == 1
            assert card.locator(".grade").count() >= 1
            # The second click leads into the chapter, which is folded.
            card.locator(".journey a", has_text="Fix").first.click()
            shown = page.locator(":target")
            assert shown.get_attribute("open") is not None
            assert shown.evaluate("(one) => one.getBoundingClientRect().top < innerHeight")


def test_a_release_marks_each_row_as_affected_or_not(browser, report):
    with opened(browser, report, DESKTOP) as seen:
        page = seen.page
        page.fill("#release", "v0.18")
        marks = page.locator("#triage .mark").all_inner_texts()
        assert {"0.18.1: affected", "0.18.1: not affected"} == set(marks)
        assert page.locator("#filtered").inner_text() == f"{marks.count('0.18.1: affected')} affect 0.18.1"
        page.fill("#release", "9.9")
        assert set(page.locator("#triage .mark").all_inner_texts()) == {"unknown"}
        assert "9.9 is no release we know: 0.16.0 to" in page.locator("#filtered").inner_text()
        page.fill("#filter", "no such word")
        assert page.locator("#triage tbody tr:visible").count() > 5


def test_the_guided_figure_goes_through_a_step_stage_by_stage(browser, report):
    with opened(browser, report, DESKTOP) as seen:
        page = seen.page
        stages, said = page.locator("#step .stage"), page.locator("#step .says p:visible")
        # Where rows 0 (a request) and 7 (padding) stand after the stages that are shown.
        states = """(row) => [...document.querySelectorAll('#step .stage:not(.hidden)')].map(
            (one) => one.querySelectorAll('rect')[row].getAttribute('class'))"""
        assert (page.evaluate(states, 0), page.locator("#back").is_disabled()) == (["stale"], True)
        assert "The graph was captured" in said.inner_text()
        page.click("#next")
        page.click("#next")
        assert page.evaluate(states, 0) == ["stale", "finite", "leaked"]
        assert page.evaluate(states, 7) == ["stale", "nan", "nan"]
        assert said.inner_text().startswith("quantise: The quantiser takes one scale")
        # The remedy, switched on in the middle of the step, and stepping goes on from there.
        page.check("#cured")
        assert page.evaluate(states, 0) == page.evaluate(states, 7) == ["stale", "finite", "finite"]
        page.click("#back")
        assert page.evaluate(states, 7) == ["stale", "finite"]
        for _ in range(stages.count() - 2):
            page.click("#next")
        assert page.locator("#next").is_disabled()
        assert said.inner_text().startswith("logits: Three requests answer")


def test_real_and_replica_are_told_apart_without_reading(page):
    edge = "(one) => getComputedStyle(one).borderLeftStyle + ' ' + getComputedStyle(one).borderLeftColor"
    looks = {
        grade: {
            page.locator(place).first.evaluate(edge) for place in (f".card.{grade}", f".triage tr.{grade} th")
        }
        for grade in ("real", "replica")
    }
    assert [len(found) for found in looks.values()] == [1, 1]
    assert looks["real"] != looks["replica"]


def test_every_picture_says_what_it_shows(page):
    told = page.evaluate(
        """[...document.querySelectorAll('#incidents figure, .chapter figure')].map((one) => [
        one.querySelector('img').alt, one.querySelector('figcaption').textContent])"""
    )
    assert len(told) > 20
    untold = [alt for alt, caption in told if len(alt.split()) < 8 or not re.search("[A-Z]{8}", caption)]
    # The heat map of the audit has its words in the table below it.
    assert len(untold) <= 1, untold


def test_axe_finds_nothing(browser, report):
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, report, DESKTOP) as seen:
        # Some folds of each kind are enough for their colours and roles. Axe looks at nothing in the others,
        # but takes ten times as long where they are there.
        seen.page.evaluate(
            "for (const id of ['01_mla_padding', 'verdicts', 'patched', 'book'])"
            " for (const one of [...document.getElementById(id).querySelectorAll('details')].slice(0, 2))"
            "  if (one.textContent.length < 8000) one.open = true;"
            "document.querySelectorAll('details:not([open]) > :not(summary)').forEach((one) => one.remove())"
        )
        for size, scheme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")):
            if size is PHONE:
                seen.page.evaluate(UNFOLD.replace("true", "false"))
            seen.page.set_viewport_size(size)
            seen.page.emulate_media(color_scheme=scheme)
            found = Axe().run(seen.page, options={"resultTypes": ["violations"]}).response["violations"]
            said = [(one["id"], one["nodes"][0]["html"][:200]) for one in found]
            assert (size, scheme, said) == (size, scheme, [])


# A page as GitHub lays it out: a column of 830 pixels, cells that wrap between words, code that does not.
GITHUB = """<!doctype html><html lang="en"><meta charset="utf-8"><title>README</title><style>
:root { color-scheme: light dark; } body { width: 830px; margin: 0; font: 16px/1.5 sans-serif; }
img { max-width: 100%; } pre { overflow: auto; padding: 16px; font-size: 13.6px; line-height: 1.45; }
table { border-collapse: collapse; } th, td { border: 1px solid; padding: 6px 13px; }
code { font-size: 13.6px; }
</style>"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readme_fits_githubs_column_and_says_what_to_type_at_once(browser, tmp_path, scheme):
    root = store.checkout()
    page = tmp_path / "readme.html"
    text = str(html.render((root / "README.md").read_text(), 0)).replace('<div class="wide">', "<div>")
    page.write_text(GITHUB + text.replace('src="workbook/', f'src="{root.as_uri()}/workbook/'))
    with opened(browser, page, {"width": 830, "height": 900}, scheme) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 830
        wide = "[...document.querySelectorAll('pre, table')].filter((one) => one.scrollWidth > 830).length"
        assert seen.page.evaluate(wide) == 0
        assert seen.page.locator("img").evaluate("(one) => one.naturalWidth") > 0
        first = seen.page.locator("pre").first.bounding_box()
        assert first["y"] + first["height"] < 900
        assert "staleproof run" in seen.page.locator("pre").first.inner_text()
