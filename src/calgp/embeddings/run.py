"""A run folder of a `GPClassifier`: embeddings are evaluated, calibrated and decided on as images are.

Embeddings stand in the place of images by the bytes of their float32 numbers, [N, 1, d, 4]: whatever splits, checks or
keys images by their bytes does so with embeddings, and nothing is rounded.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from calgp.data import Images
from calgp.data.images import LARGEST, stratified, to_unit_interval
from calgp.embeddings.cache import MadeBy, load_embeddings
from calgp.embeddings.classifier import GPClassifier
from calgp.errors import CalgpError
from calgp.gp import Batch, Engine, Passes, Predictive
from calgp.methods import METHODS
from calgp.nets import Task, Wrapped
from calgp.run import Run
from calgp.runs import Card, Classifier, Exported, Prediction, RunFolder
from calgp.runs.card import Vectors
from calgp.runs.environment import environment
from calgp.runs.export import Target
from calgp.runs.folder import check_new

MODEL, SCHEME = "model.safetensors", "embeddings:"
TEST_SHARE = 0.2  # of the rows, where there are no others to test on


class VectorRun(Classifier):
    """A `GPClassifier` with its folder. `classifier` is the estimator itself, which takes matrices.

    Its source, such as embeddings:photos.npz, is a file or a folder of `calgp embed`.
    """

    maskless = "A GPClassifier"

    def __init__(self, classifier: GPClassifier, card: Card, **options: Any) -> None:
        place = nn.ParameterList([torch.zeros(())])  # on the CPU, in float32: where and how embeddings are read
        super().__init__(place, card, **options)  # type: ignore[arg-type]  (it predicts itself)
        self.classifier, self.outlier_names = classifier, classifier.outlier_names

    @staticmethod
    def read(
        folder: RunFolder, card: Card, *, calibrated: bool = True, decided: bool = True, fabric: Fabric | None = None
    ) -> "VectorRun":
        """From the files of a folder, whose card has been read."""
        classifier = GPClassifier.load(folder.path / MODEL)
        if tuple(map(str, classifier.classes_)) != card.classes or classifier.n_features_in_ != card.task.height:
            raise CalgpError(f"{folder.path} has a model of other classes or embeddings than run.json: fit it again.")
        return VectorRun(
            classifier, card, folder=folder, calibration=folder.calibration() if calibrated else None,
            decisions=folder.decisions() if decided else None, fabric=fabric,
        )  # fmt: skip

    def predict_as_trained(self, data: Iterable[Batch], how: Passes, *, seed: int) -> Iterator[Predictive]:
        return (self.classifier.scored(_numbers(x)) for x, _ in data)

    def predict(
        self,
        images: Any,
        *,
        passes: int | None = None,
        engine: Engine | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
    ) -> Prediction:
        """What embeddings [N, d] show, how certain that is, and how far they are from the training rows."""
        how = self.passes(passes, engine, seed)
        if not isinstance(images, np.ndarray | Tensor):
            raise CalgpError(
                f"{self.folder.path} takes embeddings [N, {self.card.task.height}], not images: `calgp classify "
                f"{self.folder.path / MODEL} IMAGES --network NAME` runs their network first."
            )
        x = np.asarray(images, dtype=np.float32)
        (predictive,) = self.predict_batches([(to_unit_interval(_bytes(x)), torch.zeros(len(x)))])
        decided = self.decide_on(predictive, _bytes(x))
        return Prediction.of(predictive, how, self.classes, decided=decided, threshold=self.outlier_threshold)

    def test_images(
        self, source: str, *, directory: Path | None = None, convert: bool = False, skip_unreadable: bool = False
    ) -> Images:
        """The rows of a source; of the run's own without test rows of their own, those that `fit` left out to test."""
        images = vector_images(source, self.card.classes)
        vectors = self.card.vectors
        if source == self.card.run.source and vectors is not None and vectors.test is None:
            test = split_rows(images, vectors, self.card.run.seed)[1]
            images = images if test is None else test
        if images.x.shape[2] != self.card.task.height:
            raise CalgpError(
                f"{source} has embeddings of {images.x.shape[2]} numbers, {self.folder.path} was fitted on "
                f"{self.card.task.height}; embed both with the same network."
            )
        return images

    def held_out_images(self, directory: Path | None = None) -> Images:
        vectors = self.card.vectors
        if not self.card.holdout_rows or vectors is None:
            raise CalgpError(f"{self.folder.path} has no held-out rows; `calgp fit --holdout 0.1` keeps a tenth.")
        return vector_images(SCHEME + vectors.train, self.card.classes).take(torch.tensor(self.card.holdout_rows))

    def _export(self, path: Path | None, to: Target, how: Passes, seed: int) -> Exported:
        if to != "onnx" or self.calibrator is not None:
            raise CalgpError("A GPClassifier is exported to onnx only, with the probabilities that it was fitted with.")
        return self.classifier.export(self.folder.path / "model.onnx" if path is None else path)


def vector_images(source: str, classes: tuple[str, ...]) -> Images:
    """The rows of embeddings:PATH as `Images`; labels that are all among `classes` are numbered as these are."""
    if not source.startswith(SCHEME):
        raise CalgpError(f"Invalid source {source}: must be embeddings:PATH, since this run takes embeddings.")
    x, y, names = load_embeddings(source.removeprefix(SCHEME))
    y, names = (np.zeros(len(x), np.int64), ("unlabelled",)) if y is None else (y, names)
    if set(names) <= set(classes):
        y, names = np.array([classes.index(name) for name in names])[y], classes
    return Images.of(_bytes(x), torch.from_numpy(np.ascontiguousarray(y)), tuple(names))


def split_rows(images: Images, vectors: Vectors, seed: int) -> tuple[Images, Images | None, Images | None]:
    """What is fitted on, what tests it (None: another file does), and what is held out (None: nothing), by the seed."""
    test = held = None
    if vectors.test is None:
        images, test = images.split(TEST_SHARE, seed)
    if vectors.holdout:
        out = stratified(images.y, len(images.classes), vectors.holdout, seed)
        images, held = images.take(~out), images.take(out)
    return images, test, held


def fit_folder(
    path: Path, train: Path, test: Path | None, *, holdout: float, seed: int, made_by: MadeBy | None
) -> VectorRun:
    """Fit a `GPClassifier` on a file of embeddings, and keep it in a run folder."""
    check_new(path)
    _, y, names = load_embeddings(train)
    if y is None:
        raise CalgpError(f"{train} has no labels; put X and y into one .npz file: np.savez(file, X=X, y=y).")
    classes = tuple(sorted({names[each] for each in np.unique(y)}))
    if len(classes) < 2:
        raise CalgpError(f"{train} has only the class {''.join(classes)!r}; a classifier needs at least two.")
    images = vector_images(SCHEME + str(train), classes)
    if images.x.shape[2] > LARGEST:
        raise CalgpError(f"A run folder takes embeddings of up to {LARGEST:,} numbers; use --out model.safetensors.")
    vectors = Vectors(str(train), None if test is None else str(test), holdout)
    fitted, _, held = split_rows(images, vectors, seed)
    if len(fitted.y.unique()) < len(classes):
        raise CalgpError(f"{train} has too few rows, {len(images)}, to leave some out of each class; add rows.")
    names_of = np.array(classes)[fitted.y.numpy()]
    classifier = GPClassifier(random_state=seed).fit(_numbers(fitted.pixels()), names_of)
    run = Run(METHODS["cnn"], Wrapped("GPClassifier"), source=SCHEME + str(train if test is None else test), seed=seed)
    task = Task(1, images.x.shape[2], images.x.shape[3], classes=len(classes))
    rows = () if held is None else tuple(held.rows.tolist())
    card = Card(run, task, classes, len(fitted), fitted.checksum(), rows, environment(), vectors=vectors)
    folder = RunFolder(path)
    folder.create(card)
    with folder.owned():
        classifier.save(path / MODEL, made_by=made_by)
    return VectorRun(classifier, card, folder=folder)


def _bytes(x: np.ndarray) -> Tensor:
    """float32 [N, d] as bytes [N, 1, d, 4]."""
    if x.ndim != 2:
        raise CalgpError(f"Invalid embeddings of shape {list(x.shape)}: must be [N, d].")
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32).view(np.uint8).reshape(len(x), 1, -1, 4).copy())


def _numbers(x: Tensor) -> np.ndarray:
    """Back from bytes / 255, as `Images.pixels` gives them."""
    found = (255 * x).round().to(torch.uint8).cpu().contiguous().numpy()
    return found.reshape(len(found), -1).view(np.float32)
