"""What `calgp classify` does: images through a pretrained network and a fitted `GPClassifier`."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from calgp.data.decode import read_image
from calgp.embeddings import GPClassifier
from calgp.embeddings.cache import MadeBy
from calgp.embeddings.run import MODEL
from calgp.errors import CalgpError
from calgp.gp import Passes
from calgp.nets.pretrained import FeatureExtractor, find_network
from calgp.runs import Prediction
from calgp.runs.inputs import image_files
from calgp.runs.reading import read_header, wrap_read_errors
from calgp.runs.record import parse

BATCH = 50


def classified(
    model: Path, images: Iterable[Path], network: str, weights: str | None, features: str | None,
    *, device: torch.device | str,
) -> Prediction:  # fmt: skip
    """What the classifier says of image files: probabilities, uncertainty and the outlier score."""
    model = model / MODEL if model.is_dir() else model
    classifier, made_by = GPClassifier.load(model), _made_by(model)
    files = [file for path in images for file in image_files(path)]
    extractor = find_network(network, weights, features=features).to(device)
    _check_network(model, made_by, classifier.n_features_in_, extractor)
    x = torch.cat([_features(extractor, files[k : k + BATCH]) for k in range(0, len(files), BATCH)]).numpy()
    return Prediction(
        tuple(map(str, files)), tuple(map(str, classifier.classes_)), classifier.predictive(x), Passes(1, "moments"),
        outlier_score=torch.from_numpy(classifier.outlier_score(x)),
    )  # fmt: skip


def _features(extractor: FeatureExtractor, files: list[Path]) -> Tensor:
    colour = extractor.preprocessing.colour
    return extractor([torch.from_numpy(read_image(file, name=str(file), size=None, colour=colour)) for file in files])


def _made_by(model: Path) -> MadeBy | None:
    """The network that the file names; the classifier has been read from it already."""
    with wrap_read_errors(model):
        found = read_header(model).metadata.get("made_by")
        return None if found is None else parse(MadeBy, found)


def _check_network(model: Path, made_by: MadeBy | None, width: int, extractor: FeatureExtractor) -> None:
    if extractor.width != width:
        raise CalgpError(
            f"{extractor.name} gives {extractor.width} features, {model} was fitted on {width}; name the network of "
            f"the embeddings{'' if made_by is None else f', {made_by.network}'}."
        )
    if made_by is None:
        return  # embeddings of anybody's: the user alone knows their network
    for what, here, there in (
        ("weights", extractor.weights, made_by.weights),
        ("preprocessing", extractor.preprocessing, made_by.preprocessing),
    ):
        if here != there:
            raise CalgpError(
                f"{extractor.name} has other {what} here than when the embeddings of {model} were made (by "
                f"{made_by.network}); give the same network and --weights, or run `calgp embed` and `calgp fit` again."
            )
