"""The outlier score of a run: how far the features of an image lie from those of the training images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from calgp.data import Images
from calgp.gp import Batch, Model, Passes, Predictive, mixes_rows, outputs_seen
from calgp.posthoc.outliers import Combined, OutlierScore, Threshold, from_state
from calgp.runs.evaluation import batches, predict_on_cpu
from calgp.runs.folder import RunFolder
from calgp.runs.reading import is_file, read_header, read_tensors, wrap_read_errors

FILE = "outliers.safetensors"
FALSE_ALARM = 0.05
FEWEST = 40  # held-out images: half of them say what is ordinary, the others where the threshold lies
TRAINING = 5000  # training images at most whose features are kept
WIDTH = 256  # features that are compared; more are projected to so many
ONE_PASS = Passes(1, "moments")


@dataclass(frozen=True, eq=False)
class RunOutliers:
    """Scores images by a run's prediction, before calibration, and by the features that its one pass computes.

    projection: random signs that make many features few, which keeps distances (Johnson & Lindenstrauss 1984); None
        where there are few. threshold: with a false-alarm rate, by held-out images that nothing was fitted on.
    """

    score: OutlierScore
    projection: Int8[Tensor, "d k"] | None
    threshold: Threshold

    @property
    def names(self) -> tuple[str, ...]:
        """The score, and those that it is made of."""
        return tuple(self.score.parts())

    def predict(self, model: Model, data: Iterable[Batch], *, seed: int) -> Iterator[Predictive]:
        """One pass over each batch, on the CPU, with outlier scores in the order of `names`; not calibrated."""
        for features, part in _with_features(model, data, seed):
            z = project(features, self.projection)
            scores = [each.score(z, part) for each in self.score.parts().values()]
            yield replace(part, outlier_scores=torch.stack(scores, 1))

    def elementary(self, features: Float[Tensor, "N d"], part: Predictive) -> Float[Tensor, "N"]:
        """The first score of `names` by operations that other run times have: for exports."""
        return self.score.elementary(project(features, self.projection), part)


def fit_outliers(model: Model, train: Images, held_out: Images | None, *, seed: int) -> RunOutliers | None:
    """`combined` on the features of some training images; None if the model has none or too few are held out."""
    if not has_features(model) or held_out is None or len(held_out) < FEWEST:
        return None
    generator = torch.Generator().manual_seed(seed)
    chosen = train.take(torch.randperm(len(train), generator=generator)[:TRAINING].sort().values)
    deciding, ordinary = held_out.split(0.5, seed)
    z, y = _all(model, chosen, seed)[0], chosen.y
    projection = None
    if z.shape[1] > WIDTH:
        projection = (2 * torch.randint(2, (z.shape[1], WIDTH), generator=generator) - 1).to(torch.int8)
    unseen, predictive = _all(model, ordinary, seed)
    score = Combined.of(project(z, projection), y, predictive.entropy, project(unseen, projection))
    features, predictive = _all(model, deciding, seed)
    inside = score.score(project(features, projection), predictive)
    return RunOutliers(score, projection, Threshold.fit(inside, false_alarm=FALSE_ALARM))


def has_features(model: Model) -> bool:
    """Whether the model predicts in one pass, image by image, from features of a network."""
    one_pass = Passes.of(model) == ONE_PASS and not mixes_rows(model)
    return one_pass and isinstance(getattr(model, "features", None), nn.Module)


def project(features: Float[Tensor, "N d"], projection: Int8[Tensor, "d k"] | None) -> Float[Tensor, "N k"]:
    return features if projection is None else features @ (projection.to(features) / projection.shape[1] ** 0.5)


def _with_features(model: Model, data: Iterable[Batch], seed: int) -> Iterator[tuple[Tensor, Predictive]]:
    """What one pass over each batch computes of the images, on the CPU: their features, and the predictive."""
    for x, rows in data:
        seen: list[Tensor] = []
        with outputs_seen([model.features], seen.append):  # type: ignore[list-item]
            (part,) = predict_on_cpu(model, [(x, rows)], ONE_PASS, seed=seed)
        # an image alone may come first: by it, the memory that a batch takes is found
        yield torch.cat(seen)[-len(x) :].float().cpu(), part


def _all(model: Model, images: Images, seed: int) -> tuple[Tensor, Predictive]:
    features, parts = zip(*_with_features(model, batches(images, model), seed), strict=True)
    return torch.cat(features), Predictive.cat(parts)


def write_outliers(folder: RunFolder, found: RunOutliers) -> None:
    tensors = found.score.tensors() | ({} if found.projection is None else {"projection": found.projection})
    described = {"score": found.score.name, "settings": found.score.settings(), "threshold": vars(found.threshold)}
    folder.write_tensors(FILE, tensors, described)


def read_outliers(folder: RunFolder) -> RunOutliers | None:
    """outliers.safetensors, checked by an image that is all zeros; None if the run has none."""
    path = folder.path / FILE
    if not is_file(path):
        return None
    header = read_header(path)
    tensors = dict(read_tensors(path, header))
    with wrap_read_errors(path):
        described, projection = header.metadata, tensors.pop("projection", None)
        score = from_state(described["score"], described["settings"], tensors)
        found = RunOutliers(score, projection, Threshold(**described["threshold"]))
        width = len(tensors["centre"]) if projection is None else len(projection)
        one = Predictive(torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1), 1)
        value = score.score(project(torch.zeros(1, width), projection), one)
        if not value.isfinite().all() or not isinstance(found.threshold.threshold, float):
            raise ValueError("its numbers are not finite")
    return found
