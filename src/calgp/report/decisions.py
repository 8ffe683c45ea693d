"""What a report says of when to answer and which classes to keep."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from calgp.decisions import SCORES, doubt, risk_coverage

from . import figures
from .words import count, interval, nats, percent

POINTS = 200  # of a curve: more cannot be seen
SCORED_BY = {"confidence": "confidence", "entropy": "entropy", "mutual-information": "mutual information"}
MADE = {
    "lac": "LAC: the classes whose probability is high enough",
    "aps": "APS: the most probable classes up to a sum, the last one by a draw that each picture keeps",
    "aps-plain": "APS without a draw: the most probable classes up to a sum",
}
SHOWN = 20  # classes in a figure; beyond, a table of numbers says more


def told(
    found: dict[str, Any], columns: Mapping[str, Tensor] | None, classes: tuple[str, ...]
) -> dict[str, Any] | None:
    """Decisions on images of the run's own classes; None where nothing is known of them."""
    decisions = found.get("decisions")
    if columns is None and decisions is None:
        return None
    selection = decisions and decisions["selection"] and _selection(decisions, found)
    sets = decisions and decisions["sets"] and _sets(decisions, found, classes)
    return {
        "figure": None if columns is None else _curves(columns, decisions),
        "areas": [
            (SCORED_BY[name], f"{areas['aurc']:.3g}", f"{areas['excess']:.3g}")
            for name, areas in (found.get("selective") or {}).items()
        ],
        "selection": selection,
        "sets": sets,
        "note": decisions and _note(decisions["made"], found),
    }


def told_outside(found: dict[str, Any]) -> str | None:
    """One sentence of decisions on images of other classes."""
    decisions = found.get("decisions")
    if decisions is None:
        return None
    parts = []
    if decisions["selection"] is not None:
        parts.append(f"It answers {percent(decisions['selection']['share'])} of them and abstains from the others.")
    if decisions["sets"] is not None:
        size = nats(decisions["sets"]["mean_size"])
        parts.append(f"Its sets hold {size} classes on average, though none of them is right.")
    return " ".join(parts)


def _curves(columns: Mapping[str, Tensor], decisions: dict[str, Any] | None) -> str:
    wrong = columns["label"] != columns["y"]
    made = decisions["made"]["selection"] if decisions and decisions["selection"] else None
    chosen = None
    if decisions and decisions["selection"] and decisions["selection"]["error"] is not None:
        chosen = (decisions["selection"]["share"], decisions["selection"]["error"])
    curves = [
        _curve(SCORED_BY[name], doubt(columns, name), wrong)
        for name in SCORES
        if name == "confidence" or doubt(columns, name).unique().numel() > 1  # a single pass has no mutual information
    ]
    return figures.risk_coverage(
        curves, best=_curve("best", wrong.double(), wrong), target=made and made["error"], chosen=chosen
    )


def _curve(name: str, doubts: Tensor, wrong: Tensor) -> figures.Curve:
    curve = risk_coverage(doubts, wrong)
    places = torch.linspace(0, len(wrong) - 1, min(POINTS, len(wrong))).round().long()
    return figures.Curve(name, curve.coverage[places].tolist(), curve.risk[places].tolist(), curve.aurc)


def _selection(decisions: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    made, now = decisions["made"]["selection"], decisions["selection"]
    error = "–" if now["error"] is None else f"{percent(now['error'])} ({interval(now['interval'], percent)})"
    return {
        "sentence": _sentence(made, now, found["n"]),
        "rows": [
            ("it answers", _rule(made)),
            ("promise", _promise(made)),
            ("hold-out", f"{count(made['n'], 'image')}, {made['answered']:,} answered, {made['wrong']:,} wrong"),
            ("answered here", f"{percent(now['share'])} of {count(found['n'], 'image')}"),
            ("wrong, of these", error),
        ],
        "warning": made["warning"],
    }


def _sentence(made: dict[str, Any], now: dict[str, Any], n: int) -> str:
    if now["error"] is None:
        return f"It answers none of these {count(n, 'image')}."
    asked = f"{percent(made['error'])} at most were asked for"
    return (
        f"It answers {percent(now['share'])} of these images and is wrong on {percent(now['error'])} of them; {asked}."
    )


def _rule(made: dict[str, Any]) -> str:
    if made["threshold"] is None:
        return "always"
    if not made["answered"]:
        return "never"
    if made["score"] == "confidence":
        return f"where confidence > {1 - made['threshold']:.6g}"
    return f"where {SCORED_BY[made['score']]} < {made['threshold']:.6g}"


def _promise(made: dict[str, Any]) -> str:
    if made["confidence"] is None:
        return f"{percent(made['error'])} wrong at most, on the hold-out alone"
    return f"{percent(made['error'])} wrong at most, with confidence {percent(made['confidence'])}"


def _sets(decisions: dict[str, Any], found: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    made, now = decisions["made"]["sets"], decisions["sets"]
    each = now["by_class"]
    rows = [
        (name, f"{n:,}", "–" if covered is None else percent(covered), "–" if size is None else nats(size))
        for name, n, covered, size in zip(classes, each["n"], each["covered"], each["size"], strict=True)
    ]
    seen = [q for q, n in enumerate(each["n"]) if n]
    few = 0 < len(seen) <= SHOWN
    return {
        "sentence": f"Its sets hold the true class of {percent(now['covered'])} of these images "
        f"({interval(now['interval'], percent)}); {percent(made['coverage'])} were asked for"
        f"{' of each class' if made['by_class'] else ''}. They have {nats(now['mean_size'])} classes on average.",
        "kind": MADE[made["kind"]],
        "n": count(made["n"], "held-out image"),
        "empty": "Empty sets stay empty." if made["empty"] else "An empty set gets the most probable class.",
        "sizes": [(size, f"{k:,}", percent(k / found["n"])) for size, k in enumerate(now["sizes"]) if k],
        "rows": rows,
        "figure": figures.set_coverage(
            [classes[q] for q in seen], [each["covered"][q] for q in seen], [each["n"][q] for q in seen],
            [each["size"][q] for q in seen], target=made["coverage"],
        ) if few else None,
    }  # fmt: skip


def _note(made: dict[str, Any], found: dict[str, Any]) -> str | None:
    if made["samples"] == found["samples"]:
        return None
    return (
        f"The decisions were fitted with {count(made['samples'], 'sample')}, these predictions have "
        f"{found['samples']:,}: the promises are for the former."
    )
