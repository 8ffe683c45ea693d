from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from calgp.errors import CalgpError
from calgp.report import write_report
from calgp.report.words import percent
from calgp.runs import RunFolder, ensemble
from folders import calibrate, decide, evaluate

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, text, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def reported(folders: list[RunFolder], out: Path, **options) -> Page:
    page = Page(write_report(folders, out, **options).read_text(encoding="utf-8"))
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def single(runs, tmp_path_factory) -> Page:
    return reported(runs[:1], tmp_path_factory.mktemp("single") / "report.html")


@pytest.fixture(scope="module")
def double(runs, tmp_path_factory) -> Page:
    return reported(runs, tmp_path_factory.mktemp("double") / "deep" / "er" / "report.html")


def test_the_page_needs_nothing_but_itself(double: Page) -> None:
    assert not double.all("script") and not double.all("link") and not double.all("iframe")
    for tag, attributes in double.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value is not None and value.startswith(("#", "data:image/png;base64,")), (tag, value)


def test_the_page_can_be_read_aloud(double: Page) -> None:
    assert all(figure["role"] == "img" and figure["aria-labelledby"] for figure in double.all("svg"))
    assert all(image["alt"] for image in double.all("img"))
    assert len(double.all("caption")) == len(double.all("table"))
    assert all(cell["scope"] in ("row", "col") for cell in double.all("th"))
    ids = [attributes["id"] for _, attributes in double.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in double.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


@pytest.mark.slow
def test_a_page_is_the_same_every_time(runs, tmp_path: Path) -> None:
    first, second = (write_report(runs[:1], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second
    assert len(first) < 1_000_000


def test_one_run_is_reported_in_full(single: Page, runs) -> None:
    card = runs[0].card()
    for word in (
        "cnn-gp-sorf",
        "On digits",
        "Out of distribution: letters",
        "Most uncertain",
        "Confidently wrong",
        "Training",
    ):
        assert word in single.text
    assert "Comparison" not in single.text
    for name in ("ERR", "MNLL", "ECE", "BRIER", "MCE", "Entropy", "AUROC", "FPR95", "Guo et al.", "Classwise"):
        assert name in single.text
    assert (
        card.checksum in single.text
        and "--passes 4 --engine moments --seed 0" in single.text
        and "method.frequencies" in single.text
    )
    assert "4 passes" in single.text


def test_the_caption_of_training_fits_the_method(double: Page) -> None:
    assert "it may be negative" in double.text and "this method has no KL" in double.text


def test_scores_are_those_of_the_folder(single: Page, runs) -> None:
    (evaluation,) = (found for found in runs[0].evaluations() if not found.outside)
    assert f"{evaluation.own.scores.mnll:.4f}" in single.text
    low, high = evaluation.own.intervals.brier
    assert f"{low:.4f} – {high:.4f}" in single.text


def test_several_runs_are_compared_first(double: Page, runs) -> None:
    assert double.text.index("Comparison") < double.text.index("On digits")
    assert double.text.count("★ best") == 5  # four metrics and the AUROC: one best each
    assert len(double.all("article")) == 2
    scores = [next(e.own.scores for e in folder.evaluations() if not e.outside) for folder in runs]
    best = min(scores, key=lambda score: score.mnll).mnll
    assert f"★ best{best:.4f}" in double.text


@pytest.mark.slow
def test_runs_of_one_method_are_distinguished(copied: RunFolder, runs, tmp_path: Path) -> None:
    page = reported([runs[0], copied], tmp_path / "report.html")
    assert re.search(r"cnn-gp-sorf\b.* \(run\)", page.text)


def test_the_most_uncertain_come_first(single: Page, runs) -> None:
    columns = runs[0].predictions("digits", None, 10)
    expected = columns["rows"][columns["entropy"].argsort(descending=True, stable=True)][:12].tolist()
    shown = [image["title"] for image in single.all("img")][:12]
    assert shown == [f"row {row}" for row in expected]


@pytest.mark.slow
def test_names_are_escaped(copied: RunFolder, tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    card = json.loads((copied.path / "run.json").read_text())
    card["classes"] = [f"{evil}{k}" for k in range(10)]
    card["environment"] |= {"command": ["calgp", "train", evil], "torch": evil, "started": evil}
    (copied.path / "run.json").write_text(json.dumps(card))
    for name in ("digits", "letters"):
        path = copied.path / f"scores-{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"source": name}))
    folder = RunFolder(copied.path.rename(tmp_path / "<b>bold"))
    page = reported([folder], tmp_path / "report.html")
    assert not page.all("script") and not page.all("b")
    assert evil in page.text and "<b>bold" in page.text


def test_a_source_that_is_not_there_leaves_a_note_in_place_of_images(copied: RunFolder, tmp_path: Path) -> None:
    source = f"folder:{tmp_path}/<none>"
    path = copied.path / "scores-letters.json"
    evaluation = json.loads(path.read_text()) | {"source": source}
    (copied.path / "predictions-letters.safetensors").rename(copied.path / copied.predictions_name(source))
    path.write_text(json.dumps(evaluation))
    page = reported([copied], tmp_path / "report.html")
    assert "No images." in page.text and "<none>" in page.text
    assert "Confidently wrong" in page.text  # the digits are still there


@pytest.mark.slow
def test_other_images_than_those_evaluated_are_not_shown(copied: RunFolder, tmp_path: Path) -> None:
    path = copied.path / "scores-digits.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checksum": "0" * 64}))
    page = reported([copied], tmp_path / "report.html")
    assert "checksum differs" in page.text and "Confidently wrong" not in page.text


@pytest.mark.slow
def test_without_predictions_the_scores_are_still_reported(copied: RunFolder, tmp_path: Path) -> None:
    for path in copied.path.glob("predictions-*"):
        path.unlink()
    page = reported([copied], tmp_path / "report.html")
    assert "evaluate again" in page.text and "MNLL" in page.text and not page.all("img")


def test_outside_alone_says_what_is_missing(copied: RunFolder, tmp_path: Path) -> None:
    (copied.path / "scores-digits.json").unlink()
    path = copied.path / "scores-letters.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ood": None}))
    page = reported([copied], tmp_path / "report.html")
    assert "has not been evaluated on images of its own classes" in page.text and "the model notices these" in page.text


def test_a_run_without_evaluations_is_refused(copied: RunFolder, tmp_path: Path) -> None:
    for path in copied.path.glob("scores-*"):
        path.unlink()
    with pytest.raises(CalgpError, match=f"run `calgp evaluate {copied.path}` first"):
        write_report([copied], tmp_path / "report.html")
    with pytest.raises(CalgpError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_said(runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalgpError, match="Cannot write"):
        write_report(runs[:1], tmp_path / "file" / "report.html")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(CalgpError, match="Cannot write"):
        write_report(runs[:1], tmp_path / "report.html")
    assert sorted(os.listdir(tmp_path)) == ["file", "report.html"]


@pytest.fixture(scope="module")
def calibrated(runs, tmp_path_factory) -> RunFolder:
    """A run with a temperature, evaluated both ways."""
    path = tmp_path_factory.mktemp("calibrated") / "run"
    folder = RunFolder(shutil.copytree(runs[0].path, path))
    calibrate(folder, passes=4)
    evaluate(folder, passes=4)
    return folder


@pytest.mark.slow
def test_a_calibrated_run_is_reported_beside_itself(calibrated: RunFolder, tmp_path: Path) -> None:
    page = reported([calibrated], tmp_path / "report.html")
    assert "2 results" in page.text and "cnn-gp-sorf + temperature" in page.text
    temperature = calibrated.calibration().parameters["temperature"]
    assert f"temperature {temperature:.3g}" in page.text and "hold-out MNLL" in page.text
    assert page.text.count("no part of the calibrated entropy") == 1
    for evaluation in calibrated.evaluations():
        if not evaluation.outside:
            assert f"{evaluation.own.scores.mnll:.4f}" in page.text
    assert "--uncalibrated" in page.text and "calgp calibrate" in page.text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_an_ensemble_is_reported_with_its_members(runs, tmp_path: Path) -> None:
    ensemble(runs, folder := RunFolder(tmp_path / "both"))
    evaluate(folder, passes=2)
    page = reported([folder], tmp_path / "report.html")
    assert "ensemble of cnn-gp-sorf, cnn" in page.text and "The first member's training" in page.text
    assert all(member.path in page.text for member in folder.card().members)


@pytest.fixture(scope="module")
def decided(runs, tmp_path_factory) -> RunFolder:
    """A run with a threshold and sets, evaluated inside and outside."""
    folder = RunFolder(shutil.copytree(runs[0].path, tmp_path_factory.mktemp("decided") / "run"))
    decide(folder, passes=4, error=0.95, confidence=None, coverage=0.8)
    for source in ("digits", "letters"):
        evaluate(folder, source=source, passes=4)
    return folder


def test_decisions_are_reported_with_figures_and_numbers(decided: RunFolder, tmp_path: Path) -> None:
    page = reported([decided], tmp_path / "report.html")
    found = decided.evaluation("digits").decisions
    text = " ".join(page.text.split())  # with plain spaces
    for word in ("when to answer", "Risk and coverage.", "Prediction sets by class.", "E-AURC", "may break them"):
        assert word in text
    answered, wrong, covered = (" ".join(percent(share).split()) for share in (
        found.selection.share, found.selection.error, found.sets.covered
    ))  # fmt: skip
    assert f"It answers {answered} of these images and is wrong on {wrong} of them" in text
    assert f"hold the true class of {covered} of these images" in text
    assert f"{found.sets.mean_size:.3f} classes on average" in text
    assert "abstains from the others. Its sets hold" in text  # the letters
    command = (
        "--error 0.95 --empirical --score confidence --coverage 0.8 --sets aps --passes 4 --engine moments --seed 0"
    )
    assert f"calgp decide {decided.path} {command}" in text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and len(page.all("caption")) == len(page.all("table"))


def test_a_run_without_decisions_has_the_curve_alone(single: Page) -> None:
    assert "Risk and coverage." in single.text and "E-AURC" in single.text
    assert "Prediction sets" not in single.text and "may break them" not in single.text


@pytest.mark.slow
def test_a_target_out_of_reach_and_other_samples_are_noted(decided: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(decided.path, tmp_path / "run"))
    decide(folder, passes=4, error=0.01, coverage=0.8, by_class=False, sets="lac", empty=True)
    evaluate(folder, passes=2)
    text = " ".join(reported([folder], tmp_path / "report.html").text.split())
    assert "It answers none of these 1,000 images." in text and "needs at least 299 held-out images" in text
    assert "fitted with 4 passes, these predictions have 2" in text and "Empty sets stay empty." in text


def test_evaluations_of_an_older_version_are_reported_without_decisions(copied: RunFolder, tmp_path: Path) -> None:
    for path in copied.path.glob("scores-*.json"):
        old = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("decisions", "selective")}
        path.write_text(json.dumps(old))
    page = reported([copied], tmp_path / "report.html")
    assert "Risk and coverage." in page.text and "E-AURC" not in page.text
