"""From a trained model and images to predictions, scores and files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp import metrics
from calgp.data import Images, load
from calgp.errors import CalgpError
from calgp.gp import Batch, Model, Predictive, predict_batches
from calgp.metrics import Outcomes, Scores
from calgp.runs.folder import RunFolder

METRICS = {"err": metrics.error_rate, "mnll": metrics.mnll, "ece": metrics.ece, "brier": metrics.brier}  # the paper's
BATCH = 100
KEEP = 20_000_000  # numbers: log-probabilities of a larger evaluation are scored as they come and not stored


@dataclass(frozen=True)
class Evaluation:
    """What a run makes of a set of images. `outside` images have other classes than the run: only doubt is measured."""

    source: str
    outside: bool
    outcomes: Outcomes | None
    columns: dict[str, Tensor]  # entropy, mutual_information, confidence, label, y, rows: one entry an image
    summary: dict[str, Any]  # what scores-*.json holds


def batches(images: Images, fabric: Fabric, size: int = BATCH) -> Iterator[Batch]:
    """Images in order, as `predict` takes them."""
    for first in range(0, len(images), size):
        part = slice(first, first + size)
        yield fabric.to_device((images.pixels(part), images.rows[part]))


def score(model: Model, images: Images, *, samples: int, seed: int, fabric: Fabric) -> Scores:
    """ERR, MNLL, ECE, BRIER and the others, on images of the run's own classes."""
    parts = predict_batches(model, batches(images, fabric), samples=samples, seed=seed)
    labels = images.y.split(BATCH)
    return metrics.scores(
        Outcomes.cat(metrics.outcomes(part.log_probs.cpu(), y) for part, y in zip(parts, labels, strict=True))
    )


def evaluate(
    folder: RunFolder,
    fabric: Fabric,
    *,
    source: str | None = None,
    directory: Path | None = None,
    samples: int = 50,
    seed: int = 0,
    limit: int | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Predict the test images of a source (the run's own by default), score them, and keep both in the folder."""
    card = folder.card()
    source = card.run.source if source is None else source
    images = test_images(folder, source, directory=directory)
    if limit is not None:
        images = images.take(torch.arange(min(limit, len(images))))
    model = folder.model().to(fabric.device)
    outside = images.classes != card.classes
    columns, outcomes, kept = _predicted(
        model, images, samples=samples, seed=seed, fabric=fabric, outside=outside, watch=watch
    )
    summary = {"source": source, "outside": outside, "n": len(images), "samples": samples, "seed": seed}
    summary["checksum"] = images.checksum()
    summary["mean_entropy"] = columns["entropy"].mean().item()
    summary["mean_mutual_information"] = columns["mutual_information"].mean().item()
    if outcomes is not None:
        summary |= _inside(outcomes, kept.get("log_probs"), images.y, seed)
    else:
        summary |= _outside(folder, card.run.source, columns, seed)
    folder.write_tensors(
        folder.predictions_name(source),
        columns | kept,
        {"source": source, "samples": samples, "seed": seed, "classes": list(card.classes), "names": images.names},
    )
    folder.write_evaluation(source, summary)
    return Evaluation(source, outside, outcomes, columns, summary)


def test_images(folder: RunFolder, source: str, *, directory: Path | None = None) -> Images:
    """The test part of a source, in the form that the run was trained on."""
    card = folder.card()
    images = load(source, "test", directory=directory, size=card.run.size, colour=card.run.colour)
    channels, height, width = images.x.shape[1:]
    if (channels, height, width) != (card.task.channels, card.task.height, card.task.width):
        wanted = f"{card.task.channels} × {card.task.height} × {card.task.width}"
        raise CalgpError(
            f"{source} has images of {channels} × {height} × {width}, the run was trained on {wanted} "
            "(channels × height × width). Train with --size and --colour, which convert every source alike."
        )
    return images


def _predicted(
    model: Model,
    images: Images,
    *,
    samples: int,
    seed: int,
    fabric: Fabric,
    outside: bool,
    watch: Callable[[int, int], None],
) -> tuple[dict[str, Tensor], Outcomes | None, dict[str, Tensor]]:
    """Columns, outcomes (inside only) and, if they are few enough, log-probabilities and their spread."""
    parts: list[dict[str, Tensor]] = []
    outcomes: list[Outcomes] = []
    store = True
    for part, y in zip(
        predict_batches(model, batches(images, fabric), samples=samples, seed=seed), images.y.split(BATCH), strict=True
    ):
        part = on_cpu(part)
        store = len(images) * part.log_probs.shape[1] <= KEEP
        kept = {"log_probs": part.log_probs, "spread": part.spread} if store else {}
        parts.append(columns_of(part) | kept)
        if not outside:
            outcomes.append(metrics.outcomes(part.log_probs, y))
        watch(len(y), len(images))
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    kept = {name: joined.pop(name) for name in ("log_probs", "spread") if store}
    columns = joined | {"y": images.y, "rows": images.rows}
    return columns, None if outside else Outcomes.cat(outcomes), kept


def columns_of(predictive: Predictive) -> dict[str, Tensor]:
    """What is told of each image."""
    return {
        "label": predictive.labels,
        "confidence": predictive.confidence,
        "entropy": predictive.entropy,
        "mutual_information": predictive.mutual_information,
    }


def on_cpu(part: Predictive) -> Predictive:
    return Predictive(part.log_probs.cpu(), part.expected_entropy.cpu(), part.variance.cpu(), part.samples)


def _inside(outcomes: Outcomes, log_probs: Tensor | None, y: Tensor, seed: int) -> dict[str, Any]:
    """Scores with bootstrap intervals, the reliability diagram, and ECE by its other definitions."""
    table = metrics.reliability(outcomes)
    interval = metrics.bootstrap(
        outcomes, lambda o: torch.stack([m(o) for m in METRICS.values()]), resamples=500, seed=seed
    )
    variants = {name: metrics.preset_ece(outcomes, preset).item() for name, preset in metrics.ECE_PRESETS.items()}
    variants["equal mass"] = metrics.ece(outcomes, binning="equal-mass").item()
    if log_probs is not None:
        variants["classwise"] = metrics.classwise_ece(log_probs, y).item()
    return {
        "scores": metrics.scores(outcomes).to_dict(),
        "intervals": dict(zip(METRICS, torch.stack([interval.low, interval.high], 1).tolist(), strict=True)),
        "ece_variants": variants,
        "reliability": {
            "edges": table.edges.tolist(),
            "count": table.count.tolist(),
            "accuracy": _known(table.accuracy, table.count),
            "confidence": _known(table.confidence, table.count),
        },
    }


def _outside(folder: RunFolder, own: str, columns: dict[str, Tensor], seed: int) -> dict[str, Any]:
    """How well doubt tells these images from the run's own test images, if those have been predicted."""
    if not (folder.path / folder.predictions_name(own)).is_file():
        return {"ood": None}
    inside = folder.tensors(folder.predictions_name(own))
    found = {}
    for name in ("entropy", "mutual_information"):
        intervals = metrics.bootstrap_ood(inside[name], columns[name], resamples=500, seed=seed)
        found[name] = {
            key: {"value": interval.estimate.item(), "interval": [interval.low.item(), interval.high.item()]}
            for key, interval in intervals.items()
        }
    return {"ood": found, "inside": own}


def _known(values: Tensor, count: Tensor) -> list[float | None]:
    """A column of the reliability diagram; an empty bin has no value."""
    return [value if n else None for value, n in zip(values.tolist(), count.tolist(), strict=True)]
