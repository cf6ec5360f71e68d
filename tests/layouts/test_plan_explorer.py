"""The explorers of Plans in headless Chromium: every step of the walk lights cells, without an error."""

from __future__ import annotations

from functools import partial

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from cute_softmax import draw
from cute_softmax.plan.describe import plan_matmul_shape, plan_of, plan_shape
from layouts.html import save_explorer

PLANS = {
    "short": partial(plan_of, 300, 48),
    "edges": partial(plan_of, 300, 1003, online=False),
    "cluster": partial(plan_of, 16, 50257),
    "long": partial(plan_of, 8, 1000000),
    "backward": partial(plan_of, 100, 2000, math="softmax_backward"),
    "column cluster": partial(plan_shape, (1024, 4096 * 8), dim=0),
    "split": partial(plan_shape, (20000, 1000), dim=0, architecture="sm_80"),
    "row of two": partial(plan_shape, (64, 50, 1000), dim=(0, 2)),
    "longer": partial(plan_shape, (2, 4000000), math="logsumexp"),
    "matmul": partial(plan_matmul_shape, (4, 512, 1024), 128),
    "matmul lines": partial(plan_matmul_shape, (4, 512, 1001), 64),
    "matmul backward": partial(plan_matmul_shape, (4, 512, 1024), 128, backward=True),
}


def opened(browser, plan, folder) -> dict:
    """The arguments of a plan's page, which the browser has read to its end."""
    page = draw.page(plan)
    browser.get(save_explorer(folder / "page.html", **page).as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.readyState") == "complete")
    return page


@pytest.mark.parametrize("name", PLANS)
def test_the_walk_of_a_plan(name, browser, tmp_path):
    plan = PLANS[name]()
    page = opened(browser, plan, tmp_path)
    sections = browser.find_elements(By.CSS_SELECTOR, ".x-figure")
    assert [s.get_attribute("aria-label") for s in sections] == list(page["names"].values())
    forward = browser.find_element(By.ID, "x-next")
    for i, step in enumerate(page["steps"]):
        forward.click()
        assert browser.find_element(By.ID, "x-count").text == f"{i + 1} of {len(page['steps'])}"
        quiet = browser.find_element(By.CSS_SELECTOR, ".x-quiet")
        assert quiet.get_attribute("aria-label") == page["names"][step.figure]
        assert quiet.find_elements(By.CSS_SELECTOR, "g.c.x-on")
    assert not forward.is_enabled()
    if plan.movement == "row":
        titles = " ".join(step.title for step in page["steps"])
        assert ("cluster" in titles) == (plan.kernel.cluster_n > 1)
        assert ("shared memory" in titles) == (set(plan.kernel.staging) != {"direct"})
    assert [e for e in browser.get_log("browser") if e["level"] != "DEBUG"] == []


def test_following_a_thread_of_a_plan(browser, tmp_path):
    plan = plan_of(300, 1003)
    opened(browser, plan, tmp_path)
    browser.find_element(By.ID, "x-thread").send_keys(str(draw.View(plan).followed))
    found = browser.find_elements(By.CSS_SELECTOR, "g.c.x-thread")
    where = {node.find_element(By.XPATH, "ancestor::section").get_attribute("aria-label") for node in found}
    assert {draw.NAMES[key] for key in ("tv", "tile", "predicate", "shuffle")} <= where


def test_every_figure_of_a_plan_has_a_name():
    keys = {key for make in PLANS.values() for key in draw.figures(make())} - {draw.FOLLOWED}
    assert keys <= set(draw.NAMES)
