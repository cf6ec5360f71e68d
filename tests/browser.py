"""Headless Chromium: needs Chromium and ChromeDriver; a missing browser fails the run."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

AXE = Path(importlib.util.find_spec("axe_core_python").origin).with_name("axe.min.js")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1500,1000",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser that records its console; while it is open it takes a twelfth of a core, whatever it shows."""
    from selenium import webdriver  # only for tests that ask for one
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    driver = webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver") or "chromedriver")
    )
    yield driver
    driver.quit()


def emulate(driver, width: int, dark: bool = False, height: int = 900) -> None:
    """A window of this width, in px, a phone's below 600, in one of the two colour schemes."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def as_it_was(driver) -> None:
    """Undoes `emulate`."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def overflow(driver) -> int:
    """By how many px the page is wider than its window."""
    root = "document.documentElement"  # a phone's window grows with what is too wide
    return driver.execute_script(f"return {root}.scrollWidth - {root}.clientWidth")


def complaints(driver) -> list[str]:
    """What the console has said since it was last asked."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] != "DEBUG"]


def barriers(driver, *rules: str) -> list[str]:
    """What axe-core finds on the page that is serious for those who cannot see it well, or use no mouse.

    rules: those to check, if not all.
    """
    driver.execute_script(AXE.read_text(encoding="utf-8"))
    found = driver.execute_async_script(
        "const [rules, done] = arguments;"
        "const only = rules.length ? {runOnly: {type: 'rule', values: rules}} : {};"
        "const asked = {preload: false, resultTypes: ['violations'], ...only};"
        "axe.run(document, asked).then((r) => done(r.violations"
        ".filter((v) => ['serious', 'critical'].includes(v.impact))"
        ".map((v) => `${v.id}, ${v.nodes.length} times: ${v.nodes[0].html.slice(0, 200)}`)))",
        rules,
    )
    return list(found)
