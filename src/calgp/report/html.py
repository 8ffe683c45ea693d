"""One self-contained HTML file about one or more runs: nothing is fetched, nothing is executed."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor, equal, stack

from calgp import metrics
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.runs.evaluation import test_images
from calgp.runs.folder import Card, RunFolder
from calgp.runs.run import to_json
from calgp.runs.writing import reporting, write_whole

from . import decisions, figures
from .gallery import Gallery, galleries, outside_galleries
from .svg import PALETTE
from .words import count, day, decimal, detection, interval, nats, percent, summary

SURE = 0.9
METRICS = {  # name in scores-*.json: name in the paper, how to write it, what it says
    "err": ("ERR", percent, "Share of wrong predictions."),
    "mnll": ("MNLL", decimal, "Mean negative log-likelihood in nats: small if true labels are given high probability."),
    "ece": ("ECE", decimal, "Expected calibration error: how far confidence is from accuracy, averaged over 20 bins."),
    "brier": ("BRIER", decimal, "Squared distance between probabilities and labels, summed over classes (0 to 2)."),
    "mce": (
        "MCE",
        decimal,
        "Maximum calibration error: the same distance in the worst bin, however few images it has.",
    ),
    "entropy": ("Entropy", nats, "Mean doubt of the predictions, in nats. Neither high nor low is better by itself."),
}
PAPER = ("err", "mnll", "ece", "brier")
VARIANTS = {
    "paper": "The paper's text: midpoint of the bin for its confidence, 20 bins",
    "authors": "The authors' code: mean confidence, 20 bins, a confidence of exactly 1 is lost",
    "guo": "Guo et al. (2017): mean confidence, 15 bins",
    "torchmetrics": "torchmetrics: mean confidence, 15 bins, exactly 1 in a bin of its own",
    "netcal": "netcal: mean confidence, 10 bins",
    "equal mass": "Equal mass: 20 bins that hold the same number of images",
    "classwise": "Classwise: the calibration error of every class's probability, averaged over classes",
}
DETECTION = {
    "auroc": ("AUROC", nats),
    "aupr_out": ("AUPR, outside", nats),
    "aupr_in": ("AUPR, inside", nats),
    "fpr95": ("FPR95", percent),
}
SCORED_BY = {"entropy": "entropy", "mutual_information": "mutual information"}


@dataclass(frozen=True)
class Evaluated:
    """A run's evaluation on one source: the numbers, a row for each image if they are kept, and the pictures."""

    summary: dict[str, Any]
    columns: dict[str, Tensor] | None
    images: Images | None
    absent: str  # why there are no pictures

    @property
    def source(self) -> str:
        return self.summary["source"]


@dataclass(frozen=True)
class Result:
    """A run and its evaluations with one calibrator, or with none."""

    folder: RunFolder
    card: Card
    calibrator: str | None
    evaluations: list[dict[str, Any]]
    first: bool  # of the run's results: the one with which its training is shown

    @property
    def title(self) -> str:
        return self.card.titled(self.calibrator)


def write_report(folders: Sequence[RunFolder], out: Path, *, directory: Path | None = None) -> Path:
    """Write a page about evaluated runs. Without their images (`directory` as for `load`) it has no pictures.

    Several runs are compared first, each metric on the test images of the run's own source. A run that was evaluated
    calibrated and as it was trained is told twice, side by side.
    """
    if not folders:
        raise CalgpError("A report needs at least one run folder, such as runs/mnist.")
    results = [result for folder in folders for result in _results(folder)]
    labels = _labels(results)
    colours = _colours([result.title for result in results])
    runs = [
        _run(result, label, colour, directory) for result, label, colour in zip(results, labels, colours, strict=True)
    ]
    environment = Environment(
        loader=PackageLoader("calgp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["themed"] = themed
    page = environment.get_template("report.html").render(runs=runs, comparison=_comparison(runs))
    out = Path(out)
    with reporting(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page.encode("utf-8", "replace"))
    return out


def themed(svg: str) -> str:
    """A figure in the page, where the style sheet may choose lighter colours for a dark screen."""
    for place, colour in enumerate(PALETTE):
        svg = svg.replace(colour, f"var(--c{place}, {colour})")
    return svg


def _results(folder: RunFolder) -> list[Result]:
    """A run's evaluations by the calibrator, those of the probabilities as trained first."""
    card, found = folder.card(), folder.evaluations()
    if not found:
        raise CalgpError(f"{folder.path} has not been evaluated; run `calgp evaluate {folder.path}` first.")
    calibrators = sorted({evaluation.get("calibrator") for evaluation in found}, key=lambda name: name or "")
    return [
        Result(folder, card, name, [each for each in found if each.get("calibrator") == name], name == calibrators[0])
        for name in calibrators
    ]


def _labels(results: Sequence[Result]) -> list[str]:
    """Titles; where two runs share one, the folder's name tells them apart."""
    names = [result.title for result in results]
    return [f"{r.title} ({r.folder.name})" if names.count(r.title) > 1 else r.title for r in results]


def _colours(methods: Sequence[str]) -> list[str]:
    """A colour for each method, the same in all figures of a page."""
    order = list(dict.fromkeys(methods))
    return [PALETTE[order.index(method) % len(PALETTE)] for method in methods]


def _run(result: Result, label: str, colour: str, directory: Path | None) -> dict[str, Any]:
    folder, card = result.folder, result.card
    found = [_evaluated(folder, evaluation, directory) for evaluation in result.evaluations]
    found.sort(key=lambda evaluated: (evaluated.source != card.run.source, evaluated.source))
    inside = [evaluated for evaluated in found if not evaluated.summary["outside"]]
    outside = [evaluated for evaluated in found if evaluated.summary["outside"]]
    log = folder.log() if result.first else []
    return {
        "label": label,
        "title": result.title,
        "colour": colour,
        "facts": _facts(folder, card) + _calibration_facts(found[0].summary.get("calibration")),
        "calibrated": result.calibrator is not None,
        "inside": [_inside(evaluated, card, colour) for evaluated in inside],
        "outside": [_outside(evaluated, inside, card) for evaluated in outside],
        "training": figures.training(log) if any(record["kind"] == "train" for record in log) else None,
        "kl": any(record.get("kl") for record in log),
        "rerun": _rerun(folder, card, found),
        "evaluate": f"calgp evaluate {shlex.quote(str(folder.path))}",
    }


def _evaluated(folder: RunFolder, evaluation: dict[str, Any], directory: Path | None) -> Evaluated:
    columns, absent = folder.predictions(evaluation["source"], evaluation.get("calibrator")), ""
    if columns is None:
        name = folder.predictions_name(evaluation["source"], evaluation.get("calibrator"))
        return Evaluated(evaluation, None, None, f"The folder has no {name}: evaluate again to see them.")
    for convert in (False, True):  # the evaluation's checksum tells which of them it saw
        try:
            images = test_images(folder, evaluation["source"], directory=directory, convert=convert)
        except CalgpError as error:
            absent = absent or str(error)
            continue
        if images.checksum() == evaluation["checksum"] and equal(images.y, columns["y"]):
            return Evaluated(evaluation, columns, images, "")
        absent = "The images that are there now are not those that were evaluated (their checksum differs)."
    return Evaluated(evaluation, columns, None, absent)


def _facts(folder: RunFolder, card: Card) -> list[tuple[str, str]]:
    run = card.run
    return [
        ("network", card.network),
        ("trained on", f"{count(card.train_images, 'image')} of {run.source}"),
        ("steps", f"{run.total_steps(card.train_images):,}"),
        ("seed", ", ".join(str(member.seed) for member in card.members) or str(run.seed)),
        ("date", day(str(card.environment.get("started", "unknown")))),
        ("folder", folder.name),
    ]


def _calibration_facts(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What the probabilities went through, and what it did to the hold-out that it was fitted on."""
    if found is None:
        return []
    numbers = [f"{name} {value:.3g}" for name, value in found["parameters"].items() if name == "temperature"]
    before, after = (decimal(found[key]["mnll"]) for key in ("before", "after"))
    facts = [
        ("calibrated by", ", ".join(numbers) or found["calibrator"]),
        ("hold-out MNLL", f"{before} → {after} ({count(found['n'], 'image')})"),
    ]
    return facts + ([("note", found["warning"])] if found["warning"] else [])


def _inside(evaluated: Evaluated, card: Card, colour: str) -> dict[str, Any]:
    """Scores, figures and pictures of images of the run's own classes."""
    found, columns = evaluated.summary, evaluated.columns
    scores = found["scores"]
    bins = figures.Bins(**found["reliability"])
    return {
        "source": found["source"],
        "n": count(found["n"], "image"),
        "samples": count(found["samples"], "sample"),
        "seed": found["seed"],
        "summary": summary(scores, _sure(columns)),
        "scores": _score_rows(found, _more_intervals(evaluated)),
        "values": {key: scores[key] for key in PAPER},
        "intervals": found["intervals"],
        "variants": [(VARIANTS.get(name, name), decimal(value)) for name, value in found["ece_variants"].items()],
        "reliability": figures.reliability(bins, ece=scores["ece"], mce=scores["mce"], colour=colour),
        "bins": bins,
        "confidence": None if columns is None else _confidence(columns),
        "decisions": decisions.told(found, columns, card.classes),
        "galleries": _shown(evaluated, galleries, card),
        "absent": evaluated.absent,
    }


def _outside(evaluated: Evaluated, inside: Sequence[Evaluated], card: Card) -> dict[str, Any]:
    """How much the run doubts images of other classes, beside its own if they were evaluated."""
    found, own = evaluated.summary, inside[0] if inside else None
    ood = found.get("ood")
    auroc = ood["entropy"]["auroc"] if ood else None
    return {
        "source": found["source"],
        "n": count(found["n"], "image"),
        "entropy": nats(found["mean_entropy"]),
        "mutual_information": nats(found["mean_mutual_information"]),
        "sentence": detection(found["source"], found["inside"], auroc["value"]) if auroc else None,
        "figure": _entropies(evaluated, own, card, auroc),
        "table": _detection_rows(ood) if ood else None,
        "auroc": auroc,
        "decisions": decisions.told_outside(found),
        "galleries": _shown(evaluated, outside_galleries, card),
        "absent": evaluated.absent,
    }


def _entropies(evaluated: Evaluated, own: Evaluated | None, card: Card, auroc: dict[str, Any] | None) -> str | None:
    if own is None or own.columns is None or evaluated.columns is None:
        return None
    return figures.entropies(
        own.columns["entropy"].tolist(),
        evaluated.columns["entropy"].tolist(),
        classes=len(card.classes),
        names=(own.source, evaluated.source),
        auroc=None if auroc is None else (auroc["value"], tuple(auroc["interval"])),
    )


def _shown(evaluated: Evaluated, choose: Any, card: Card) -> list[Gallery]:
    if evaluated.images is None or evaluated.columns is None:
        return []
    return choose(evaluated.images, evaluated.columns, card.classes)


def _sure(columns: dict[str, Tensor] | None) -> tuple[int, float, float] | None:
    """Of the images with a confidence of 90 % or more: how many, their mean confidence, the share that is right."""
    if columns is None or not (high := columns["confidence"] >= SURE).any():
        return None
    right = (columns["label"] == columns["y"])[high].double()
    return int(high.sum()), columns["confidence"][high].double().mean().item(), right.mean().item()


def _confidence(columns: dict[str, Tensor]) -> str:
    correct = (columns["label"] == columns["y"]).tolist()
    return figures.confidence_histogram(columns["confidence"].tolist(), correct)


def _more_intervals(evaluated: Evaluated) -> dict[str, list[float]]:
    """Of the scores for which evaluation keeps no intervals, by the same bootstrap, if all probabilities were kept."""
    columns = evaluated.columns
    if columns is None or "log_probs" not in columns:
        return {}
    found = metrics.bootstrap(
        metrics.outcomes(columns["log_probs"], columns["y"]),
        lambda o: stack([metrics.mce(o), o.entropy.double().mean()]),
        resamples=500,
        seed=evaluated.summary["seed"],
    )
    return dict(zip(("mce", "entropy"), stack([found.low, found.high], 1).tolist(), strict=True))


def _score_rows(found: dict[str, Any], more: dict[str, list[float]]) -> list[dict[str, str]]:
    intervals = found["intervals"] | more
    return [
        {
            "name": name,
            "value": form(found["scores"][key]),
            "interval": interval(intervals.get(key), form),
            "says": says,
        }
        for key, (name, form, says) in METRICS.items()
    ]


def _detection_rows(ood: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "cells": [(form(ood[by][key]["value"]), interval(ood[by][key]["interval"], form)) for by in SCORED_BY],
        }
        for key, (name, form) in DETECTION.items()
    ]


def _rerun(folder: RunFolder, card: Card, found: Sequence[Evaluated]) -> dict[str, Any]:
    """All that a second run needs to give the same numbers."""
    environment = dict(card.environment)
    command = environment.pop("command", [])
    options = to_json(card.run)
    return {
        "command": shlex.join(map(str, command)) if len(command) > 1 else None,
        "evaluations": [
            *_calibration_command(folder, found[0].summary),
            *_decision_command(folder, found[0].summary),
            *(_evaluation_command(folder, evaluated.summary, card) for evaluated in found),
        ],
        "described": "The first member's training" if card.members else "The whole description of the training",
        "options": [("members", ", ".join(member.path for member in card.members))] * bool(card.members)
        + _flat(options),
        "json": json.dumps(options, indent=1, ensure_ascii=False),
        "environment": [(name, str(value)) for name, value in environment.items()],
        "checksums": [
            (f"training images ({card.train_images:,})", card.checksum),
            *((f"{e.source}, test ({e.summary['n']:,})", e.summary["checksum"]) for e in found),
        ],
        "holdout": count(len(card.holdout_rows), "image"),
    }


def _calibration_command(folder: RunFolder, found: dict[str, Any]) -> list[str]:
    if (by := found.get("calibration")) is None:
        return []
    share = [] if by.get("share", 1.0) == 1 else ["--share", str(by["share"])]
    options = ["--calibrator", by["calibrator"], *share, "--samples", str(by["samples"]), "--seed", str(by["seed"])]
    return [shlex.join(["calgp", "calibrate", str(folder.path), *options])]


def _decision_command(folder: RunFolder, found: dict[str, Any]) -> list[str]:
    if (by := found.get("decisions")) is None:
        return []
    made, options = by["made"], []
    if (selection := made["selection"]) is not None:
        sure = selection["confidence"]
        options += ["--error", str(selection["error"])]
        options += ["--empirical"] if sure is None else ["--confidence", str(sure)]
        options += ["--score", selection["score"]]
    if (sets := made["sets"]) is not None:
        options += ["--coverage", str(sets["coverage"]), "--sets", sets["kind"]]
        options += ["--by-class"] * sets["by_class"] + ["--empty"] * sets["empty"]
    if made["calibration"] is None and folder.calibration() is not None:
        options.append("--uncalibrated")
    options += ["--samples", str(made["samples"]), "--seed", str(made["seed"])]
    return [shlex.join(["calgp", "decide", str(folder.path), *options])]


def _evaluation_command(folder: RunFolder, found: dict[str, Any], card: Card) -> str:
    source = [] if found["source"] == card.run.source else ["--source", found["source"]]
    options = [*source, "--samples", str(found["samples"]), "--seed", str(found["seed"])]
    if found.get("calibrator") is None and folder.calibration() is not None:
        options.append("--uncalibrated")
    return shlex.join(["calgp", "evaluate", str(folder.path), *options])


def _flat(options: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in options.items():
        rows += _flat(value, f"{before}{name}.") if isinstance(value, dict) else [(before + name, _option(value))]
    return rows


def _option(value: Any) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _comparison(runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The runs side by side, on the images of their own source; None if there is nothing to compare."""
    rows = [(run, run["inside"][0]) for run in runs if run["inside"]]
    if len(rows) < 2:
        return None
    best = {key: min(scored["values"][key] for _, scored in rows) for key in PAPER}
    sources = sorted({out["source"] for run, _ in rows for out in run["outside"] if out["auroc"]})
    return {
        "columns": [METRICS[key][0] for key in PAPER] + [f"AUROC, {source}" for source in sources],
        "rows": [
            {
                "label": run["label"],
                "colour": run["colour"],
                "source": scored["source"],
                "n": scored["n"],
                "cells": [_cell(scored, key, best[key]) for key in PAPER]
                + _auroc_cells([r for r, _ in rows], run, sources),
            }
            for run, scored in rows
        ],
        "sources": len({scored["source"] for _, scored in rows}),
        "small": [
            (run["label"], figures.reliability_small(
                scored["bins"], label=run["label"], ece=scored["values"]["ece"], colour=run["colour"]
            ))
            for run, scored in rows
        ],
        "dots": [
            figures.dots(
                METRICS[key][0], [_dot(run, scored, key) for run, scored in rows], unit="%" if key == "err" else ""
            )
            for key in PAPER
        ],
    }  # fmt: skip


def _cell(scored: dict[str, Any], key: str, best: float) -> dict[str, Any]:
    _, form, _ = METRICS[key]
    value = scored["values"][key]
    return {"value": form(value), "interval": interval(scored["intervals"].get(key), form), "best": value == best}


def _auroc_cells(
    runs: Sequence[dict[str, Any]], run: dict[str, Any], sources: Sequence[str]
) -> list[dict[str, Any] | None]:
    """How well entropy tells each outside source from the inside; more is better."""
    found = [{out["source"]: out["auroc"] for out in each["outside"] if out["auroc"]} for each in runs]
    own = {out["source"]: out["auroc"] for out in run["outside"] if out["auroc"]}
    cells: list[dict[str, Any] | None] = []
    for source in sources:
        best = max(each[source]["value"] for each in found if source in each)
        auroc = own.get(source)
        cells.append(
            auroc
            and {
                "value": nats(auroc["value"]),
                "interval": interval(auroc["interval"], nats),
                "best": auroc["value"] == best,
            }
        )
    return cells


def _dot(run: dict[str, Any], scored: dict[str, Any], key: str) -> figures.Dot:
    ends = scored["intervals"].get(key)
    return figures.Dot(run["label"], scored["values"][key], None if ends is None else tuple(ends), run["colour"])
