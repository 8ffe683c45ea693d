"""The run itself, for clients: read from its folder once, at the start."""

from contextlib import suppress
from typing import Literal

import torch
from pydantic import Field

from calgp._version import __version__
from calgp.errors import CalgpError
from calgp.json_values import Json
from calgp.metrics import Scores
from calgp.report.gallery import Thumbnail, chosen
from calgp.runs import Classifier
from calgp.runs.outlier_metrics import OutOfDistribution
from calgp.runs.record import to_json
from calgp.runs.results import Evaluation, Histogram, Intervals, Reliability
from calgp.serve.limits import Limits
from calgp.serve.model import ServedModel
from calgp.serve.schemas import SAMPLES, Closed


class InputForm(Closed):
    """What images are brought to before the model sees them."""

    channels: int
    height: int
    width: int


class EvaluationInfo(Closed):
    """How the run did on the test images of a source, as `calgp evaluate` stored it."""

    source: str
    outside: bool = Field(
        description="Whether the images have other classes than the run: then only uncertainty is measured."
    )
    n: int
    samples: int
    scores: Scores | None
    intervals: Intervals | None = Field(description="95% bootstrap intervals.")
    reliability: Reliability | None
    entropy_histogram: Histogram | None
    mean_entropy: float | None
    entropy_percentiles: list[float] | None = Field(
        description="The entropies that 0, 1, …, 100 of 100 images do not exceed; null if predictions were not stored."
    )
    ood: dict[str, OutOfDistribution] | None = Field(
        description="Outside: how well each score of uncertainty separates these from the run's own, by metric."
    )


class LimitsInfo(Closed):
    """The limits that a client can keep to."""

    body: int
    json_body: int
    side: int
    pixels: int
    images: int
    samples: int
    draws: int
    seconds: float


class OutlierRule(Closed):
    """An image is an outlier if its `score` is above the threshold: of ordinary images, at most `false_alarm` are."""

    score: str = Field(examples=["combined"])
    threshold: float
    false_alarm: float = Field(ge=0, le=1, examples=[0.05])


class ModelResponse(Closed):
    """The run that is served."""

    name: str
    label: str = Field(description="The method with its options.")
    network: str
    source: str = Field(description="What it was trained on.")
    train_images: int
    classes: list[str]
    input: InputForm
    random: bool = Field(description="Whether samples are drawn; if not, one pass is computed whatever is asked for.")
    engine: Literal["moments", "samples"] = Field(
        description="moments: the last layer is integrated in closed form, so that one pass has a spread, too."
    )
    calibrator: str | None
    decisions: dict[str, Json] | None = Field(description="decisions.json: thresholds, sets and what they promise.")
    outliers: OutlierRule | None = Field(None, description="When an image is an outlier; null: the run does not say.")
    evaluations: list[EvaluationInfo] = Field(description="With the probabilities that are served, calibrated or not.")
    default_samples: int
    limits: LimitsInfo
    version: str = Field(description="Of calgp.")


class GalleryResponse(Closed):
    """Test images of the run: empty where they are not on this machine or were not evaluated."""

    most_certain: list[Thumbnail]
    least_certain: list[Thumbnail]
    confidently_wrong: list[Thumbnail]


def model_response(classifier: Classifier, model: ServedModel, limits: Limits) -> ModelResponse:
    """The run's card, its evaluations and the limits."""
    folder, card, task = classifier.folder, classifier.card, classifier.card.task
    calibrator = None if classifier.calibration is None else classifier.calibration.calibrator
    decisions, rule, score = classifier.active_decisions, classifier.outlier_threshold, classifier.outlier_names[:1]
    return ModelResponse(
        name=folder.name,
        label=card.label,
        network=card.network,
        source=card.run.source,
        train_images=card.train_images,
        classes=list(card.classes),
        input=InputForm(channels=task.channels, height=task.height, width=task.width),
        random=model.random,
        engine=model.engine,
        calibrator=calibrator,
        decisions=None if decisions is None else to_json(decisions),
        outliers=rule and OutlierRule(score=score[0], threshold=rule.threshold, false_alarm=rule.false_alarm),
        evaluations=[_evaluation(classifier, each) for each in folder.evaluations() if each.calibrator == calibrator],
        default_samples=min(SAMPLES, limits.samples) if model.random else 1,
        limits=LimitsInfo(**{name: getattr(limits, name) for name in LimitsInfo.model_fields}),
        version=__version__,
    )


def _evaluation(classifier: Classifier, evaluation: Evaluation) -> EvaluationInfo:
    percentiles = entropy_percentiles(classifier, evaluation.source, evaluation.calibrator)
    names = EvaluationInfo.model_fields.keys() - {"entropy_percentiles"}
    return EvaluationInfo(**{name: getattr(evaluation, name) for name in names}, entropy_percentiles=percentiles)


def entropy_percentiles(classifier: Classifier, source: str, calibrator: str | None) -> list[float] | None:
    """The entropies that 0, 1, …, 100 of 100 test images do not exceed; None if predictions were not stored."""
    shares = torch.linspace(0, 1, 101, dtype=torch.float64)
    with suppress(CalgpError):
        columns = classifier.folder.predictions(source, calibrator, len(classifier.classes))
        if columns is not None:
            return columns["entropy"].double().clamp(min=0).quantile(shares).tolist()
    return None


def gallery_response(classifier: Classifier) -> GalleryResponse:
    """Test images by certainty; none where images or predictions are not on this machine."""
    nothing = GalleryResponse(most_certain=[], least_certain=[], confidently_wrong=[])
    try:
        columns, images = classifier.own_predictions(), classifier.test_images(classifier.card.run.source)
    except CalgpError:
        return nothing
    if columns is None or not torch.equal(images.y, columns["y"]):  # other test images than those predicted
        return nothing
    least, wrong, most = chosen(images, columns, classifier.classes)
    return GalleryResponse(most_certain=most, least_certain=least, confidently_wrong=wrong)
