"""A headless Chromium that opens the pages this project writes, and tells what it saw: errors, requests."""

import json
import shutil
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1300,1000"]


def start_browser(profile: Path) -> Chrome:
    """A browser with a profile of its own; it loads nothing from anywhere by itself."""
    chromium, chromedriver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        raise RuntimeError("no browser to test the report in: put Chromium and chromedriver on PATH (.ci/browser installs Debian's)")
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in [*QUIET, f"--user-data-dir={profile}"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options=options, service=Service(chromedriver))


def console_of(browser: Chrome) -> list[str]:
    """What the pages wrote to the console since this was last asked: errors of scripts, and what their policy refused."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requests_of(browser: Chrome) -> list[str]:
    """What the pages asked for since this was last asked, beside the files that were opened."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("file://") or not url.partition("#")[0].endswith("/report.html")]
