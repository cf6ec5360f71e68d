"""The explorer in headless Chromium: no console error, linked highlights, keyboard, the walk.

Needs Chromium and ChromeDriver (Debian: chromium, chromium-driver), see ``conftest.py``.
"""

from __future__ import annotations

import json
import re

import pytest
from browser import as_it_was, emulate, overflow
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from layouts import Layout, figures, parse
from layouts.__main__ import main
from layouts.html import Step, explorer, save_explorer
from layouts.walk import row_walk

TV = parse("((32,4),8):((32,1),4)")
BUFFER = Layout.ordered((1, (4, 2), 1), (1, 0, 2))


def page_figures():
    memory = Layout((4, 256), (1000, 1))
    return {
        "load": figures.thread_value(TV, (4, 256), element_bytes=2, memory=memory, space="gX"),
        "again": figures.tiled_copy(TV, TV, (4, 256), names=("gX", "gO"), memories=(memory, memory)),
        "predicate": figures.predicate_tensor(Layout((1, 1, 4), (4, 0, 1)), TV, (4, 256), 1000, vector=8),
        "shuffles": figures.warp_shuffle(),
        "buffer": figures.reduction_buffer(BUFFER, element_bytes=8),
        "cluster": figures.cluster_exchange(BUFFER, element_bytes=8),
    }


def steps():
    names = {"tile": "load", "predicate": "predicate", "shuffle": "shuffles", "buffer": "buffer"}
    return row_walk(0, **names, cluster="cluster", output="again")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    return save_explorer(path, page_figures(), title="Rows <of> 1,000", subtitle="bf16", steps=steps())


@pytest.fixture
def page(browser, saved):
    browser.get(saved.as_uri())
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"] == []


def cell(page, figure: int, words: str):
    """The first cell of a figure whose accessible name contains ``words``."""
    return page.find_element(By.CSS_SELECTOR, f"#x-f{figure} g.c[aria-label*='{words}']")


def hover(page, node):
    ActionChains(page).move_to_element(node.find_element(By.TAG_NAME, "rect")).perform()


def marked(page, name: str) -> list[str]:
    found = page.find_elements(By.CSS_SELECTOR, f"g.c.{name}")
    return [node.get_attribute("aria-label") for node in found]


def facts(page) -> dict[str, str]:
    script = (
        "return Object.fromEntries([...document.querySelectorAll('#x-facts dt')]"
        ".map(d => [d.textContent, d.nextSibling.textContent]))"
    )
    return page.execute_script(script)


def test_page_stands_alone(saved):
    text = saved.read_text(encoding="utf-8")
    assert text == explorer(page_figures(), title="Rows <of> 1,000", subtitle="bf16", steps=steps())
    links = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "Rows &lt;of&gt; 1,000" in text and "<of>" not in text


def test_hover_shows_the_facts_of_a_cell(page):
    hover(page, cell(page, 0, "thread 37 · value"))
    assert facts(page) == {
        "thread": "37",
        "value": "0..7",
        "coordinate": "(1, 40..47)",
        "in": "gX",
        "offset": "1040..1047 elements",
        "byte": "2080 bytes",
    }
    assert len(marked(page, "x-here")) == 1


def test_hover_highlights_thread_and_address_in_every_figure(page):
    hover(page, cell(page, 0, "thread 3 · value"))
    same = marked(page, "x-thread")
    assert len(same) >= 5
    assert all(re.match(r"thread (\d|, |\.\.)*\b3\b", label) for label in same)
    figures_hit = page.execute_script(
        "return [...new Set([...document.querySelectorAll('g.c.x-thread')].map(n => "
        "n.closest('section').id))]"
    )
    assert {"x-f0", "x-f1", "x-f2", "x-f3"} <= set(figures_hit)
    address = marked(page, "x-address")
    assert len(address) == 2 and all("gX offset 24..31" in label for label in address)


def test_slots_of_the_cluster_link_by_address(page):
    hover(page, cell(page, 5, "st.async from CTA 0 into CTA 1"))
    address = marked(page, "x-address")
    assert len(address) == 2 and all("of CTA 1 offset 0" in label for label in address)


def test_the_buffer_and_the_cluster_share_their_slots(page):
    hover(page, cell(page, 4, "peer 0"))
    address = marked(page, "x-address")
    assert len(address) == 3 and all("reduction buffer of CTA 0 offset 0" in label for label in address)


def test_keyboard_moves_follows_and_clears(page):
    # the tile's first cell comes after those of the equation above it
    page.execute_script("document.querySelector(\"#x-f0 g.c[aria-label*='thread 0 · value']\").focus()")
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert facts(page)["thread"] == "1"
    page.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert facts(page)["thread"] == "33"
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.find_element(By.ID, "x-thread").get_attribute("value") == "33"
    assert "Thread 33: " in page.find_element(By.ID, "x-found").text
    hover(page, cell(page, 0, "thread 70 · value"))
    assert all("33" in label for label in marked(page, "x-thread"))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert page.find_element(By.ID, "x-thread").get_attribute("value") == ""
    assert marked(page, "x-thread") == []


def test_every_figure_is_reached_by_tab(page):
    stops = page.execute_script(
        "return [...document.querySelectorAll('.x-figure')].map(s => "
        "s.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert stops == [1] * 6


def test_typing_a_thread_follows_it(page):
    box = page.find_element(By.ID, "x-thread")
    box.send_keys("31")
    assert "Thread 31: " in page.find_element(By.ID, "x-found").text
    assert marked(page, "x-thread")
    box.clear()
    box.send_keys("9999")
    assert "occurs in no figure" in page.find_element(By.ID, "x-found").text


def test_walk_goes_through_the_figures(page):
    walk = steps()
    forward, back = page.find_element(By.ID, "x-next"), page.find_element(By.ID, "x-back")
    assert not back.is_enabled()
    for i, step in enumerate(walk):
        forward.click()
        assert page.find_element(By.ID, "x-step").text == step.title
        assert page.find_element(By.ID, "x-count").text == f"{i + 1} of {len(walk)}"
        quiet = page.find_elements(By.CSS_SELECTOR, ".x-quiet")
        assert [q.get_attribute("aria-label") for q in quiet] == [step.figure]
        assert page.find_elements(By.CSS_SELECTOR, ".x-quiet g.c.x-on")
    assert not forward.is_enabled()
    back.click()
    assert page.find_element(By.ID, "x-count").text == f"{len(walk) - 1} of {len(walk)}"


def test_dark_pages_turn_the_figures_dark(page):
    def fill() -> str:
        return page.execute_script("return getComputedStyle(document.querySelector('.x-figure .page')).fill")

    assert fill() == "rgb(255, 255, 255)"
    features = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    assert fill() == "rgb(20, 24, 29)"
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def opacity(page, node) -> str:
    return page.execute_script("return getComputedStyle(arguments[0]).opacity", node)


def test_following_a_thread_dims_the_rest(page):
    mine, other = cell(page, 0, "thread 37 · value"), cell(page, 0, "thread 36 · value")
    assert (opacity(page, mine), opacity(page, other)) == ("1", "1")
    page.find_element(By.ID, "x-thread").send_keys("37")
    assert (opacity(page, mine), opacity(page, other)) == ("1", "0.18")
    page.find_element(By.ID, "x-clear").click()
    assert opacity(page, other) == "1"


def test_the_address_keeps_what_is_seen(page, saved):
    """In a window that has not seen it: the cell, its thread and the step."""
    page.find_element(By.ID, "x-next").click()
    page.find_element(By.ID, "x-next").click()
    page.find_element(By.ID, "x-larger").click()
    ActionChains(page).move_to_element(cell(page, 2, "thread 5 · value")).click().perform()
    sent, shown = page.current_url, (facts(page), marked(page, "x-thread"), marked(page, "x-on"))
    scale = page.find_element(By.ID, "x-scale").text
    assert facts(page)["thread"] == "5" and "#cell=2." in sent and "step=2" in sent
    page.execute_script("scrollTo(0, 0)")
    ActionChains(page).move_to_element(
        page.find_element(By.TAG_NAME, "h1")
    ).perform()  # it would point at a cell
    page.get("about:blank")
    page.get(sent)
    assert (facts(page), marked(page, "x-thread"), marked(page, "x-on")) == shown
    assert page.find_element(By.ID, "x-scale").text == scale
    assert page.find_element(By.ID, "x-thread").get_attribute("value") == "5"
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert "cell" not in page.current_url and "step" not in page.current_url


@pytest.mark.parametrize(
    "hash_", ["#cell=99.0", "#cell=x", "#step=99", "#thread=-1", "#scale=0", "#scale=1e9", "#x-f2"]
)
def test_an_address_that_says_nothing_is_ignored(page, saved, hash_):
    page.get(f"{saved.as_uri()}{hash_}")
    assert marked(page, "x-thread") == [] and page.find_element(By.ID, "x-count").text.endswith("steps")


def widths(page) -> list[tuple[float, float]]:
    """(width of the figure, of the place that it has) of each."""
    script = """return [...document.querySelectorAll('.x-scroll')]
        .map((box) => [box.firstElementChild.getBoundingClientRect().width, box.clientWidth])"""
    return [tuple(pair) for pair in page.execute_script(script)]


def test_nothing_is_cut_on_a_desk(page, saved):
    emulate(page, 1400)
    page.get(saved.as_uri())
    assert all(drawn <= place + 1 for drawn, place in widths(page)) and overflow(page) <= 0
    as_it_was(page)


def test_a_phone_shows_readable_figures_beside_the_facts(page, saved):
    emulate(page, 390)
    page.get(saved.as_uri())
    natural = [figure.width for figure in page_figures().values()]
    for (drawn, place), width in zip(widths(page), natural, strict=True):
        assert drawn >= min(0.6 * width, place) - 1  # larger than the place: it scrolls
    assert overflow(page) <= 0
    page.execute_script(
        "arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", cell(page, 0, "thread 37 ·")
    )
    shown = page.find_element(By.ID, "x-facts").rect
    height, top = page.execute_script("return [innerHeight, scrollY]")
    assert facts(page)["thread"] == "37" and 0 < shown["y"] - top < height
    page.find_element(By.ID, "x-fit").click()
    assert all(drawn <= place + 1 for drawn, place in widths(page))
    as_it_was(page)


def test_scales_go_up_and_down(page):
    (before, _), *_ = widths(page)
    page.find_element(By.ID, "x-larger").click()
    (larger, _), *_ = widths(page)
    page.find_element(By.ID, "x-smaller").click()
    page.find_element(By.ID, "x-smaller").click()
    (smaller, _), *_ = widths(page)
    assert smaller < before < larger


def test_figures_have_names(browser, tmp_path):
    figure = {"reduction_buffer": figures.warp_shuffle(), "other": figures.warp_shuffle()}
    path = save_explorer(
        tmp_path / "p.html", figure, title="t", names={"reduction_buffer": "reduction <buffer>"}
    )
    browser.get(path.as_uri())
    assert [a.text for a in browser.find_elements(By.CSS_SELECTOR, "nav a")] == [
        "reduction <buffer>",
        "other",
    ]
    assert browser.find_element(By.ID, "x-f0").get_attribute("aria-label") == "reduction <buffer>"


def test_a_composition_stands_beside_its_operands(browser, tmp_path):
    """A cell of B, or of the result, marks the cell of A that it leads to, and the other way round."""
    path = tmp_path / "p.html"
    assert main(["explorer", "(8,8):(8,1) o (4,4):(2,8)", "-o", str(path)]) == 0
    browser.get(path.as_uri())
    cells = browser.find_elements(By.CSS_SELECTOR, "#x-f0 g.c[role='img']")
    assert len(cells) == 64 + 16 + 16
    hover(browser, cell(browser, 0, "B(3, 2) = 22, a coordinate of A"))
    told = facts(browser)
    assert told["coordinate"] == "(3,2)" and told["offset"] == "50 elements"
    of_a, of_b, of_both = marked(browser, "x-address")
    assert "A(22) = 50" in of_a and "B(3, 2) = 22" in of_b and "A(B(3, 2)) = A(22) = 50" in of_both
    hover(browser, cell(browser, 0, "A(1) = 8"))  # where nothing leads to
    assert len(marked(browser, "x-address")) == 1


def test_what_is_no_composition_of_matrices_is_a_grid(tmp_path):
    """With an offset between, of three modes, or where the composition is no layout."""
    for text in (
        "(8,8):(8,1) o 3 o (4,4):(2,8)",
        "(2,2,2):(1,2,4) o (2,2):(1,2)",
        "(3,8):(8,1) o (4,4):(2,8)",
    ):
        path = tmp_path / "f.svg"
        assert main(["show", text, "-o", str(path)]) == 0
        assert "Composition" not in path.read_text()


def test_data_and_drawing_have_the_same_cells(page):
    data = json.loads(page.find_element(By.ID, "x-data").get_attribute("textContent"))
    counts = page.execute_script(
        "return [...document.querySelectorAll('.x-figure')].map(s => s.querySelectorAll('g.c').length)"
    )
    assert [len(cells) for cells in data["figures"]] == counts


def test_a_step_must_match_its_figure():
    with pytest.raises(ValueError, match="names figure 'nowhere'"):
        explorer(page_figures(), title="t", steps=[Step("a", "b", "nowhere")])
    with pytest.raises(ValueError, match="matches no cell of figure 'load'"):
        explorer(page_figures(), title="t", steps=[Step("a", "b", "load")])
