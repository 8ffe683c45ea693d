"""From a trained model and images to predictions, scores and files."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp import metrics
from calgp.calibration import Calibrator
from calgp.data import Corruption, Images, corrupted, load
from calgp.data.decode import SUFFIXES, read_picture
from calgp.data.images import unit
from calgp.decisions import Decisions
from calgp.errors import CalgpError
from calgp.gp import Batch, Model, NumericalError, Predictive, predict_batches
from calgp.metrics import Outcomes, Scores
from calgp.nets import Task
from calgp.runs.decided import decided, kept_promises, selective_scores, with_outcomes
from calgp.runs.folder import RunFolder, arithmetic
from calgp.runs.ranks import connected, gathered, owned, together

METRICS = {"err": metrics.error_rate, "mnll": metrics.mnll, "ece": metrics.ece, "brier": metrics.brier}  # the paper's
T = TypeVar("T")
BATCH = 100
KEEP = 20_000_000  # numbers: log-probabilities of a larger evaluation are scored as they come and not stored


@dataclass(frozen=True)
class Evaluation:
    """What a run makes of a set of images. `outside` images have other classes than the run: only doubt is measured."""

    source: str
    outside: bool
    outcomes: Outcomes | None
    columns: dict[str, Tensor]  # entropy, mutual_information, confidence, label, y, rows, decisions: one entry an image
    summary: dict[str, Any]  # what scores-*.json holds
    kept: dict[str, Tensor]  # log-probabilities and their spread, if they are few enough to be stored
    names: Sequence[str] | None  # of the images, if they have any


def batches(
    images: Images,
    model: Model,
    parts: Iterable[slice] | None = None,
    seen: Callable[[Tensor], None] = lambda x: None,
) -> Iterator[Batch]:
    """Images in order, or some `parts` of them, as `predict` takes them: where the model is, in its floating type.

    `seen` gets their bytes.
    """
    parameter = next(model.parameters())
    for part, x in images.read(images.parts(BATCH) if parts is None else parts):
        seen(x)
        yield unit(x).to(parameter), images.rows[part].to(parameter.device)


def slices(n: int) -> list[slice]:
    """The batches of n images."""
    return [slice(first, min(first + BATCH, n)) for first in range(0, n, BATCH)]


def over_ranks(fabric: Fabric | None, n: int, do: Callable[[list[slice]], Iterable[T]]) -> list[T]:
    """What `do` finds for the batches of n images, each a batch's, in their order; every rank does some and has all.

    Batches stay whole, so that a rank computes the same bits that one process would; no image is there twice.
    """
    if fabric is None or fabric.world_size == 1:
        return list(do(slices(n)))
    mine = slices(n)[fabric.global_rank :: fabric.world_size]
    found = gathered(fabric, together(fabric, lambda: list(do(mine))))
    return [found[place % fabric.world_size][place // fabric.world_size] for place in range(len(slices(n)))]


def score(model: Model, images: Images, *, samples: int, seed: int, fabric: Fabric | None = None) -> Scores:
    """ERR, MNLL, ECE, BRIER and the others, on images of the run's own classes; with a `fabric`, by all its ranks."""

    def outcomes(parts: list[slice]) -> Iterator[Outcomes]:
        predicted = predict_batches(model, batches(images, model, parts), samples=samples, seed=seed)
        for part, predictive in zip(parts, predicted, strict=True):
            yield metrics.outcomes(predictive.log_probs.cpu(), images.y[part])

    return metrics.scores(Outcomes.cat(over_ranks(fabric, len(images), outcomes)))


@dataclass(frozen=True)
class Predictor:
    """A trained model, its calibrator and decisions, if it has them: the only place where predictions are made."""

    model: Model
    calibrator: Calibrator | None
    decisions: Decisions | None = None

    @staticmethod
    def of(folder: RunFolder, fabric: Fabric, calibration: dict[str, Any] | None) -> "Predictor":
        """The folder's model, with what calibration.json holds, or as it was trained; and what it decides."""
        calibrator = None if calibration is None else folder.calibrator(calibration)
        decisions = folder.decider(calibrated=calibration is not None)
        return Predictor(folder.model().to(fabric.device), calibrator, decisions)

    def predict(self, data: Iterable[Batch], *, samples: int, seed: int) -> Iterator[Predictive]:
        """The predictive of each batch, on the CPU."""
        try:
            for part in predict_batches(self.model, data, samples=samples, seed=seed):
                part = on_cpu(part)
                yield part if self.calibrator is None else part.calibrated(self.calibrator.apply(part.log_probs))
        except NumericalError as error:
            raise CalgpError(f"These images cannot be predicted: {error}.") from error

    def decided(self, part: Predictive, x: Tensor) -> dict[str, Tensor]:
        """What the run decides on predicted pictures `x` (uint8); nothing where it has no decisions."""
        if self.decisions is None:
            return {}
        return decided(self.decisions, columns_of(part), part.log_probs, x)


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
    `corruption` the images are made worse first; its files, too, stand beside the others, as of mnist~noise-3. Where
    the run has decisions for these probabilities, the summary tells how well they keep their promises.
    """
    fabric, card = one_device(fabric), folder.card()
    folder = RunFolder(folder.path, writes=fabric.is_global_zero)
    source = card.run.source if source is None else source
    with connected(fabric), owned(fabric, folder):
        calibration = folder.calibration() if calibrated else None
        found = examine(
            folder, fabric, source=source, images=images, directory=directory, samples=samples, seed=seed,
            convert=convert, calibration=calibration, corruption=corruption, watch=watch,
        )  # fmt: skip
        told = {name: found.summary[name] for name in ("source", "samples", "seed", "calibrator")}
        told |= {"classes": list(card.classes), "names": None if found.names is None else list(found.names)}
        shift = None if corruption is None else corruption.label
        name = folder.predictions_name(source, found.summary["calibrator"], shift)
        folder.write_tensors(name, found.columns | found.kept, told)
        folder.write_evaluation(source, found.summary, shift)
        fabric.barrier()
    return found


def examine(
    folder: RunFolder,
    fabric: Fabric,
    *,
    source: str,
    images: Images | None = None,
    directory: Path | None = None,
    samples: int,
    seed: int,
    convert: bool,
    calibration: dict[str, Any] | None,
    corruption: Corruption | None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """What `evaluate` finds; nothing is written. `calibration` is what calibration.json holds, or held."""
    card = folder.card()
    if images is None:
        images = test_images(folder, source, directory=directory, convert=convert)
    check_form(images, card.task, source)
    named = source
    if corruption is not None:
        images = corrupted(images, corruption.kind, corruption.severity, seed=corruption.seed)
        named = f"{source}~{corruption.label}"
    predictor = Predictor.of(folder, fabric, calibration)
    outside = images.classes != card.classes
    clock = time.perf_counter()
    columns, outcomes, kept = _predicted(
        predictor, images, fabric, samples=samples, seed=seed, outside=outside, watch=watch
    )
    seconds = time.perf_counter() - clock
    calibrator = None if calibration is None else calibration["calibrator"]
    summary = {"source": named, "outside": outside, "n": len(images), "samples": samples, "seed": seed}
    summary |= {"calibrator": calibrator, "calibration": calibration}
    summary |= {"convert": convert, "checksum": images.checksum()}
    summary["corruption"] = None if corruption is None else {"of": source} | asdict(corruption)
    summary["environment"] = arithmetic(fabric)
    summary["prediction_seconds"] = round(seconds, 3)
    summary["entropy_histogram"] = _histogram(columns["entropy"], math.log(card.task.classes))
    summary["mean_entropy"] = columns["entropy"].mean().item()
    summary["mean_mutual_information"] = columns["mutual_information"].mean().item()
    summary["decisions"] = None
    if predictor.decisions is not None:
        promises = kept_promises(predictor.decisions, columns, len(card.classes), outside=outside)
        summary["decisions"] = {"made": folder.decisions()} | promises
    if outcomes is not None:
        summary |= _inside(outcomes, kept.get("log_probs"), images.y, seed)
        summary["selective"] = selective_scores(columns)
    else:
        summary |= _outside(folder, card.run.source, calibrator, columns, seed)
    return Evaluation(named, outside, outcomes, columns, summary, kept, images.names)


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
    if task.height != task.width:
        raise CalgpError(
            f"The run takes images of {task.height} × {task.width}; only square ones can be made from other sets."
        )
    return task.height, colour_of(task)


def colour_of(task: Task) -> Literal["grey", "rgb"]:
    """The colour of the pictures that a run takes."""
    if task.channels not in (1, 3):
        raise CalgpError(
            f"The run takes images of {task.channels} channels; only grey (1) or RGB (3) can be made from pictures."
        )
    return "grey" if task.channels == 1 else "rgb"


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
    names, predictive, _ = decide_files(folder, paths, fabric, samples=samples, seed=seed, calibrated=calibrated)
    return names, predictive


def decide_files(
    folder: RunFolder,
    paths: Sequence[Path],
    fabric: Fabric | None = None,
    *,
    samples: int = 50,
    seed: int = 0,
    calibrated: bool = True,
) -> tuple[list[str], Predictive, dict[str, Tensor]]:
    """`predict_files`, and what the run decides on them: `abstained` [N] and `sets` [N, Q], as far as it has them."""
    fabric = one_device(fabric)
    files = [file for path in paths for file in picture_files(path)]
    task = folder.card().task
    size, colour = (task.height, task.width), colour_of(task)
    x = torch.from_numpy(np.stack([read_picture(file, name=str(file), size=size, colour=colour) for file in files]))
    predictor = Predictor.of(folder, fabric, folder.calibration() if calibrated else None)

    def predicted(parts: list[slice]) -> Iterator[Predictive]:
        data = (fabric.to_device((x[part].float() / 255, torch.arange(part.start, part.stop))) for part in parts)
        return predictor.predict(data, samples=samples, seed=seed)

    with connected(fabric):
        predictive = Predictive.cat(over_ranks(fabric, len(x), predicted))
    return [str(file) for file in files], predictive, predictor.decided(predictive, x)


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
    fabric: Fabric,
    *,
    samples: int,
    seed: int,
    outside: bool,
    watch: Callable[[int, int], None],
) -> tuple[dict[str, Tensor], Outcomes | None, dict[str, Tensor]]:
    """Columns, outcomes (inside only) and, if they are few enough, log-probabilities and their spread."""

    def found(parts: list[slice]) -> Iterator[tuple[dict[str, Tensor], Outcomes | None]]:
        seen: deque[Tensor] = deque()  # pictures that were read, and are not predicted yet
        data = batches(images, predictor.model, parts, seen.append)
        predicted = predictor.predict(data, samples=samples, seed=seed)
        for part, predictive in zip(parts, predicted, strict=True):
            y, log_probs = images.y[part], predictive.log_probs
            store = len(images) * log_probs.shape[1] <= KEEP
            kept = {"log_probs": log_probs, "spread": predictive.spread} if store else {}
            decided = with_outcomes(predictor.decided(predictive, seen.popleft()), y, outside=outside)
            columns = {name: column for name, column in decided.items() if column.dim() == 1}
            watch(len(y) * fabric.world_size, len(images))
            yield columns_of(predictive) | kept | columns, None if outside else metrics.outcomes(log_probs, y)

    parts, outcomes = zip(*over_ranks(fabric, len(images), found), strict=True)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    kept = {name: joined.pop(name) for name in ("log_probs", "spread") if name in joined}
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
