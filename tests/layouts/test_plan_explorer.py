"""The explorers of Plans in headless Chromium: every step of the walk lights cells, without an error."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By

from cute_softmax import draw
from cute_softmax.plan import describe
from layouts.html import save_explorer

PROBLEMS = {
    "short": (300, 48, {}),
    "edges": (300, 1003, {"online": False}),
    "cluster": (16, 50257, {}),
    "long": (8, 1000000, {}),
    "backward": (100, 2000, {"math": "softmax_backward"}),
}


PANELS = {
    "column_cluster": ((1024, 4096 * 8), {"dim": 0}),
    "split": ((20000, 1000), {"dim": 0, "architecture": "sm_80"}),
    "row_of_two": ((64, 50, 1000), {"dim": (0, 2)}),
    "long": ((2, 4000000), {"math": "logsumexp"}),
}


MATMULS = {
    "matmul": ((4, 512, 1024), 128, {}),
    "matmul_lines": ((4, 512, 1001), 64, {}),
    "matmul_backward": ((4, 512, 1024), 128, {"backward": True}),
}


@pytest.mark.parametrize("name", [*PANELS, *MATMULS])
def test_the_walk_of_panels_and_products(name, browser, tmp_path):
    if name in PANELS:
        shape, options = PANELS[name]
        plan = describe.plan_shape(shape, **options)
    else:
        shape, depth, options = MATMULS[name]
        plan = describe.plan_matmul_shape(shape, depth, **options)
    page = draw.page(plan)
    browser.get(save_explorer(tmp_path / "page.html", **page).as_uri())
    forward = browser.find_element(By.ID, "x-next")
    for step in page["steps"]:
        forward.click()
        quiet = browser.find_element(By.CSS_SELECTOR, ".x-quiet")
        assert quiet.get_attribute("aria-label") == step.figure
        assert quiet.find_elements(By.CSS_SELECTOR, "g.c.x-on")
    assert not forward.is_enabled()
    assert [e for e in browser.get_log("browser") if e["level"] != "DEBUG"] == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_walk_of_a_plan(name, browser, tmp_path):
    rows, columns, options = PROBLEMS[name]
    plan = describe.plan_of(rows, columns, **options)
    page = draw.page(plan)
    browser.get(save_explorer(tmp_path / "page.html", **page).as_uri())
    sections = browser.find_elements(By.CSS_SELECTOR, ".x-figure")
    assert [s.get_attribute("aria-label") for s in sections] == list(page["figures"])
    forward = browser.find_element(By.ID, "x-next")
    for i, step in enumerate(page["steps"]):
        forward.click()
        assert browser.find_element(By.ID, "x-count").text == f"{i + 1} of {len(page['steps'])}"
        quiet = browser.find_element(By.CSS_SELECTOR, ".x-quiet")
        assert quiet.get_attribute("aria-label") == step.figure
        assert quiet.find_elements(By.CSS_SELECTOR, "g.c.x-on")
    assert not forward.is_enabled()
    titles = " ".join(step.title for step in page["steps"])
    assert ("cluster" in titles) == (plan.row_class.cluster_n > 1)
    assert ("shared memory" in titles) == (set(plan.row_class.staging) != {"direct"})
    assert [e for e in browser.get_log("browser") if e["level"] != "DEBUG"] == []


def test_following_a_thread_of_a_plan(browser, tmp_path):
    plan = describe.plan_of(300, 1003)
    browser.get(save_explorer(tmp_path / "page.html", **draw.page(plan)).as_uri())
    browser.find_element(By.ID, "x-thread").send_keys(str(draw.View(plan).followed))
    found = browser.find_elements(By.CSS_SELECTOR, "g.c.x-thread")
    where = {node.find_element(By.XPATH, "ancestor::section").get_attribute("aria-label") for node in found}
    assert {"tv", "tile", "predicate", "shuffle"} <= where
