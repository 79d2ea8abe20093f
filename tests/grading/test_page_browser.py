"""The page of a grade in a real browser: nothing goes wrong, keys do what clicks do, it fits, it can be read.

Where Chromium or its driver is missing these tests are skipped, unless TINYLLM_BROWSER=required.
"""

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tinyllm.cli.html_report import catchers, draw
from tinyllm.grading.html_report import as_html
from tinyllm.grading.report import write
from tinyllm.grading.verdict import Grade

SWITCHES = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const light = (colour) => rgba(colour).slice(0, 3)
  .map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (rgba(colour)[3] === 255) return colour;
  }
};
const found = {};
for (const element of document.querySelectorAll("body *:not(svg *)")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility()) continue;
  const colours = [getComputedStyle(element).color, behind(element)];
  const [low, high] = colours.map(light).sort((one, two) => one - two);
  found[colours.join(" on ")] = (high + 0.05) / (low + 0.05);
}
return found;
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs):
        pytest.skip("chromium and chromedriver are not both here")
    options = ChromeOptions()
    options.binary_location, driver = map(str, programs)
    for switch in [*SWITCHES.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def address(weak: Grade, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("page") / "grade.html"
    write(path, as_html(weak, command="tinyllm grade t.py", whole=True, draw=draw, catchers=catchers))
    return path.as_uri()


@pytest.fixture
def visit(chromium: Chrome, address: str) -> Iterator[Callable[..., Chrome]]:
    """Opens the page so many pixels wide, in a theme; at the end, nothing has been said on the console."""

    def go(width: int = 1280, theme: str = "light", *, script: bool = True) -> Chrome:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        feature = {"name": "prefers-color-scheme", "value": theme}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [feature]})
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
        chromium.get(address)
        return chromium

    yield go
    assert chromium.get_log("browser") == []  # type: ignore[no-untyped-call]
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def order(browser: Chrome, table: str = "heat") -> list[str]:
    """The bugs in the order of the rows."""
    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, f"table.{table} tbody th")]


def button(browser: Chrome, number: int, table: str = "heat") -> tuple[WebElement, WebElement]:
    """A header and the button in it."""
    header = browser.find_elements(By.CSS_SELECTOR, f"table.{table} thead th")[number]
    return header, header.find_element(By.TAG_NAME, "button")


def test_nothing_is_fetched_and_nothing_goes_wrong(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    assert browser.title == "FAIL: 2 of 8 planted bugs killed"
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.find_elements(By.CSS_SELECTOR, "figure svg"), "witnesses are drawn"
    style = "return getComputedStyle(document.querySelector('.verdict')).backgroundColor"
    assert browser.execute_script(style) == "rgb(179, 32, 26)", "the policy lets the style through"


def test_the_policy_lets_no_other_script_through(visit: Callable[..., Chrome], chromium: Chrome) -> None:
    browser = visit()
    browser.execute_script(
        "const one = document.createElement('script'); one.textContent = 'window.got = 1';"
        "document.body.append(one)"
    )
    assert browser.execute_script("return window.got") is None
    (said,) = chromium.get_log("browser")  # type: ignore[no-untyped-call]
    assert "Content Security Policy" in said["message"]


def test_a_bug_opens_and_closes_by_the_keyboard(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    for name, opened in (("s06", True), ("s02", False)):
        details = browser.find_element(By.ID, f"bug-{name}")
        summary = details.find_element(By.TAG_NAME, "summary")
        inside = details.find_element(By.CLASS_NAME, "diff")
        for key in (Keys.ENTER, Keys.SPACE):
            assert inside.is_displayed() == opened
            browser.execute_script("arguments[0].focus()", summary)
            browser.switch_to.active_element.send_keys(key)
            assert inside.is_displayed() != opened
            summary.click()


def test_the_tab_key_gets_to_everything(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    where = (
        "const one = document.activeElement; return one.textContent.trim().slice(0, 30) + '|' + one.className"
    )
    seen = []
    for _ in range(400):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.execute_script(where))
        if seen[-1] == seen[0] and len(seen) > 1:
            break
    assert seen[0].startswith("Skip to the bugs|")
    words = [one.partition("|")[0] for one in seen]
    for needed in ("s06", "Status", "Tests", "Seconds", "Examples", "The tests by number"):
        assert any(word.startswith(needed) for word in words), needed
    assert sum(one.endswith("|wide") for one in seen) == 2, "what scrolls can be scrolled by keys"


@pytest.mark.parametrize("how", ["click", "enter", "space"])
def test_the_matrix_sorts(visit: Callable[..., Chrome], how: str) -> None:
    browser = visit()
    graded = ["w01", "s02", "s03", "order", "s06", "s07", "x1", "x2", "x3", "x4"]

    def press(number: int) -> str | None:
        header, one = button(browser, number)
        if how == "click":
            one.click()
        else:
            one.send_keys({"enter": Keys.ENTER, "space": Keys.SPACE}[how])
        return header.get_attribute("aria-sort")

    assert order(browser) == graded
    assert button(browser, 2)[0].get_attribute("aria-sort") is None
    assert press(2) == "descending", "the most tests first"
    assert order(browser) == ["s02", "s03", "s06", "x2", "x4", "w01", "order", "s07", "x1", "x3"]
    assert press(2) == "ascending"
    assert order(browser)[-1] == "s02"
    said = browser.find_element(By.CSS_SELECTOR, "#matrix [role=status]")
    assert said.get_attribute("textContent") == "Sorted by Tests, ascending."
    assert press(1) == "ascending"
    assert button(browser, 2)[0].get_attribute("aria-sort") is None
    assert order(browser)[:2] == ["x3", "x2"], "invalid, then timeout"
    assert press(3) == "descending", "by a test"
    assert order(browser)[:3] == ["s03", "s06", "s02"]
    assert press(0) == "ascending"
    assert order(browser) == graded


def test_the_bars_sort(visit: Callable[..., Chrome]) -> None:
    browser = visit()
    header, one = button(browser, 1, "bars")
    one.click()
    assert header.get_attribute("aria-sort") == "descending"
    assert sorted(order(browser, "bars")) == ["s02", "s03", "s06", "x2", "x4"]


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_the_page_is_no_wider_than_the_window(visit: Callable[..., Chrome], width: int) -> None:
    browser = visit(width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_the_matrix_scrolls_and_its_first_column_stays(visit: Callable[..., Chrome]) -> None:
    browser = visit(320)
    wide = browser.find_element(By.CSS_SELECTOR, "#matrix .wide")
    first = browser.find_element(By.CSS_SELECTOR, "table.heat tbody th")
    before = first.rect["x"]
    browser.execute_script("arguments[0].scrollLeft = 9999", wide)
    assert browser.execute_script("return arguments[0].scrollLeft", wide) > 0
    assert first.rect["x"] == before


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_stands_out(visit: Callable[..., Chrome], theme: str) -> None:
    browser = visit(theme=theme)
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    found: dict[str, float] = browser.execute_script(CONTRAST)
    assert len(found) > 8
    assert {colours: ratio for colours, ratio in found.items() if ratio < 4.5} == {}
    page = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(page) == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[theme]


def test_print_shows_everything_and_no_buttons(visit: Callable[..., Chrome]) -> None:
    browser = visit(theme="dark")
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [feature]})
    page = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(page) == "rgb(255, 255, 255)", "light, on paper"
    shown = "return document.querySelector(arguments[0]).checkVisibility({contentVisibilityAuto: true})"
    assert browser.execute_script(shown, "#bug-s02 .diff")
    assert not browser.execute_script(shown, "nav")
    made: dict[str, Any] = browser.execute_cdp_cmd("Page.printToPDF", {})
    assert base64.b64decode(made["data"]).startswith(b"%PDF")
    assert not browser.find_elements(By.CSS_SELECTOR, "#bug-s02[open]"), "closed again afterwards"


def test_without_a_script_all_but_sorting_is_there(visit: Callable[..., Chrome]) -> None:
    browser = visit(script=False)
    assert not browser.find_elements(By.TAG_NAME, "button")
    details = browser.find_element(By.ID, "bug-s02")
    details.find_element(By.TAG_NAME, "summary").click()
    assert details.find_element(By.CLASS_NAME, "diff").text.startswith("@@")
    assert order(browser)[0] == "w01"
