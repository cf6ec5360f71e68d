"""The site: builds strictly, needs no network, and is whole in a browser at a desk's and at a phone's width."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate
import performance_page
import pytest
from browser import as_it_was, barriers, complaints, emulate, overflow
from browser import browser as browser
from PIL import Image, ImageStat
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parents[1]
DESK, PHONE = 1400, 390
# Pages that have what others lack: the front, long tables, code, plots, figures, a file's text, the search.
KINDS = (
    *("README.html", "CONTRIBUTING.html", "search.html", "cute_softmax/ladder/rung3_warp.py.html"),
    *("docs/how-it-works.html", "docs/reference.html", "docs/performance.html", "docs/plan-classes.html"),
    *("docs/layouts/gallery.html", "docs/layouts/plans.html"),
)
EXPLORERS = ("docs/layouts/explorer.html", "docs/layouts/plan_explorer.html")


def build(root: Path, out: Path, *options: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-E",
        "-W",
        "--keep-going",
        *options,
        "-c",
        "docs",
        ".",
        out,
    ]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def phone_and_desk(browser):
    yield browser
    as_it_was(browser)


def pages_of_index() -> list[str]:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    links = re.findall(r"^\| \[.*?\]\((\S+?)\.md\)", text, re.M)
    return [os.path.normpath(f"docs/{link}.html") for link in links]


def test_every_page_of_the_index_is_built_and_in_the_navigation(site):
    front = (site / "README.html").read_text(encoding="utf-8")
    assert len(pages_of_index()) > 25
    for page in pages_of_index():
        assert (site / page).exists(), page
        assert f'href="{page}"' in front, page
    assert "url=README.html" in (site / "index.html").read_text(encoding="utf-8")


def test_every_markdown_page_is_on_the_site(site):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True
    )
    for name in listed.stdout.decode().split():
        assert (site / name).with_suffix(".html").exists(), name


def test_nothing_comes_from_elsewhere(site):
    """Links may lead out of the site; what a page loads may not."""
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(\w+:)?//|<link[^>]*\shref=\"(\w+:)?//(?!\S*canonical)"
    )
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?https?:|@import", sheet.read_text(encoding="utf-8")), sheet


def test_links_to_files_show_them(site):
    ladder = (site / "docs" / "ladder.html").read_text(encoding="utf-8")
    assert 'href="../cute_softmax/ladder/rung0_naive.py.html"' in ladder
    shown = (site / "cute_softmax" / "ladder" / "rung0_naive.py.html").read_text(encoding="utf-8")
    assert "highlight" in shown and "cute" in shown
    assert (site / EXPLORERS[0]).read_text() == (ROOT / EXPLORERS[0]).read_text()


def test_links_to_nowhere_fail_the_build(tmp_path):
    """Of two pages, with the site's own configuration."""
    (tmp_path / "docs").mkdir()
    for name in ("conf.py", "_static"):
        place = ROOT / "docs" / name
        (shutil.copytree if place.is_dir() else shutil.copyfile)(place, tmp_path / "docs" / name)
    for package in ("cute_softmax", "layouts"):
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "docs" / "index.md").write_text(
        "# All\n\n## One\n\n| [Ladder](ladder.md) |\n| [All](index.md) |\n"
    )
    (tmp_path / "docs" / "ladder.md").write_text("# The ladder\n\nA page.\n")
    (tmp_path / "README.md").write_text("# Front\n\n[ladder](docs/ladder.md#the-ladder)\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    bad = "[a](nowhere-a.md) [b](ladder.md#nowhere-b) ![c](figures/nowhere-c.svg)"
    (tmp_path / "docs" / "ladder.md").write_text(f"# The ladder\n\nA page.\n\n{bad}\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode == 1 and all(f"nowhere-{which}" in done.stderr for which in "abc"), done.stderr


def test_pages_are_whole_and_accessible(site, phone_and_desk):
    """On a desk's and on a phone's width, in light and dark, no page is wider than its window, and the console has
    nothing to say. Nothing keeps anybody out: half of the kinds at a desk, the others on a phone; the colours in light
    and dark, as structure is the same."""
    kinds = (*KINDS, *EXPLORERS)
    complaints(phone_and_desk)
    for page in sorted({*pages_of_index(), *kinds}):
        for width in (DESK, PHONE):
            emulate(phone_and_desk, width)
            if width == DESK or page in EXPLORERS:  # which lay themselves out as they are opened
                phone_and_desk.get((site / page).as_uri())
            for dark in (False, True):
                if dark:
                    emulate(phone_and_desk, width, dark)
                assert overflow(phone_and_desk) <= 0, (page, width, dark)
                if page in kinds[width == PHONE :: 2]:
                    assert barriers(phone_and_desk, *["color-contrast"] * dark) == [], (page, width, dark)
        assert complaints(phone_and_desk) == [], page


def test_what_is_too_wide_for_a_phone_is_found(phone_and_desk, tmp_path):
    """In a page that was opened at a desk's width."""
    head = '<!DOCTYPE html><meta name="viewport" content="width=device-width, initial-scale=1">'
    (tmp_path / "page.html").write_text(f'{head}<div style="width: 700px">wide</div>')
    found = []
    for width in (DESK, PHONE):
        emulate(phone_and_desk, width)
        if width == DESK:
            phone_and_desk.get((tmp_path / "page.html").as_uri())
        found.append(overflow(phone_and_desk))
    assert found[0] <= 0 < found[1]


def test_a_barrier_is_found(phone_and_desk, tmp_path):
    (tmp_path / "page.html").write_text('<!DOCTYPE html><html lang="en"><title>t</title><img src="data:,">')
    phone_and_desk.get((tmp_path / "page.html").as_uri())
    assert any(found.startswith("image-alt") for found in barriers(phone_and_desk))


def test_a_barrier_of_the_dark_is_found(phone_and_desk, tmp_path):
    style = "@media (prefers-color-scheme: dark) {body {background: #000; color: #222}}"
    page = f'<!DOCTYPE html><html lang="en"><title>t</title><style>{style}</style><main><p>words</main>'
    (tmp_path / "page.html").write_text(page)
    found = []
    for dark in (False, True):
        emulate(phone_and_desk, DESK, dark)
        phone_and_desk.get((tmp_path / "page.html").as_uri())
        found.append(barriers(phone_and_desk, "color-contrast"))
    assert found[0] == [] and found[1][0].startswith("color-contrast")


def test_figures_turn_dark_with_the_page(site, phone_and_desk):
    """By the page's own switch, too: an image follows the color scheme of what it stands in."""
    emulate(phone_and_desk, DESK)
    phone_and_desk.get((site / "docs/how-it-works.html").as_uri())

    def lightness() -> float:
        figure = phone_and_desk.find_element(By.CSS_SELECTOR, "article img").screenshot_as_png
        return ImageStat.Stat(Image.open(io.BytesIO(figure)).convert("L")).median[0]

    assert lightness() > 230
    phone_and_desk.execute_script("document.body.dataset.theme = 'dark'")
    assert lightness() < 60


def test_the_search_works_from_a_disk(site, browser):
    browser.get((site / "search.html").as_uri() + "?q=panel")
    link = "#search-results li a[href*='how-it-works.html']"
    WebDriverWait(browser, 20).until(lambda b: b.find_elements(By.CSS_SELECTOR, link))


def test_no_long_page_lacks_a_contents_list(site):
    for page in pages_of_index():
        source = (ROOT / page).with_suffix(".md").read_text(encoding="utf-8")
        if len(source.split()) > 3000:
            assert "toc-tree" in (site / page).read_text(encoding="utf-8"), page


def test_every_suite_is_on_one_page():
    """And each page's block is in a page."""
    for path in performance_page.RESULTS.glob("*.json"):
        page = performance_page.page_of(path.stem)
        special = (performance_page.MAP, *performance_page.LADDER, *performance_page.TABLED)
        assert (page in performance_page.PAGES) != path.stem.startswith(special)
    text = "".join(page.read_text(encoding="utf-8") for page in generate.PAGES)
    assert all(f"<!-- generated: {name} -->" in text for name in performance_page.BLOCKS)
