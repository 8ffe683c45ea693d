"""The page in a real browser, on the run that ships with the package."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from calgp.runs import Classifier, RunFolder, load
from chromium import Browser, Page

from .conftest import NEVER, sampled, serving
from .test_model import trained

pytestmark = pytest.mark.slow

READY = "'ready' in document.documentElement.dataset"
DONE = "/sure|know/.test(document.querySelector('#announced').textContent)"
Strokes = list[list[tuple[float, float]]]


def arc(x: float, y: float, width: float, height: float, start: float, end: float) -> list[tuple[float, float]]:
    """Points of an ellipse's arc, angles in degrees, clockwise from the right."""
    angles = np.radians(np.linspace(start, end, 20))
    return [(x + width * math.cos(angle), y + height * math.sin(angle)) for angle in angles]


DRAWN: dict[str, Strokes] = {
    "0": [arc(0.5, 0.5, 0.2, 0.32, -90, 270)],
    "3": [arc(0.45, 0.34, 0.2, 0.16, -150, 90) + arc(0.45, 0.66, 0.22, 0.17, -90, 150)],
    "4": [[(0.4, 0.18), (0.28, 0.55), (0.7, 0.53)], [(0.62, 0.2), (0.58, 0.85)]],
    "7": [[(0.28, 0.22), (0.5, 0.21), (0.72, 0.2), (0.6, 0.5), (0.45, 0.82)]],
    "W": [[(0.15, 0.2), (0.32, 0.8), (0.5, 0.35), (0.68, 0.8), (0.85, 0.2)]],
    "X": [[(0.25, 0.2), (0.75, 0.8)], [(0.75, 0.2), (0.25, 0.8)]],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium") / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def address(browser):
    with serving(sampled()) as address:
        yield address


@pytest.fixture
def visit(browser, address):
    """Opens pages; after the test nothing must have gone wrong in them."""
    opened: list[Page] = []

    def open_page(at: str = address, ready: str = READY, **options) -> Page:
        page = browser.page(**options)
        opened.append(page)
        page.open(f"{at}/", ready)
        return page

    yield open_page
    troubles = [trouble for page in opened for trouble in page.troubles]
    for page in opened:
        page.close()
    assert troubles == []


def answer(page: Page) -> dict:
    """What the page says, once all samples are there."""
    page.until(DONE)
    entropy = page.text("#uncertainty-says").split()[1]
    return {"says": page.text("#says"), "why": page.text("#why"), "entropy": float(entropy)}


def draw(page: Page, name: str) -> dict:
    page.click("#clear")
    page.draw("#pad", DRAWN[name])
    return answer(page)


def test_digits_are_known_and_letters_are_not(visit):
    page = visit()
    digits = {name: draw(page, name) for name in "037"}
    letters = {name: draw(page, name) for name in "WX"}
    for name, said in digits.items():
        assert said["says"].startswith(name) and "sure" in said["says"], (name, said)
    for name, said in letters.items():
        assert said["says"] == "I don’t know", (name, said)
        assert "Best guess: " in said["why"]
    # visibly: ten times the entropy, and of the width of the figure (2.3 nats) a fifth against next to nothing
    most, least = max(d["entropy"] for d in digits.values()), min(d["entropy"] for d in letters.values())
    assert least > 10 * most and least > 0.46 and most < 0.05, (digits, letters)
    width = "document.querySelector('#uncertainty-figure .epistemic').getBoundingClientRect().width"
    assert page.evaluate(width) > 10  # pixels, of the last letter


def test_the_run_of_the_package_answers_in_one_pass(visit):
    with serving(load("shipped", fabric=sampled().fabric)) as address:
        page = visit(address)
        assert [draw(page, name)["says"][0] for name in "037"] == list("037")
        assert draw(page, "W")["says"] == "I don’t know"
        assert page.text("#one-pass") == "Computed in 1 pass."


def test_a_drawing_is_prepared_as_mnist_is(visit):
    page = visit()

    def prepared(strokes: Strokes) -> np.ndarray:
        module = "import('/static/images.js')"
        return np.array(page.evaluate(f"{module}.then(({{prepared}}) => prepared({json.dumps(strokes)}))"))

    for name in "047X":
        image = prepared(DRAWN[name])
        assert image.shape == (28, 28) and image.min() == 0 and image.max() == 255
        rows, columns = np.nonzero(image > 127)
        sides = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert max(sides) in (19, 20, 21)  # a 20 × 20 box whose edges need not fall on pixels
        centre = np.array([(image * at).sum() / image.sum() for at in np.mgrid[:28, :28]])
        assert abs(centre - 13.5).max() < 0.05  # the middle, to an antialiased tenth of a pixel
        smaller = [[(0.1 + 0.3 * x, 0.6 + 0.3 * y) for x, y in stroke] for stroke in DRAWN[name]]
        assert abs(prepared(smaller) - image).max() <= 3  # place and size do not matter, but for rounding
    assert 0.05 < prepared(DRAWN["3"]).mean() / 255 < 0.2  # MNIST's mean shade is 0.13: neither hair nor brush
    assert prepared([[(0.3, 0.3)]]).max() > 0  # a dot is a drawing


def test_chosen_and_dropped_files_get_the_answer_of_the_api(visit, address, digits, tmp_path):
    file = tmp_path / "digit.png"
    Image.fromarray(digits[3]).resize((140, 140)).save(file)
    sent = httpx.post(f"{address}/v1/predict?samples=50&seed=0", content=file.read_bytes(),
                      headers={"content-type": "image/png"}, timeout=NEVER).json()["predictions"][0]  # fmt: skip
    shares = [f"{100 * p:.1f}" for p in sent["probabilities"]]
    page = visit()
    for hand_over in (lambda: page.choose("#file", file), lambda: page.drop("#gallery", file)):
        hand_over()
        said = answer(page)
        assert said["says"].startswith(sent["label"]) or said["says"] == "I don’t know"
        assert said["entropy"] == pytest.approx(sent["entropy"], abs=0.006)  # two decimals
        cells = page.evaluate(
            "[...document.querySelectorAll('#bars tr td:nth-child(3)')].map(cell => cell.textContent)"
        )
        found = [cell.removesuffix("\u202f%").replace("<0.1", "0.0").replace(">99.9", "100.0") for cell in cells]
        assert found == shares
        assert "digit.png" in page.text("#seen-says")
        page.click("#clear")
        assert page.text("#says") == "No image yet"


def test_a_dark_digit_on_paper_is_recognised_once_inverted(visit, digits, tmp_path):
    file = tmp_path / "paper.webp"
    Image.fromarray(255 - digits[3]).save(file, lossless=True)
    page = visit()
    page.choose("#file", file)
    answer(page)
    page.evaluate("document.querySelector('#announced').textContent = ''")  # to wait for what comes next
    page.click("#invert")
    said = answer(page)
    plain = tmp_path / "plain.png"
    Image.fromarray(digits[3]).save(plain)
    page.click("#clear")
    page.choose("#file", plain)  # as it is: the next image is not inverted
    assert answer(page) == said


def test_samples_are_seen_to_arrive(visit):
    page = visit(still=False)
    page.evaluate("""(() => {
        window.seen = []; window.announced = [];
        new MutationObserver(() => window.seen.push(Number(document.querySelector('#drawn').textContent)))
            .observe(document.querySelector('#drawn'), {childList: true});
        new MutationObserver(() => window.announced.push(document.querySelector('#announced').textContent))
            .observe(document.querySelector('#announced'), {childList: true});
    })()""")
    said = draw(page, "X")
    seen, announced = page.evaluate("[window.seen, window.announced]")
    assert seen[-1] == 50 and len(set(seen)) > 20 and seen[1:] == sorted(seen[1:])  # the first is the cleared 0
    # a screen reader hears the beginning and the end, not each sample
    assert [each for each in announced if each] == ["The model is computing.", announced[-1]]
    assert announced[-1].startswith(said["says"])
    dots = page.evaluate(
        "[...document.querySelectorAll('#bars .dots')].map(path => path.getAttribute('d').split('M').length - 1)"
    )
    assert max(dots) == 50  # one a sample


def test_it_works_on_a_phone(visit):
    page = visit(width=360, height=740, touch=True)
    page.touch("#pad", DRAWN["4"])
    assert answer(page)["says"].startswith("4")
    page.evaluate("window.scrollTo(0, 0)")
    bottom = page.evaluate("document.querySelector('#verdict').getBoundingClientRect().bottom")
    assert bottom <= 740  # what was drawn and what it is are in sight together
    page.touch("#pad", DRAWN["X"])
    answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = """[...document.querySelectorAll('body *')].filter(e => !e.closest('details'))
        .filter(e => e.getBoundingClientRect().right > 360.5).length"""
    assert page.evaluate(wide) == 0
    small = """[...document.querySelectorAll('button, select, label.button, summary')].filter(e => e.offsetParent)
        .filter(e => Math.min(e.offsetWidth, e.offsetHeight) < 24).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(small) == []  # WCAG 2.2, 2.5.8


def test_the_keyboard_alone_is_enough(visit):
    page = visit()
    focused = "(e => e.id || e.className || e.getAttribute('href') || e.tagName)(document.activeElement)"
    ring = """(e => getComputedStyle(e.type === 'file' ? e.parentElement : e))(document.activeElement)"""
    order = []
    for _ in range(8):
        page.press("Tab")
        order.append(page.evaluate(focused))
        assert page.evaluate(f"{ring}.outlineStyle") != "none" and page.evaluate(f"{ring}.outlineWidth") != "0px", order
    assert order == ["skip", "pad", "clear", "file", "#gallery", "samples", "SUMMARY", "card wrong"]

    page.press("Tab", 6, shift=True)
    assert page.evaluate(focused) == "pad"
    keys = "document.querySelector('#pad-keys').getBoundingClientRect().height"
    assert page.evaluate(keys) > 10  # the help is shown to whoever comes by keyboard
    # a 7: from the middle to the upper left, pen down, to the right, down in steps to the left
    page.press("ArrowLeft", 2, shift=True)
    page.press("ArrowUp", 3, shift=True)
    page.press("Space")
    page.press("ArrowRight", 4, shift=True)
    for _ in range(8):
        page.press("ArrowDown", 3)
        page.press("ArrowLeft", 1)
    page.press("Enter")
    assert answer(page)["says"].startswith("7")
    assert page.evaluate("document.querySelector('#pad').getAttribute('aria-label')") == "Drawing pad, 1 stroke"
    page.press("Delete")
    assert page.text("#says") == "No image yet"

    page.press("Tab", 6)
    page.press("Enter")  # the least certain test image
    answer(page)
    assert page.evaluate("document.activeElement.id") == "answer"


@pytest.mark.parametrize("options", [{}, {"dark": True}, {"width": 360, "height": 740}], ids=["light", "dark", "phone"])
def test_axe_finds_nothing(visit, options):
    page = visit(**options)
    draw(page, "X")
    page.evaluate("document.querySelector('details').open = true")
    found = page.axe()
    assert (found["violations"], found["unsure"]) == ([], [])
    assert {"color-contrast", "button-name", "label", "image-alt", "region"} <= set(found["passes"])


def test_nothing_leaves_the_server(visit, browser, address):
    page = visit("about:blank#", ready="true")
    page.send("Network.enable")
    page.open(f"{address}/", READY)
    draw(page, "3")
    page.click(".gallery button")
    page.until("document.querySelector('#seen-says').textContent.includes('a test image')")
    answer(page)
    asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert len(asked) > 8
    assert all(url.startswith((f"{address}/", "data:", "blob:", "about:")) for url in asked)
    policy = (
        "new Promise(done => { document.addEventListener('securitypolicyviolation', e => done(e.effectiveDirective)); "
    )
    image = "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; })"
    assert page.evaluate(policy + image) == "img-src"  # the policy holds: what breaks it would be heard
    page.forgive()  # that violation was asked for


def test_what_goes_wrong_is_shown(visit, tmp_path):
    file = tmp_path / "notes.png"
    file.write_text("no image")
    page = visit()
    page.choose("#file", file)
    page.until("!document.querySelector('#problem').hidden")
    assert "not an image" in page.text("#problem")
    assert page.evaluate("document.querySelector('#problem').getAttribute('role')") == "alert"
    said = draw(page, "7")  # and it goes on
    assert said["says"].startswith("7") and page.evaluate("document.querySelector('#problem').hidden")


def test_reliability_is_that_of_the_bins_around(visit, address):
    table = httpx.get(f"{address}/v1/model", timeout=NEVER).json()["evaluations"][0]["reliability"]
    page = visit()

    def nearest(confidence: float) -> dict:
        call = f"nearest({confidence}, {json.dumps(table)})"
        return page.evaluate(f"import('/static/verdict.js').then(({{nearest}}) => {call})")

    counts, accuracy = np.array(table["count"]), np.array([a or 0 for a in table["accuracy"]])
    for confidence in (0.97, 1.0, 0.93, 0.6, 0.0):
        found = nearest(confidence)
        low, high = round(20 * found["from"]), round(20 * found["to"])
        assert found["from"] <= confidence <= found["to"]
        assert found["n"] == counts[low:high].sum() >= 30
        assert found["right"] == pytest.approx((counts * accuracy)[low:high].sum() / found["n"])
    assert nearest(0.97)["n"] == counts[-1]  # its own bin, if that has enough images
    draw(page, "3")
    assert "between 95" in page.text("#nearest") and f"{counts[-1]} test images" in page.text("#nearest")


def test_the_small_image_is_empty_only_where_there_is_none(visit):
    page = visit()
    is_empty, black = "document.querySelector('#seen').classList.contains('empty')", "rgb(0, 0, 0)"
    colour = "getComputedStyle(document.querySelector('#preview')).backgroundColor"
    assert page.evaluate(is_empty) and page.evaluate(colour) != black and "will appear here" in page.text("#seen-says")
    draw(page, "3")
    assert not page.evaluate(is_empty) and page.text("#seen-says").startswith("What the model sees: 28 × 28")
    page.click("#clear")
    assert page.evaluate(is_empty)


def test_a_model_of_one_pass_says_so_and_has_a_spread(visit, tmp_path):
    with serving(trained(tmp_path, method="cnn-gp-sorf")) as address:
        page = visit(address)
        draw(page, "3")
        assert page.text("#one-pass") == "Computed in 1 pass."
        assert page.evaluate("document.querySelector('#samples-row').hidden")
        assert page.text("#bars td.spread").startswith("±")  # shown, also where it rounds to nothing
        assert "samples" not in page.text("#answer") and "draws of the last layer" in page.text("#parts")


@pytest.fixture
def bare(tmp_path: Path) -> Classifier:
    """A run that was never evaluated."""
    for name in ("run.json", "model.safetensors"):
        shutil.copy(sampled().folder.path / name, tmp_path / name)
    return Classifier.load(RunFolder(tmp_path), fabric=sampled().fabric)


def test_a_run_that_was_not_evaluated_says_so_and_a_token_is_asked_for(visit, bare):
    right = "0123456789abcdef"
    with serving(bare, token=right) as address:
        asks = "!document.querySelector('#token-form').hidden"
        page = visit(address, asks)
        for token in ("wrong-but-long-enough", right):
            page.until(asks)
            page.evaluate("document.querySelector('#token').value = ''")
            page.click("#token")
            page.send("Input.insertText", text=token)
            page.press("Enter")
        page.until(READY)
        assert "not been evaluated" in page.text("#reliability")
        assert "not on this machine" in page.text("#galleries")
        said = draw(page, "0")
        assert said["says"].startswith("0") and "50\u202f% or more" in said["why"]
        assert page.text("#nearest").startswith("Unknown")
        refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
        assert set(page.troubles) == {refused}  # what the browser notes of any refusal
        page.forgive()
