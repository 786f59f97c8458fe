"""The book builds without a warning, and every link inside it leads to a place that is there."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", name="book")
def book_fixture(tmp_path_factory):
    """The folder of the built pages."""
    pytest.importorskip("sphinx", reason="the book needs pip install -e '.[book]'")
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "book", "."]
    done = subprocess.run(
        [*command, folder / "html", "-d", folder / "doctrees"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def places(page: str) -> set[str]:
    """The names that a link may point to."""
    return set(re.findall(r"""\b(?:id|name)=["']([^"']+)["']""", page)) | {"", "top"}


def test_every_link_inside_the_book_leads_somewhere(book):
    pages = {path: re.sub(r"(?s)<script.*?</script>", "", path.read_text()) for path in book.rglob("*.html")}
    names = {path: places(text) for path, text in pages.items()}
    dead = []
    for path, text in pages.items():
        for link in re.findall(r'<a\b[^>]*?\bhref="([^"]*)"', text):
            url = urlsplit(link.replace("&amp;", "&"))
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.exists() or unquote(url.fragment) not in names.get(target, {unquote(url.fragment)}):
                dead.append(f"{path.name}: {link}")
    assert len(pages) > 20
    assert dead == []


def test_no_page_asks_another_machine(book):
    pages = [*book.rglob("*.html")]
    asked = [
        re.findall(r'(?:<script[^>]*?src|<link[^>]*?href)="(https?:[^"]+)"', p.read_text()) for p in pages
    ]
    assert not [address for addresses in asked for address in addresses]
