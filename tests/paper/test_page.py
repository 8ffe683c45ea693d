"""The pages of experiments in a real browser, from the results that the repository keeps."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calgp import cli
from calgp.paper.verdicts import STATES
from chromium import Browser

ROOT = Path(__file__).parent.parent.parent
NAMES = ("fig2", "fig4", "ablation")  # curves, densities, dots; long tables, intervals, long names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "results/reproduce").is_dir(), reason="results/ is only in a checkout"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    out = tmp_path_factory.mktemp("pages")
    for name in NAMES:
        arguments = ["reproduce", name, "--scale", "laptop", "--pages", "--results", str(ROOT / "results")]
        result = CliRunner().invoke(cli.app, [*arguments, "--out", str(out)])
        assert result.exit_code == 0, result.output
    return out / "laptop"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium") / "profile")
    yield browser
    browser.close()


@pytest.mark.parametrize("options", [{}, {"dark": True}, {"width": 360, "height": 740}], ids=["light", "dark", "phone"])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_quiet_accessible_and_no_wider_than_its_window(browser, pages, name, options):
    page = browser.page(**options)
    page.open((pages / name / "report.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    found = page.axe()
    assert found["violations"] == []
    assert {"color-contrast", "region", "th-has-data-cells"} <= set(found["passes"])
    assert "width" in options or found["unsure"] == []  # it is of cells that a narrow window breaks into lines
    assert page.troubles == []
    page.close()


COUNTED = """[...document.querySelectorAll('.verdicts > li')].map(claim =>
    ['held', 'undecided', 'one-seed', 'not-held'].map(state => [...claim.querySelectorAll('.bar .' + state)]
        .reduce((sum, part) => sum + Number(part.style.flexGrow), 0)))"""


def test_bars_count_the_comparisons_of_their_claim(browser, pages):
    page = browser.page()
    for name in NAMES:
        page.open((pages / name / "report.html").as_uri())
        shown = page.evaluate(COUNTED)
        written = json.loads((pages / name / "table.json").read_text())["verdicts"]
        counted = [verdict["comparisons"] for verdict in written]  # a single one stands in words, without a bar
        states = [[part["state"] for part in parts] if len(parts) > 1 else [] for parts in counted]
        assert shown == [[each.count(state) for state in STATES] for each in states], name
    page.close()


def test_the_bar_of_one_comparison_says_its_difference(browser, pages):
    page = browser.page()
    page.open((pages / "ablation" / "report.html").as_uri())
    shown = page.evaluate("[...document.querySelectorAll('.tally .bar > span')].map(part => part.textContent)")
    written = json.loads((pages / "ablation" / "table.json").read_text())["verdicts"]
    differences = [part["difference"] for verdict in written for part in verdict["comparisons"]]
    assert [float(each.replace("−", "-")) for each in shown] == pytest.approx(differences, abs=6e-5)
    page.close()
