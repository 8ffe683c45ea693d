"""What is told of the run itself: read from its folder once, at the start."""

from typing import Any

from torch import Tensor

from calgp._version import __version__
from calgp.data import Images
from calgp.errors import CalgpError
from calgp.report.gallery import by_entropy, data_uri
from calgp.runs import RunFolder
from calgp.runs.evaluation import Predictor, test_images
from calgp.serve.doubts import entropy_percentiles
from calgp.serve.limits import Limits
from calgp.serve.schemas import Evaluation, Form, GalleryTold, LimitsTold, ModelTold, Shown

SHOWN = 12


def model_of(folder: RunFolder, predictor: Predictor, limits: Limits, *, random: bool, samples: int) -> ModelTold:
    """The run's card, its evaluations and the limits."""
    card, task = folder.card(), folder.card().task
    calibration = folder.calibration()
    calibrator = None if calibration is None else calibration["calibrator"]
    return ModelTold(
        name=folder.name,
        label=card.label,
        network=card.network,
        source=card.run.source,
        train_images=card.train_images,
        classes=list(card.classes),
        input=Form(channels=task.channels, height=task.height, width=task.width),
        random=random,
        calibrator=calibrator,
        decisions=None if predictor.decisions is None else folder.decisions(),
        evaluations=[
            _evaluation(folder, each) for each in folder.evaluations() if each.get("calibrator") == calibrator
        ],
        default_samples=min(samples, limits.samples),
        limits=LimitsTold(**{name: getattr(limits, name) for name in LimitsTold.model_fields}),
        version=__version__,
    )


def _evaluation(folder: RunFolder, summary: dict[str, Any]) -> Evaluation:
    kept = {name: summary.get(name) for name in Evaluation.model_fields}
    percentiles = entropy_percentiles(folder, summary["source"], summary.get("calibrator"))
    return Evaluation.model_validate(kept | {"entropy_percentiles": percentiles})


def gallery_of(folder: RunFolder) -> GalleryTold:
    """Test images by how certain the run was of them; none where images or predictions are not here."""
    try:
        columns, images = _predicted(folder)
    except CalgpError:
        return GalleryTold(most_certain=[], least_certain=[], confidently_wrong=[])
    classes = folder.card().classes
    wrong = (columns["label"] != columns["y"]).nonzero().squeeze(1)
    sure = wrong[columns["confidence"][wrong].argsort(descending=True, stable=True)]
    return GalleryTold(
        most_certain=_shown(images, columns, by_entropy(columns, descending=False), classes),
        least_certain=_shown(images, columns, by_entropy(columns), classes),
        confidently_wrong=_shown(images, columns, sure, classes),
    )


def _predicted(folder: RunFolder) -> tuple[dict[str, Tensor], Images]:
    card, calibration = folder.card(), folder.calibration()
    calibrator = None if calibration is None else calibration["calibrator"]
    columns = folder.tensors(folder.predictions_name(card.run.source, calibrator))
    images = test_images(folder, card.run.source)
    if len(images) != len(columns["entropy"]) or not (images.y == columns["y"]).all():
        raise CalgpError("The test images are not those that were predicted.")
    return columns, images


def _shown(images: Images, columns: dict[str, Tensor], index: Tensor, classes: tuple[str, ...]) -> list[Shown]:
    index = index[:SHOWN]
    chosen = {name: values[index].tolist() for name, values in columns.items() if values.ndim == 1}
    return [
        Shown(
            picture=data_uri(images.x[place]),
            name=f"row {chosen['rows'][i]}" if images.names is None else images.names[int(place)],
            truth=images.classes[chosen["y"][i]],
            label=classes[chosen["label"][i]],
            confidence=chosen["confidence"][i],
            entropy=max(chosen["entropy"][i], 0),
            epistemic=max(chosen["mutual_information"][i], 0),
            wrong=chosen["label"][i] != chosen["y"][i],
        )
        for i, place in enumerate(map(int, index))
    ]
