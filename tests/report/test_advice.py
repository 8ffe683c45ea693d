"""What an evaluation says in words: what is wrong, and what to do."""

from dataclasses import replace

import pytest

from calgp.metrics import Confusion, Scores
from calgp.nets import Task
from calgp.report.advice import advice, outside_words, worst_classes
from calgp.runs import Card, Evaluation, from_json
from calgp.runs.environment import Environment
from calgp.runs.outlier_metrics import Flagged, Number, OutOfDistribution
from calgp.runs.results import Corrupted, Intervals, Reliability

CLASSES = ("cat", "dog", "eel")
CARD = Card(from_json({"holdout": 0.1}), Task(1, 28, 28, 3), CLASSES, 900, "0" * 8, (), Environment())
SCORES = Scores(n=1000, err=0.1, mnll=0.3, ece=0.01, mce=0.1, brier=0.2, confidence=0.9, entropy=0.2)
# 100 of 1,000 wrong: 60 cats are called dogs, 40 dogs eels
CONFUSION = Confusion(3, ((0, 0, 300), (0, 1, 60), (1, 1, 300), (1, 2, 40), (2, 2, 300)))
GOOD = Evaluation(
    "digits", outside=False, n=1000, samples=50, seed=0, checksum="0" * 8, mean_entropy=0.2,
    mean_mutual_information=0.1, scores=SCORES, confusion=replace(CONFUSION, entries=((0, 0, 900), (0, 1, 2))),
    intervals=Intervals((0.08, 0.12), (0.2, 0.4), (0.0, 0.02), (0.1, 0.3)), ece_variants={"paper": 0.0, "authors": 0.0},
    reliability=Reliability((0.0, 1.0), (1000,), (0.9,), (0.9,)),
)  # fmt: skip


def confident(found: Evaluation, confidence: float) -> Evaluation:
    return replace(found, scores=replace(SCORES, confidence=confidence))


def test_where_nothing_is_wrong_nothing_is_advised():
    assert advice(GOOD, CARD, "runs/a") == []
    # 1.96 √(0.9 · 0.1 / 1000) = 0.0186: what chance allows between confidence and accuracy
    assert advice(confident(GOOD, 0.918), CARD, "runs/a") == []
    assert advice(confident(GOOD, 0.92), CARD, "runs/a") != []


def test_too_little_confidence_asks_for_longer_training_or_calibration():
    assert advice(confident(GOOD, 0.77), CARD, "my runs/a") == [
        "Under-confident by 13.0 points on average. Train longer (--epochs), or calibrate: calgp calibrate 'my runs/a'"
    ]


def test_a_calibrated_run_with_too_little_confidence_asks_for_longer_training():
    (sentence,) = advice(replace(confident(GOOD, 0.77), calibrator="temperature"), CARD, "a")
    assert "It is calibrated already: train longer (--minutes, --epochs), or with a larger --holdout." in sentence


@pytest.mark.parametrize(("right", "said"), [(0, True), (1, False)])
def test_labels_that_are_no_better_than_the_most_frequent_class_are_pointed_out(right, said):
    entries = ((0, 0, 900), (1, 0, 2 - right)) + ((1, 1, right),) * right
    found = replace(GOOD, confusion=replace(CONFUSION, entries=entries))
    assert any("Always answering cat would be as good" in each for each in advice(found, CARD, "a")) == said
    elsewhere = replace(found, source="folder:strangers")
    assert not any("Always answering" in each for each in advice(elsewhere, CARD, "a"))


def test_too_much_confidence_asks_for_calibration_and_first_for_a_hold_out():
    assert advice(confident(GOOD, 0.99), CARD, "a") == [
        "Over-confident by 9.0 points on average. Calibrate: calgp calibrate a"
    ]
    without = replace(CARD, run=from_json({"holdout": 0}))
    assert "train with --holdout 0.1, then `calgp calibrate`" in advice(confident(GOOD, 0.99), without, "a")[0]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (replace(GOOD, calibrator="temperature"), "It is calibrated already"),
        (replace(GOOD, corruption=Corrupted("digits", "noise", 3)), "not those that it was trained for"),
        (replace(GOOD, source="folder:strangers"), "not those that it was trained for"),
    ],
)
def test_what_calibration_would_not_mend_is_named(found, says):
    (sentence,) = advice(confident(found, 0.99), CARD, "a")
    assert says in sentence and "calgp calibrate a" not in sentence


def test_the_most_frequent_mistake_and_few_images_are_named():
    said = advice(replace(GOOD, n=120, confusion=CONFUSION), CARD, "a")
    assert said[0].startswith("Most frequent mistake: 60 of 360 images of cat are labelled dog;")
    assert said[1].startswith("120 images say little: the error lies between 8.00 % and 12.0 %.")


def test_images_of_other_classes_have_no_labels_to_judge_by():
    assert advice(replace(GOOD, outside=True), CARD, "a") == []


def test_of_images_of_other_classes_it_is_said_whether_they_are_noticed():
    few = replace(
        GOOD, outside=True, flagged=Flagged("combined", 0.05, 0.073, (0.05, 0.11)), inside="folder:photos",
        ood=dict.fromkeys(
            ("entropy", "mutual_information", "combined"), OutOfDistribution(*4 * [Number(0.792, (0.75, 0.83))])
        ),
    )  # fmt: skip
    called, pairs, what_to_do = outside_words(few, "my run")
    assert called == "7.30 % of these images are called outliers; of the run's own it should be at most 5.00 %."
    assert pairs.startswith("In 79.2 % of all pairs") and "outlier score" in pairs and "folder:photos" in pairs
    assert "calgp decide 'my run' --false-alarm 0.1" in what_to_do
    assert len(outside_words(replace(few, flagged=replace(few.flagged, share=0.9)), "my run")) == 2
    assert outside_words(replace(GOOD, outside=True), "my run") == []


def test_the_class_that_is_labelled_right_least_often_comes_first():
    rows = worst_classes(replace(GOOD, confusion=CONFUSION), CLASSES)
    assert rows == [
        ("cat", 360, 300 / 360, 1.0, "dog (60)"),
        ("dog", 340, 300 / 340, 300 / 360, "eel (40)"),
        ("eel", 300, 1.0, 300 / 340, ""),
    ]
