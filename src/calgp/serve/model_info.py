"""The run itself, for clients: read from its folder once, at the start."""

import torch
from torch import Tensor

from calgp._version import __version__
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.report.gallery import chosen
from calgp.runs import Classifier
from calgp.runs.evaluation import test_images
from calgp.runs.record import to_json
from calgp.runs.results import Evaluation
from calgp.serve.limits import Limits
from calgp.serve.model import ServedModel
from calgp.serve.schemas import (
    SAMPLES,
    EvaluationInfo,
    GalleryImage,
    GalleryResponse,
    InputForm,
    LimitsInfo,
    ModelResponse,
    OutlierRule,
)


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
    data = to_json(evaluation)
    stored = {name: data.get(name) for name in EvaluationInfo.model_fields}
    percentiles = entropy_percentiles(classifier, evaluation.source, evaluation.calibrator)
    return EvaluationInfo.model_validate(stored | {"entropy_percentiles": percentiles})


def entropy_percentiles(classifier: Classifier, source: str, calibrator: str | None) -> list[float] | None:
    """The entropies that 0, 1, …, 100 of 100 test images do not exceed; None if predictions were not stored."""
    try:
        columns = classifier.folder.predictions(source, calibrator, len(classifier.classes))
    except CalgpError:
        return None
    if columns is None:
        return None
    return columns["entropy"].double().clamp(min=0).quantile(torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()


def gallery_response(classifier: Classifier) -> GalleryResponse:
    """Test images by certainty; none where images or predictions are not on this machine."""
    try:
        columns, images = _predicted(classifier)
    except CalgpError:
        return GalleryResponse(most_certain=[], least_certain=[], confidently_wrong=[])
    found = chosen(images, columns, classifier.classes)
    least, wrong, most = ([GalleryImage(**vars(image)) for image in kind] for kind in found)
    return GalleryResponse(most_certain=most, least_certain=least, confidently_wrong=wrong)


def _predicted(classifier: Classifier) -> tuple[dict[str, Tensor], Images]:
    card = classifier.card
    calibrator = None if classifier.calibration is None else classifier.calibration.calibrator
    columns = classifier.folder.predictions(card.run.source, calibrator, len(classifier.classes))
    images = test_images(card, card.run.source)
    if columns is None or len(images) != len(columns["entropy"]) or not (images.y == columns["y"]).all():
        raise CalgpError("The test images are not those that were predicted.")
    return columns, images
