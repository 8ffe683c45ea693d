"""The run's model as the server uses it: the one place of this room that computes with `Classifier`."""

from typing import Any

import torch
from torch import Tensor

from calgp.data.decode import Colour
from calgp.errors import CalgpError
from calgp.gp import Engine, Passes, Predictive, Sampling, mixes_rows
from calgp.gp.inference import MEMORY
from calgp.runs import Classifier
from calgp.runs.evaluation import colour_of, on_cpu
from calgp.runs.prediction import OneShot
from calgp.serve.schemas import Prediction


class ServedModel:
    """A trained model with its calibrator and decisions."""

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

    def sampling(self, images: Tensor, seed: int) -> Sampling | OneShot:
        """Begin to predict images (uint8), all with the masks of row 0, as `Classifier.predict` has them."""
        return self._classifier.sampling((images.float() / 255).to(self._like), seed)

    def answers(
        self, predictive: Predictive, images: Tensor, decided: list[bool | None], samples: int
    ) -> list[Prediction]:
        """What is known about each image after so many samples, calibrated and decided upon as the run says."""
        part = on_cpu(predictive)
        if self._classifier.calibrator is not None:
            part = part.calibrated(self._classifier.calibrator.apply(part.log_probs))
        columns: dict[str, list[Any]] = {
            "index": part.labels.tolist(), "probabilities": part.probs.tolist(), "spread": part.spread.tolist(),
            "monte_carlo_error": part.monte_carlo_error.tolist(), "entropy": part.entropy.tolist(),
            "aleatoric": part.expected_entropy.tolist(), "epistemic": part.mutual_information.tolist(),
            "label_is_decided": decided,
        } | self._rules(part, images)  # fmt: skip
        shared = {"samples": samples, "passes": str(Passes(samples, "samples" if self.random else "moments"))}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [
            Prediction.model_construct(
                label=self.classes[row["index"]], confidence=row["probabilities"][row["index"]], **shared, **row
            )
            for row in rows
        ]

    def _rules(self, part: Predictive, images: Tensor) -> dict[str, list[Any]]:
        """The run's decisions and outlier scores; None for each image where it has none."""
        found: dict[str, list[Any]] = dict.fromkeys(
            ("conformal_set", "abstain", "outlier_score", "outlier"), [None] * len(images)
        )
        rules = self._classifier.decide_on(part, images)
        if "sets" in rules:
            found["conformal_set"] = [[self.classes[q] for q in row.nonzero().flatten()] for row in rules["sets"]]
        if "abstained" in rules:
            found["abstain"] = rules["abstained"].tolist()
        if part.outlier_scores is not None:
            scores, threshold = part.outlier_scores[:, 0], self._classifier.outlier_threshold
            found["outlier_score"] = scores.tolist()
            if threshold is not None:
                found["outlier"] = threshold.flags(scores).tolist()
        return found
