"""From a trained model and images to predictions, scores and files."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp import metrics
from calgp.calibration import Calibrator
from calgp.data import Corruption, Images, corrupted, load
from calgp.data.decode import SUFFIXES, read_picture
from calgp.errors import CalgpError
from calgp.gp import Batch, Model, Predictive, predict_batches
from calgp.metrics import Outcomes, Scores
from calgp.nets import Task
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


def batches(images: Images, model: Model) -> Iterator[Batch]:
    """Images in order, as `predict` takes them: where the model is, in its floating type."""
    parameter = next(model.parameters())
    for first in range(0, len(images), BATCH):
        part = slice(first, first + BATCH)
        yield images.pixels(part).to(parameter), images.rows[part].to(parameter.device)


def score(model: Model, images: Images, *, samples: int, seed: int) -> Scores:
    """ERR, MNLL, ECE, BRIER and the others, on images of the run's own classes."""
    parts = predict_batches(model, batches(images, model), samples=samples, seed=seed)
    labels = images.y.split(BATCH)
    return metrics.scores(
        Outcomes.cat(metrics.outcomes(part.log_probs.cpu(), y) for part, y in zip(parts, labels, strict=True))
    )


@dataclass(frozen=True)
class Predictor:
    """A trained model and its calibrator, if it has one: the only place where a run folder's predictions are made."""

    model: Model
    calibrator: Calibrator | None

    @staticmethod
    def of(folder: RunFolder, fabric: Fabric, *, calibrated: bool) -> "Predictor":
        """What is in the folder; the model as it was trained where `calibrated` is false."""
        calibrator = folder.calibrator() if calibrated else None
        return Predictor(folder.model().to(fabric.device), calibrator)

    def predict(self, data: Iterable[Batch], *, samples: int, seed: int) -> Iterator[Predictive]:
        """The predictive of each batch, on the CPU."""
        for part in predict_batches(self.model, data, samples=samples, seed=seed):
            part = on_cpu(part)
            yield part if self.calibrator is None else part.calibrated(self.calibrator.apply(part.log_probs))


def one_device(fabric: Fabric | None) -> Fabric:
    """The Fabric that was given, or one on the best device of this machine."""
    return Fabric(accelerator="auto", devices=1) if fabric is None else fabric


def evaluate(
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    source: str | None = None,
    images: Images | None = None,
    directory: Path | None = None,
    samples: int = 50,
    seed: int = 0,
    convert: bool = False,
    calibrated: bool = True,
    corruption: Corruption | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Predict test images, score them, and keep both in the folder.

    The images are those of a source, the run's own by default; or `images`, which `source` then only names. A run that
    has been calibrated is scored so unless `calibrated` is false; the files of both stand side by side. With a
    `corruption` the images are made worse first; its files, too, stand beside the others, as of mnist~noise-3.
    """
    fabric, card = one_device(fabric), folder.card()
    source = card.run.source if source is None else source
    if images is None:
        images = test_images(folder, source, directory=directory, convert=convert)
    check_form(images, card.task, source)
    shift, named = None, source
    if corruption is not None:
        images = corrupted(images, corruption.kind, corruption.severity, seed=corruption.seed)
        shift, named = corruption.label, f"{source}~{corruption.label}"
    predictor = Predictor.of(folder, fabric, calibrated=calibrated)
    outside = images.classes != card.classes
    clock = time.perf_counter()
    columns, outcomes, kept = _predicted(predictor, images, samples=samples, seed=seed, outside=outside, watch=watch)
    seconds = time.perf_counter() - clock
    calibration = folder.calibration() if calibrated else None
    calibrator = None if calibration is None else calibration["calibrator"]
    summary = {"source": named, "outside": outside, "n": len(images), "samples": samples, "seed": seed}
    summary |= {"calibrator": calibrator, "calibration": calibration}
    summary |= {"convert": convert, "checksum": images.checksum()}
    summary["corruption"] = None if corruption is None else {"of": source} | asdict(corruption)
    summary["prediction_seconds"] = round(seconds, 3)
    summary["entropy_histogram"] = _histogram(columns["entropy"], math.log(card.task.classes))
    summary["mean_entropy"] = columns["entropy"].mean().item()
    summary["mean_mutual_information"] = columns["mutual_information"].mean().item()
    if outcomes is not None:
        summary |= _inside(outcomes, kept.get("log_probs"), images.y, seed)
    else:
        summary |= _outside(folder, card.run.source, calibrator, columns, seed)
    told = {"source": named, "samples": samples, "seed": seed, "classes": list(card.classes), "names": images.names}
    name = folder.predictions_name(source, calibrator, shift)
    folder.write_tensors(name, columns | kept, told | {"calibrator": calibrator})
    folder.write_evaluation(source, summary, shift)
    return Evaluation(named, outside, outcomes, columns, summary)


def test_images(folder: RunFolder, source: str, *, directory: Path | None = None, convert: bool = False) -> Images:
    """The test part of a source, in the form that the run was trained on; `convert` brings any other into it."""
    card = folder.card()
    size, colour = form(card.task) if convert else (card.run.size, card.run.colour)
    images = load(source, "test", directory=directory, size=size, colour=colour)
    check_form(images, card.task, source)
    return images


def check_form(images: Images, task: Task, source: str) -> None:
    """Images of another form than the run's are refused."""
    shape, wanted = tuple(images.x.shape[1:]), (task.channels, task.height, task.width)
    if shape != wanted:
        has, wants = (" × ".join(map(str, sizes)) for sizes in (shape, wanted))
        raise CalgpError(
            f"{source} has images of {has}, the run was trained on {wants} (channels × height × width). "
            "--convert resizes and recolours them."
        )


def form(task: Task) -> tuple[int, Literal["grey", "rgb"]]:
    """Size and colour that bring any picture into the form of a task."""
    if task.height != task.width or task.channels not in (1, 3):
        raise CalgpError(
            f"The run takes images of {task.channels} × {task.height} × {task.width}; only square grey or RGB images "
            "can be made from other pictures."
        )
    return task.height, "grey" if task.channels == 1 else "rgb"


def predict_files(
    folder: RunFolder,
    paths: Sequence[Path],
    fabric: Fabric | None = None,
    *,
    samples: int = 50,
    seed: int = 0,
    calibrated: bool = True,
) -> tuple[list[str], Predictive]:
    """What a run makes of picture files and folders of them: their names, and the predictive in the same order."""
    fabric = one_device(fabric)
    files = [file for path in paths for file in picture_files(path)]
    size, colour = form(folder.card().task)
    arrays = [read_picture(file, name=str(file), size=size, colour=colour) for file in files]
    x = torch.from_numpy(np.stack(arrays)).float() / 255
    rows = torch.arange(len(x))
    parts = zip(x.split(BATCH), rows.split(BATCH), strict=True)
    predictor = Predictor.of(folder, fabric, calibrated=calibrated)
    predicted = predictor.predict((fabric.to_device(part) for part in parts), samples=samples, seed=seed)
    return [str(file) for file in files], Predictive.cat(predicted)


def picture_files(path: Path) -> list[Path]:
    """A picture file, or all pictures below a folder in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CalgpError(f"{path} does not exist; give picture files, or folders of them.")
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
    )
    if not found:
        raise CalgpError(f"{path} has no pictures ({', '.join(sorted(SUFFIXES))}).")
    return found


def _predicted(
    predictor: Predictor,
    images: Images,
    *,
    samples: int,
    seed: int,
    outside: bool,
    watch: Callable[[int, int], None],
) -> tuple[dict[str, Tensor], Outcomes | None, dict[str, Tensor]]:
    """Columns, outcomes (inside only) and, if they are few enough, log-probabilities and their spread."""
    parts: list[dict[str, Tensor]] = []
    outcomes: list[Outcomes] = []
    store = True
    predicted = predictor.predict(batches(images, predictor.model), samples=samples, seed=seed)
    for part, y in zip(predicted, images.y.split(BATCH), strict=True):
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


def _outside(
    folder: RunFolder, own: str, calibrator: str | None, columns: dict[str, Tensor], seed: int
) -> dict[str, Any]:
    """How well doubt tells these images from the run's own test images, if those have been predicted, in the same way.

    Entropy is the calibrated one, mutual information that of the samples (`Predictive.calibrated`).
    """
    inside = folder.predictions(own, calibrator)
    if inside is None:
        return {"ood": None}
    found = {}
    for name in ("entropy", "mutual_information"):
        intervals = metrics.bootstrap_ood(inside[name], columns[name], resamples=500, seed=seed)
        found[name] = {
            key: {"value": interval.estimate.item(), "interval": [interval.low.item(), interval.high.item()]}
            for key, interval in intervals.items()
        }
    return {"ood": found, "inside": own}


def _histogram(values: Tensor, most: float, bins: int = 40) -> dict[str, list[float]]:
    """How often values of [0, most] fall into equal bins: small enough to keep, fine enough to draw a density."""
    counts = torch.histc(values.float().clamp(0, most), bins, 0, most)
    return {"edges": [most * place / bins for place in range(bins + 1)], "count": counts.tolist()}


def _known(values: Tensor, count: Tensor) -> list[float | None]:
    """A column of the reliability diagram; an empty bin has no value."""
    return [value if n else None for value, n in zip(values.tolist(), count.tolist(), strict=True)]
