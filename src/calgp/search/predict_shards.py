"""Predictions of many images, shard by shard into .npz files, here or on many machines."""

import functools
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from calgp.data.decode import read_image
from calgp.data.files import ImageFiles, LooseFiles
from calgp.data.shard_index import ShardFiles
from calgp.data.shards import shard_paths
from calgp.errors import CalgpError
from calgp.gp import Engine as PredictionEngine
from calgp.runs import Classifier, Prediction, RunFolder, open_device
from calgp.runs.evaluation import BATCH, colour_of
from calgp.runs.inputs import image_files
from calgp.runs.reading import is_file
from calgp.runs.record import Count, Text
from calgp.runs.writing import write_files
from calgp.search.engines import Engine, SerialEngine
from calgp.search.shards import Shard, Sharded, ShardTask, make_shards, sha256

FORMAT, SHARD = 1, 1000
SUFFIX = ".tar"
WEIGH = ("*.safetensors", "calibration.json", "decisions.json", "network.json")  # files that predictions depend on


@dataclass(frozen=True)
class PredictionsManifest(Sharded):
    """What a folder of predictions holds, and of what: equal descriptions mean equal predictions.

    model: SHA-256 of the run's model and of what was fitted to it. data: of the names and lengths of the images.
    Shards are predictions-000000.npz, …, with `names`, `log_probs` [n, classes], `label`, scores of uncertainty, and
    what was decided.
    """

    holds: ClassVar[str] = "predictions"
    command: ClassVar[str] = "calgp predict --out"
    file: ClassVar[str] = "predictions-{:06d}.npz"
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    run: Text
    model: Text
    calibrated: bool
    passes: Count
    engine: PredictionEngine
    seed: Annotated[int, Field(ge=0)]
    data: Text
    skip_unreadable: bool
    rows: Count
    classes: tuple[str, ...]
    rows_per_shard: Count
    shards: tuple[Shard | None, ...] = ()


@dataclass(frozen=True)
class OpenRun:
    """A run by its folder: any process can open it, and has the same one if the checksum is the same."""

    path: Path
    checksum: str
    calibrated: bool
    device: str

    @staticmethod
    def of(folder: RunFolder, *, calibrated: bool = True, device: str = "auto") -> "OpenRun":
        return OpenRun(folder.path.absolute(), run_checksum(folder), calibrated, device)


@dataclass(frozen=True, eq=False)
class PredictShard:
    """Writes what a run predicts of a shard's images."""

    run: OpenRun
    manifest: PredictionsManifest
    folder: Path

    def __call__(self, task: ShardTask[ImageFiles], *, watch: Callable[[float], None]) -> None:
        classifier, files, parts = opened(self.run), task.content, list[dict[str, np.ndarray]]()
        how = self.manifest
        for numbers in torch.arange(len(files.names)).split(BATCH):
            kept, x = _read(files, numbers.tolist(), classifier, skip_unreadable=how.skip_unreadable)
            if kept:
                found = classifier.predict(x, passes=how.passes, engine=how.engine, seed=how.seed)
                parts.append(_columns(found, files, kept))
            watch((int(numbers[-1]) + 1) / len(files.names))
        if not parts:
            raise CalgpError(f"None of the {len(files.names)} images from {files.names[0]} on can be read.")
        data = io.BytesIO()
        np.savez(data, **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})  # type: ignore[arg-type]
        write_files(self.folder, {how.shard_name(task.number): data.getvalue()})


def predict_shards(
    run: OpenRun,
    files: ImageFiles,
    folder: Path,
    *,
    name: str,
    passes: int | None = None,
    prediction: PredictionEngine | None = None,
    seed: int = 0,
    rows_per_shard: int = SHARD,
    skip_unreadable: bool = False,
    engine: Engine = SerialEngine(),
    watch: Callable[[int, int], None] = lambda more, total: None,
) -> PredictionsManifest:
    """Write predictions of all images into `folder`, shard by shard; what is there already is kept.

    `name` is what the user calls the run; `passes`, `prediction` (moments or samples) and `seed` are those of
    `Classifier.predict`. `engine` is where the shards are made.
    """
    if rows_per_shard < 1:
        raise CalgpError(f"Invalid rows_per_shard={rows_per_shard}: must be at least 1.")
    classifier = opened(run)
    if classifier.card.vectors is not None:
        raise CalgpError(f"{name} takes embeddings, not images; `calgp classify` runs their network first.")
    how = classifier.passes(passes, prediction, seed)
    everything = files.digests(torch.arange(len(files.names)))
    wanted = PredictionsManifest(
        FORMAT, name, run.checksum, run.calibrated, how.count, how.engine, seed,
        hashlib.sha256(everything.data).hexdigest(), skip_unreadable, len(files.names), classifier.classes,
        rows_per_shard,
    )  # fmt: skip

    def content(number: int) -> ImageFiles:
        rows = wanted.slice_of(number)
        return files.only(torch.arange(rows.start, rows.stop))

    work = PredictShard(run, wanted, folder.absolute())
    return make_shards(folder, wanted, work, content, engine=engine, watch=watch)


def find_files(paths: Sequence[Path]) -> ImageFiles:
    """Image files and folders of them; or tar shards, which may be patterns such as photos-{0000..0099}.tar."""
    archives = [path for path in paths if path.suffix == SUFFIX]
    if not archives:
        return LooseFiles.of([file for path in paths for file in image_files(path)])
    if len(archives) < len(paths):
        raise CalgpError(f"Invalid images: tar files such as {archives[0]} go without others; predict these apart.")
    found = [shard for path in archives for shard in shard_paths(path)]
    if not found:
        raise CalgpError(f"There are no shards {archives[0]}; give tar files, or a pattern such as photos-*.tar.")
    return ShardFiles.of(found)


def run_checksum(folder: RunFolder) -> str:
    """SHA-256 of the files of a run that its predictions depend on; of an ensemble, those of its members, too."""
    found = {path for pattern in WEIGH for path in folder.path.glob(pattern) if not path.name.startswith("predictions")}
    parts = [f"{path.name} {sha256(path)}" for path in sorted(found) if is_file(path)]
    parts += [run_checksum(RunFolder(folder.path.resolve() / member.path)) for member in folder.card().members]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def opened(run: OpenRun) -> Classifier:
    """The classifier, opened once in a process."""
    folder = RunFolder(run.path)
    if run_checksum(folder) != run.checksum:
        raise CalgpError(f"{run.path} has changed, or is another run on another machine; begin again.")
    return Classifier.load(folder, fabric=open_device(run.device), calibrated=run.calibrated)


def _read(
    files: ImageFiles, numbers: Sequence[int], classifier: Classifier, *, skip_unreadable: bool
) -> tuple[list[int], np.ndarray]:
    """Which of the files can be read, and their images in the run's form."""
    task, kept, arrays = classifier.card.task, list[int](), list[np.ndarray]()
    for number in numbers:
        try:
            name, size = files.names[number], (task.height, task.width)
            arrays.append(read_image(files.open(number), name=name, size=size, colour=colour_of(task)))
            kept.append(number)
        except CalgpError as error:
            if not skip_unreadable:
                raise CalgpError(f"{error}; leave such images out with --skip-unreadable.") from None
    return kept, np.stack(arrays) if arrays else np.empty(0)


def _columns(found: Prediction, files: ImageFiles, kept: Sequence[int]) -> dict[str, np.ndarray]:
    """What is kept of each image."""
    columns = {
        "log_probs": found.predictive.log_probs, "label": found.predictive.labels, "confidence": found.confidence,
        "entropy": found.entropy, "mutual_information": found.mutual_information, "outlier_score": found.outlier_score,
        "outlier": found.outliers, "abstains": found.abstains, "sets": found.sets,
    }  # fmt: skip
    names = np.array([files.names[number] for number in kept])
    return {"names": names} | {name: each.numpy() for name, each in columns.items() if each is not None}
