"""Headless Chromium for the explorers: needs Chromium and ChromeDriver; a missing browser fails the run."""

from __future__ import annotations

import shutil

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1500,1000",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A browser that records its console."""
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
