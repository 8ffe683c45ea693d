"""Numbers as people read them, and a run's scores in sentences."""

import math
from collections.abc import Callable, Sequence
from datetime import datetime

from torch import Tensor

from calgp.metrics import Scores

CERTAIN = 0.9  # a confidence that counts as certain
THIN = "\u202f"  # a narrow space that does not break


def percent(share: float | None) -> str:
    """A share with one decimal, with two near 0 and 1; only what is 0 or 1 says so. Of None, as for `nats`, a dash.

    >>> [percent(share).replace(THIN, " ") for share in (0.0, 0.0064, 0.173, 0.9996, 1.0)]
    ['0 %', '0.64 %', '17.3 %', '99.96 %', '100 %']
    >>> percent(1 - 1e-6).replace(THIN, " "), percent(1e-6).replace(THIN, " ")
    ('>99.99 %', '<0.01 %')
    """
    if share is None:
        return "–"
    if share in (0, 1):
        return f"{100 * share:.0f}{THIN}%"
    if not 5e-5 <= share < 1 - 5e-5:
        return f"{'<0.01' if share < 0.5 else '>99.99'}{THIN}%"
    return f"{100 * share:.{1 if 0.1 <= share < 0.9995 else 2}f}{THIN}%"


def decimal(value: float) -> str:
    """Four decimals, as the paper's tables or one more; a minus is a minus."""
    return f"{value:.4f}".replace("-", "−")


def nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".replace("-", "−")


def interval(ends: Sequence[float] | None, form: Callable[[float], str] = decimal) -> str:
    """Both ends of an interval, the unit said once."""
    if ends is None:
        return "–"
    low, high = (form(end) for end in ends)
    return f"{low.removesuffix(f'{THIN}%')} – {high}"


def count(n: int, noun: str) -> str:
    """
    >>> count(1, "image"), count(1000, "image")
    ('1 image', '1,000 images')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def day(started: str) -> str:
    """A moment of run.json as a date, or as it stands if it is none."""
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return started
    return f"{moment.day} {moment:%B %Y}"


def confidence_gap(scores: Scores) -> float | None:
    """Mean confidence less accuracy, where it is further from 0 than chance allows (95 %)."""
    accuracy = 1 - scores.err
    gap, chance = scores.confidence - accuracy, 1.96 * math.sqrt(accuracy * (1 - accuracy) / scores.n)
    return gap if abs(gap) > chance else None


def as_good_as(name: str) -> str:
    """What to say where a classifier is no better than one that does not look at the images."""
    return f"Always answering {name} would be as good: train longer (--minutes, --epochs), or add images."


def too_sure(gap: float) -> str:
    """A gap between confidence and accuracy in words.

    >>> too_sure(-0.13)
    'under-confident by 13.0 points'
    """
    return f"{'over' if gap > 0 else 'under'}-confident by {abs(100 * gap):.1f} points"


def certain(confidence: Tensor, right: Tensor) -> tuple[int, float, float] | None:
    """Of the images with a confidence of 90 % or more: how many, their mean confidence, the share that is right."""
    if not (high := confidence >= CERTAIN).any():
        return None
    return int(high.sum()), confidence[high].double().mean().item(), right[high].double().mean().item()


def summary(scores: Scores, sure: tuple[int, float, float] | None) -> str:
    """What scores say; `sure` is what `certain` found."""
    wrong = f"On {count(scores.n, 'test image')} it is wrong on {percent(scores.err)}."
    average = f"On average it is {percent(scores.confidence)} sure and {percent(1 - scores.err)} right: "
    gap = confidence_gap(scores)
    verdict = "the difference may be chance." if gap is None else f"it is {too_sure(gap)}."
    if sure is None:
        return f"{wrong} {average}{verdict}"
    n, said, hit = sure
    where = f"Where it is at least 90{THIN}% sure ({count(n, 'image')}, {percent(said)} on average), "
    return f"{wrong} {where}it is right {percent(hit)} of the time. {average}{verdict}"


def detection(source: str, inside: str, auroc: float) -> str:
    """What an AUROC says: the share of pairs in the right order."""
    pairs = f"in {percent(auroc)} of all pairs (50{THIN}% would be chance)"
    return f"It is more uncertain about an image of {source} than about one of {inside} {pairs}."
