"""What an evaluation says in words: how good the run is, what is wrong with it, and what to do about it."""

import shlex
from collections.abc import Sequence

from calgp.runs.card import Card
from calgp.runs.results import Evaluation

from .words import THIN, as_good_as, confidence_gap, count, percent, too_sure

FEW = 200  # images: with fewer, scores are hardly known
NOTICED = 0.5  # of the images of other classes that are called outliers: with less, advice is given
COMMON = 3  # images: a confusion that happens less often is no pattern


def advice(found: Evaluation, card: Card, run: str) -> list[str]:
    """What to do, one sentence or two each; empty where nothing is wrong that can be seen. `run` is named in commands.

    Images of other classes than the run's have no labels to be judged by: there is no advice.
    """
    if found.outside:
        return []
    gap = confidence_gap(found.own.scores)
    sentences = [] if gap is None else [_about_confidence(gap, found, card, run)]
    if found.confusion is not None and found.corruption is None and found.source == card.run.source:
        images = [each.n for each in found.confusion.by_class()]
        if 0 < sum(images) - max(images) <= sum(n for _, _, n in found.confusion.mistakes()):
            sentences.append(as_good_as(card.classes[images.index(max(images))]))
    if found.confusion is not None and (mistakes := found.confusion.mistakes()) and mistakes[0][2] >= COMMON:
        y, label, n = mistakes[0]
        of = count(found.confusion.by_class()[y].n, "image")
        sentences.append(
            f"Most frequent mistake: {n} of {of} of {card.classes[y]} are labelled {card.classes[label]}; look at "
            "some of them, and add training images of both."
        )
    if found.n < FEW:
        low, high = found.own.intervals.err
        sentences.append(
            f"{count(found.n, 'image')} say little: the error lies between {percent(low)} and {percent(high)}. "
            "Evaluate more images before you rely on it."
        )
    return [sentence.replace(THIN, " ") for sentence in sentences]


def outside_words(found: Evaluation, run: str) -> list[str]:
    """What was found of images of other classes than the run's, and what to do where they are not noticed."""
    sentences, flagged = [], found.flagged
    if flagged is not None:
        sentences.append(
            f"{percent(flagged.share)} of these images are called outliers; of the run's own it should be at most "
            f"{percent(flagged.false_alarm)}."
        )
    by = flagged.score if flagged is not None and flagged.score in (found.ood or {}) else "entropy"
    if found.ood is not None and by in found.ood:
        score = "entropy" if by == "entropy" else "outlier score"
        sentences.append(
            f"In {percent(found.ood[by].auroc.value)} of all pairs of one of these images and one of {found.inside}, "
            f"this one has the higher {score} (50{THIN}% would be chance)."
        )
    if flagged is not None and flagged.share < NOTICED:
        sentences.append(
            "Most of them are not noticed. Allow more false alarms (calgp decide "
            f"{shlex.quote(run)} --false-alarm 0.1), or train with some of them as a class of their own."
        )
    return [sentence.replace(THIN, " ") for sentence in sentences]


def _about_confidence(gap: float, found: Evaluation, card: Card, run: str) -> str:
    said = f"{too_sure(gap).capitalize()} on average."
    if found.corruption is not None or found.source != card.run.source:
        return f"{said} These images are not those that it was trained for: check that they show the same classes."
    if found.calibrator is not None and gap < 0:
        return f"{said} It is calibrated already: train longer (--minutes, --epochs), or with a larger --holdout."
    if found.calibrator is not None:
        return (
            f"{said} It is calibrated already, so these images differ from those held out, or too few were held out: "
            "train with a larger --holdout."
        )
    longer = "Train longer (--epochs), or calibrate" if gap < 0 else "Calibrate"
    if card.run.holdout:
        return f"{said} {longer}: calgp calibrate {shlex.quote(run)}"
    return f"{said} {longer} it: train with --holdout 0.1, then `calgp calibrate`."


def worst_classes(found: Evaluation, classes: Sequence[str]) -> list[tuple[str, int, float | None, float | None, str]]:
    """(name, images, recall, precision, most often taken for) of each class, the lowest recall first."""
    if found.confusion is None:
        return []
    rows = []
    for name, each in zip(classes, found.confusion.by_class(), strict=True):
        wrong = "" if each.mistaken_for is None else f"{classes[each.mistaken_for[0]]} ({each.mistaken_for[1]})"
        rows.append((name, each.n, each.recall, each.precision, wrong))
    return sorted(rows, key=lambda row: 2.0 if row[2] is None else row[2])
