"""The run's model as the server uses it: the one place of this room that computes with `Classifier`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calgp.data.decode import Colour
from calgp.errors import CalgpError
from calgp.gp import Engine, Passes, Predictive, Sampling, mixes_rows
from calgp.gp.inference import MEMORY
from calgp.runs import Classifier
from calgp.runs.evaluation import colour_of, on_cpu
from calgp.runs.prediction import OneShot


@dataclass(frozen=True)
class Answer:
    """What is known about one image so far: plain numbers."""

    index: int  # of the most probable class
    probabilities: list[float]
    spread: list[float]
    monte_carlo_error: list[float]
    entropy: float
    aleatoric: float
    epistemic: float
    conformal_set: list[int] | None
    abstain: bool | None
    samples: int
    label_is_decided: bool | None  # whether sampling stopped because the label is; None if that was not asked for
    outlier_score: float | None = None  # None where the run has none
    outlier: bool | None = None


class ServedModel:
    """A trained model with its calibrator and decisions.

    Args:
        classifier: the run.
    """

    def __init__(self, classifier: Classifier) -> None:
        card = classifier.card
        if card.vectors is not None:
            raise CalgpError("This run takes embeddings, and the server images; export it: calgp export RUN --to onnx.")
        self.classes = list(card.classes)
        self.size = (card.task.height, card.task.width)
        self.colour: Colour = colour_of(card.task)
        self._classifier, self._model = classifier, classifier.model
        if mixes_rows(self._model):
            raise CalgpError(
                f"{classifier.folder.path} normalises by the moments of the batch (batch_moments): its prediction of "
                "an image depends on the images of other requests. Train it with backbone.batch_moments=false."
            )
        self._like = next(self._model.parameters())
        self._passes = classifier.passes()
        with torch.inference_mode():  # this warms the model up, too
            blank = self._like.new_zeros(1, card.task.channels, *self.size)
            sample_bytes, differ = classifier.sample_cost(blank, self._passes)
        self.random = differ and self._passes.count > 1  # else one pass is all, whatever is asked for
        self.fit = max(MEMORY[self._like.device.type == "cpu"] // sample_bytes, 1)  # samples of images at a time

    @property
    def engine(self) -> Engine:
        return self._passes.engine

    def describe(self, samples: int) -> str:
        """How a prediction was computed: "1 pass" or "50 samples"."""
        return str(Passes(samples, "samples" if self.random else "moments"))

    def sampling(self, images: Tensor, seed: int) -> Sampling | OneShot:
        """Begin to predict images (uint8), all with the masks of row 0, as `Classifier.predict` has them."""
        return self._classifier.sampling((images.float() / 255).to(self._like), seed)

    def answers(self, predictive: Predictive, images: Tensor, decided: list[bool | None], samples: int) -> list[Answer]:
        """A predictive as plain numbers, calibrated and decided upon as the run says."""
        part = on_cpu(predictive)
        if self._classifier.calibrator is not None:
            part = part.calibrated(self._classifier.calibrator.apply(part.log_probs))
        rules, none = self._classifier.decide_on(part, images), [None] * len(images)
        sets = [row.nonzero().flatten().tolist() for row in rules["sets"]] if "sets" in rules else none
        abstains = rules["abstained"].tolist() if "abstained" in rules else none
        columns = (
            part.labels, part.probs, part.spread, part.monte_carlo_error, part.entropy, part.expected_entropy,
            part.mutual_information,
        )  # fmt: skip
        counts, scores, outliers = [samples] * len(images), none, none
        if part.outlier_scores is not None:
            first, threshold = part.outlier_scores[:, 0], self._classifier.outlier_threshold
            scores, outliers = first.tolist(), none if threshold is None else threshold.flags(first).tolist()
        more = (sets, abstains, counts, decided, scores, outliers)
        return [Answer(*row) for row in zip(*(column.tolist() for column in columns), *more, strict=True)]
