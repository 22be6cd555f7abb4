"""The page of `dppo-megatron report`, and of a comparison, in a real browser."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.job import REPOSITORY
from support.record import write_record

from dppo_megatron.workbench.compare.arms import Arm, MethodRun, Point
from dppo_megatron.workbench.compare.table import results, table
from dppo_megatron.workbench.compare.table import write_page as write_comparison
from dppo_megatron.workbench.compare.verdict import judge
from dppo_megatron.workbench.report.page import write_page
from dppo_megatron.workbench.runs.run_record import read_run
from dppo_megatron.workbench.runs.sample_rows import LEGEND

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\"> 6 * 7 = 42"


ARTIFACTS = Path(os.environ.get("DPPO_ARTIFACTS", REPOSITORY / "artifacts"))
"""Where pictures of what a browser showed are kept, for people."""


def _keep(driver: Any, name: str) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    assert driver.save_screenshot(str(ARTIFACTS / f"{name}.png"))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not chromedriver:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for one in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--window-size=1400,1000",
    ):
        options.add_argument(one)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def page(driver: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two runs, opened."""
    path = tmp_path_factory.mktemp("report")
    runs = [write_record(path / name, 30, text=HOSTILE) for name in ("first", "second")]
    config = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    records = [read_run(run) for run in runs]
    for record in records:  # another set, of 8 samples a problem
        names = ("avg@8", "pass@1", "pass@2", "pass@4", "pass@8", "maj@2", "maj@4", "maj@8")
        record.columns |= {f"eval/aime/{name}": [0.5] * 31 for name in names}
    records[1].columns |= {"reward/shortness": [0.25] * 31, "kept/product_ess": [0.5] * 31}
    records[1].settings |= {"reward.functions.shortness.function": '"m:f"', "data.eval_sets.aime.limit": "null"}
    write_page(path / "report.html", records)
    return _open(driver, path / "report.html")


def _open(driver: Any, path: Path) -> Any:
    """Once the page has unpacked itself."""
    driver.get(f"file://{path}")
    _wait(driver, "document.documentElement.dataset.theme !== undefined")
    return driver


def _wait(page: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(page, 60).until(lambda one: one.execute_script(f"return {script}"))


@pytest.mark.slow
def test_the_plots_are_drawn(page: Any) -> None:
    page.execute_script("charts.forEach(draw)")
    assert _wait(page, "document.querySelectorAll('.plot .main-svg').length > 30")
    empty = page.execute_script(
        "return charts.filter(one => !one.plot.querySelector('.trace')).map(one => one.plot.ariaLabel)"
    )
    assert empty == []
    _keep(page, "report_plots")
    errors = [one for one in page.get_log("browser") if one["level"] == "SEVERE"]
    assert errors == []


@pytest.mark.slow
def test_what_a_model_wrote_is_text(page: Any) -> None:
    page.execute_script("location.hash = 'samples'")
    assert page.title.startswith("first, second")
    assert HOSTILE in page.execute_script("return document.querySelector('.detail .text').textContent")
    assert page.execute_script("return document.querySelectorAll('img').length") == 0
    _keep(page, "report_samples")


@pytest.mark.slow
def test_right_is_not_rewarded(page: Any) -> None:
    """A green badge for the right one only, not for .06 for brevity; named rewards one by one; titles and legend."""
    chips = "[...document.querySelectorAll('.member')].map(one => [...one.querySelectorAll('.chip')]"
    shown = page.execute_script(f"return {chips}.map(chip => chip.className.slice(5).trim() + ':' + chip.textContent))")
    assert shown[0] == ["good:right", ":reward 1", ":trained on"]
    assert shown[1:7] == [[":wrong", ":reward 0.06", ":pruned"]] * 6 and shown[7] == ["bad:not graded", ":pruned"]
    figures = page.execute_script("return document.querySelectorAll('.member dl')[1].innerText.split('\\n')")
    assert figures[-4:] == ["reward/right", "0", "reward/short", "0.6"]
    squares = page.execute_script("return [...document.querySelector('.strip').children].map(one => one.className)")
    assert squares == ["right"] + ["wrong out"] * 6 + ["failed out"]
    assert LEGEND in page.execute_script("return document.querySelector('#samples .lead').textContent")
    titles = page.execute_script(
        "return [...document.querySelectorAll('.what')].slice(0, 2).map(one => one.textContent)"
    )
    assert titles == [f"problem {n}: what is 6 * 7?" for n in (0, 1)]
    note = page.execute_script("return document.querySelector('#samples .note').textContent")
    assert note.startswith("16 of 16 recorded groups of step 30; 3 of 3 recorded steps.")


@pytest.mark.slow
def test_named_rewards_are_drawn_beside_the_mean(page: Any) -> None:
    """And a set's settings that were left out are no changes."""
    drawn = page.execute_script(
        "return charts.find(one => one.plot.ariaLabel.startsWith('Reward')).traces().map(trace => trace.name)"
    )
    assert "second · shortness" in drawn and "first · shortness" not in drawn and "first · mean" in drawn
    dashes = page.execute_script(
        "const found = charts.find(one => one.plot.ariaLabel.startsWith('Importance'));"
        "return found.traces().map(trace => [trace.name, trace.line.dash])"
    )
    named = "times the pruning weights"
    assert [f"second · {named}", "dot"] in dashes and [named, "dot"] in dashes  # its line, and its entry in the legend
    changed = page.execute_script("return document.querySelector('#settings tbody').textContent")
    assert "reward.functions.shortness.function" in changed and "data.eval_sets.aime.limit" not in changed


@pytest.mark.slow
def test_evaluations_by_need(page: Any) -> None:
    """Two sets, of one and of eight samples: not avg@8, which is pass@1, and of the others the largest."""
    drawn = page.execute_script(
        "return charts.filter(one => one.plot.ariaLabel.startsWith('Evaluation'))"
        ".map(one => one.traces().map(trace => trace.name))"
    )
    runs = ("first", "second")
    assert drawn[0] == [f"{run} · {name}" for run in runs for name in ("math", "aime")]
    assert drawn[1:] == [[f"{run} · aime {name}" for run in runs] for name in ("pass@8", "maj@8")]


@pytest.mark.slow
def test_nothing_scrolls_sideways_on_a_telephone(page: Any) -> None:
    """420 pixels: neither the page nor a part of it but for plain text."""
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.execute_script("charts.forEach(draw)")
        assert _wait(page, "innerWidth === 420")
        parts = "[document.documentElement, ...document.querySelectorAll('.scroll, .card, header')]"
        assert _wait(page, f"{parts}.every(one => one.scrollWidth <= one.clientWidth)")
        _keep(page, "report_telephone")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_samples_are_looked_through(page: Any) -> None:
    text = "return document.querySelector('.detail h3').textContent"
    assert page.execute_script(text) == "Prompt 100"
    page.execute_script("document.querySelectorAll('.groups button')[2].click()")
    assert page.execute_script(text) == "Prompt 102"
    step = "const which = document.querySelector('[aria-label=Step]'); which.value = 29;"
    page.execute_script(f"{step} which.dispatchEvent(new Event('change'))")
    assert page.execute_script("return browser.step") == 29
    theme = page.execute_script("return state.theme")
    page.execute_script("document.getElementById('theme').click()")
    assert page.execute_script("return document.documentElement.dataset.theme") != theme
    page.find_element("css selector", "#samples [type=search]").send_keys("problem 7")
    assert _wait(page, "document.querySelectorAll('.groups button').length == 1")
    assert page.execute_script("return document.querySelectorAll('mark').length") > 0


@pytest.mark.slow
def test_runs_are_compared(page: Any) -> None:
    settings = page.execute_script("return document.querySelector('#settings tbody').innerText")
    assert "seed" in settings and "run_dir" in settings and "rollout.engine" not in settings
    page.execute_script("charts.forEach(draw)")
    page.execute_script("document.querySelector('[aria-label=\"Show second\"]').click()")
    reward = "charts[0].traces().filter(one => one.name && one.showlegend !== false).length"
    assert page.execute_script(f"return {reward}") == 1


@pytest.mark.slow
def test_a_comparison_is_drawn(driver: Any, tmp_path: Path) -> None:
    """In a window of its own: the other tests go on with the page that they have."""
    arms = [Arm(name, name, 8, ()) for name in ("grpo", "dppo")]
    runs = [
        MethodRun(
            arm.name, seed, [Point(4 * i, 0.3 + 0.1 * i, 4.0 * i, 3.0 * i, 100 * i, 50 * i) for i in range(6)],
            {"prompts": "exact"}, {"heldout": [1.0, 0.0, float(seed)]}, {"rollout": 1.0, "update": 2.0},
        )
        for arm in arms for seed in (0, 1)
    ]  # fmt: skip
    verdict = judge(runs, arms)
    write_comparison(tmp_path / "report.html", "a comparison", table(verdict), results(verdict, runs, ["a note"]))
    first = driver.current_window_handle
    driver.switch_to.new_window("window")
    try:
        driver.get_log("browser")
        _open(driver, tmp_path / "report.html")
        driver.execute_script("charts.forEach(draw)")
        # 4 speed-ups, the ends, 5 curves, the seconds
        assert _wait(driver, "charts.length === 11 && document.querySelectorAll('.plot .main-svg').length > 20")
        empty = "charts.filter(one => !one.plot.querySelector('.trace')).map(one => one.plot.ariaLabel)"
        assert driver.execute_script(f"return {empty}") == []
        told = driver.execute_script("return document.getElementById('about').innerText")
        assert "date" in told and "torch" in told
        assert [one for one in driver.get_log("browser") if one["level"] == "SEVERE"] == []
        _keep(driver, "comparison")
    finally:
        driver.close()
        driver.switch_to.window(first)


@pytest.mark.slow
def test_a_run_that_has_just_begun_and_one_from_a_checkpoint(driver: Any, tmp_path: Path) -> None:
    """Beside a whole run: one that has only been evaluated before its first step has no seconds, and leaves the plots
    of the others drawn; one of steps 101 to 110 takes 180 s a step, of which none is left out."""
    records = [read_run(write_record(tmp_path / "whole", 6))]
    late = [{"step": step, "time/step_s": 180.0, "time/rollout_s": 100.0} for step in range(101, 111)]
    for name, rows in (("begun", [{"step": 0, "eval/x/pass@1": 0.1}]), ("late", late)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / name / "config.yaml").write_text("steps: 120\n")
        (tmp_path / name / "lock.json").write_text("{}")
        records.append(read_run(tmp_path / name))
    write_page(tmp_path / "report.html", records)
    first = driver.current_window_handle
    driver.switch_to.new_window("window")
    try:
        driver.get_log("browser")
        _open(driver, tmp_path / "report.html")
        for axis in ("step", "seconds"):
            driver.execute_script(f"state.axis = '{axis}'; redraw(); charts.forEach(draw)")
            drawn = "charts.every(one => one.plot.querySelector('.main-svg') && one.plot.querySelector('.trace'))"
            assert driver.execute_script(f"return {drawn}")
        split = driver.execute_script(
            "state.axis = 'step';"
            "return charts.filter(one => one.plot.ariaLabel.startsWith('Where the seconds go'))"
            ".map(one => [one.plot.ariaLabel.split('.')[0], one.traces()[0].x])"
        )
        assert split == [
            ["Where the seconds go: whole", [1, 2, 3, 4, 5, 6]],
            ["Where the seconds go: late", list(range(101, 111))],
        ]
        rows = driver.execute_script(
            "return [...document.querySelectorAll('.runs tbody tr')]"
            ".map(row => [...row.cells].map(one => one.innerText))"
        )
        assert [row[1] for row in rows[1:]] == ["running", "running · 30 min 0 s left"]
        assert [row[-1] for row in rows[1:]] == ["\N{EN DASH}", "180"]
        assert [one for one in driver.get_log("browser") if one["level"] == "SEVERE"] == []
    finally:
        driver.close()
        driver.switch_to.window(first)


@pytest.mark.slow
def test_a_run_of_one_step(driver: Any, tmp_path: Path) -> None:
    """Each plot has a mark that is seen. A score alone has no arrow, and one of a set that was added at a resume is
    compared with that of the resume, as in summary.json."""
    record = read_run(write_record(tmp_path / "one", 1, sampled=range(1, 2)))
    record.columns |= {"eval/other/pass@1": [0.25, 0.29], "eval/once/pass@1": [0.5, None]}
    record.columns |= {"eval/zero/pass@1": [None, 0.3]}
    before = {"math": 0.2, "other": 1 / 3, "once": 0.5, "zero": 0.25}
    record.summary = {"eval_before": before, "eval_before_step": {"other": 4, "zero": 0}}
    write_page(tmp_path / "report.html", [record])
    first = driver.current_window_handle
    driver.switch_to.new_window("window")
    try:
        _open(driver, tmp_path / "report.html")
        driver.execute_script("charts.forEach(draw)")
        assert _wait(driver, "charts.every(one => one.plot.querySelector('.main-svg'))")
        unseen = driver.execute_script(
            "return charts.filter(one =>"
            " ![...one.plot.querySelectorAll('.trace path')].map(path => path.getBoundingClientRect())"
            ".some(({ width, height }) => width > 1 && height > 1)).map(one => one.plot.ariaLabel)"
        )
        assert unseen == []
        zero = "zero 25.0 % (step 0) → 30.0 %"
        cells = driver.execute_script("return document.querySelectorAll('.runs tbody td')[4].innerText.split('\\n')")
        assert cells == ["math 20.0 % → 60.0 % ± 3.0", "other 33.3 % (step 4) → 29.0 %", "once 50.0 %", zero]
        told = driver.execute_script("return [59.96, 119.6, 3599.7, 7260].map(duration)")
        assert told == ["1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 1 min"]
    finally:
        driver.close()
        driver.switch_to.window(first)


@pytest.mark.slow
def test_for_everyone(page: Any) -> None:
    """Every control has a name, every figure a description, headings come in order, and text can be told from its
    ground: WCAG's contrast of 4.5, in both themes."""
    nameless = page.execute_script(
        "return [...document.querySelectorAll('button,select,input,a')].filter(one => !(one.ariaLabel || one.title"
        " || one.textContent.trim() || one.labels?.length)).map(one => one.outerHTML)"
    )
    assert nameless == []
    assert page.execute_script("return charts.every(one => one.plot.ariaLabel.length > 5)")
    levels = page.execute_script("return [...document.querySelectorAll('h1,h2,h3')].map(one => +one.tagName[1])")
    assert levels[0] == 1 and max(np.diff(levels)) <= 1
    for theme in ("light", "dark"):
        page.execute_script(f"setTheme('{theme}')")
        pairs = [
            ("--ink", "--bg"),
            ("--dim", "--bg"),
            ("--dim", "--card"),
            ("--dim", "--soft"),
            ("--good", "--good-bg"),
        ]
        for ink, ground in [*pairs, ("--bad", "--bad-bg"), ("--warn", "--warn-bg"), ("--ink", "--soft")]:
            colours = [page.execute_script(f"return css('{name}')") for name in (ink, ground)]
            assert _contrast(*colours) >= 4.5, (theme, ink, ground)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, theme: str) -> None:
    """WCAG 2.1 A and AA, and axe's best practices, on the whole page with all plots drawn."""
    package = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    page.execute_script(f"setTheme('{theme}'); charts.forEach(draw)")
    assert _wait(page, "document.querySelectorAll('.plot .main-svg').length > 30")
    page.execute_script((Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
    page.set_script_timeout(120)
    found = page.execute_async_script(
        "const done = arguments[1]; axe.run(document, {runOnly: arguments[0]}).then(done, e => done({error: `${e}`}))",
        tags,
    )
    assert "error" not in found, found["error"]
    assert len(found["passes"]) > 20
    told = [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]} ({len(one['nodes'])})"
        for one in found["violations"]
    ]
    assert told == []


def _contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)
