"""An upgraded classifier: somebody's trained network, with what `upgrade` has fitted on its last layer."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from calgp import metrics
from calgp.errors import CalgpError
from calgp.gp import Latent, Noise, Predictive
from calgp.json_values import Json
from calgp.metrics import OutOfDistribution, Scores
from calgp.nets.last_layer import LastLayer
from calgp.nets.program import ProgramNetwork
from calgp.posthoc import outliers as outlier_scores
from calgp.posthoc.decisions import keyed_uniform
from calgp.posthoc.last_layer import LastLayerPosterior, UncertaintyScaling, log_odds_variance
from calgp.posthoc.outliers import OutlierScore, Threshold, Variance
from calgp.runs.decision_metrics import add_outcomes, decide_by, decision_metrics
from calgp.runs.evaluation import columns_of
from calgp.runs.folder import in_order
from calgp.runs.prediction import Prediction
from calgp.runs.reading import digest, read_header, read_tensors, wrap_read_errors
from calgp.runs.record import Count, Text, Whole, parse, to_json
from calgp.runs.results import DecisionMetrics, FittedDecisions
from calgp.runs.run_outliers import ONE_PASS
from calgp.runs.writing import wrap_os_errors, write_whole
from calgp.upgraded.fixed_mean import posterior_from
from calgp.upgraded.labelled_data import BATCH, Data, batches_of, collected

Kept: TypeAlias = dict[tuple[int, int], Tensor]
SeenNetwork: TypeAlias = LastLayer | ProgramNetwork  # what gives features and logits
NUMBERS = 2**24  # of covariances that are there at a time
NETWORK_CONFIDENCE = "network-confidence"  # 1 less the maximum probability of the network as it is
DRAWS, DRAWS_OF_MANY = 256, 64  # of the logits; of more than 100 classes


@dataclass(frozen=True)
class Upgrade:
    """What was fitted, but for tensors.

    layer: the network's last. structure, numbers: of the posterior (full, kronecker: Laplace's; gp: of the process).
    scaling: from logits and their variance to probabilities. temperature: of the logits alone, to compare with.
    outlier, settings: the score of features. threshold: of that score. decisions: prediction sets, and when to abstain.
    train, fitted, decided: how many images the posterior and the outlier score, the scaling, and the decisions were
    fitted on. warning: what to know of the temperature before it is trusted. shape: of an input; () in files of earlier
    versions. power: the outlier score and decisions read p^power, normalised: of a temperature in which the images that
    decided had no part.
    """

    layer: Text
    classes: tuple[Text, ...]
    structure: Text
    numbers: dict[str, float]
    scaling: UncertaintyScaling
    temperature: float
    outlier: Text
    settings: dict[str, Json]
    threshold: Threshold | None
    decisions: FittedDecisions | None
    train: Count
    fitted: Count
    decided: Whole
    warning: Text | None = None
    shape: tuple[Count, ...] = ()
    power: float = 1.0
    format: Literal[1] = 1


@dataclass(frozen=True)
class UpgradedEvaluation:
    """How good probabilities are before and after.

    scores: of the upgraded classifier; `temperature_alone`: of the network with a temperature that was fitted on the
    same images; `before`: of the network as it is. decisions: what they did. ood: how well each score tells images from
    `outside` from these; `network-confidence` is the maximum probability of the network as it is.
    """

    n: int
    scores: Scores
    temperature_alone: Scores
    before: Scores
    decisions: DecisionMetrics | None
    ood: dict[str, OutOfDistribution]


class UpgradedClassifier:
    """What `upgrade` makes: it takes what the network takes. `save` makes a run folder of it, which takes images.

    fitted: what was found. posterior: of the logits. outlier: the score of features.
    """

    def __init__(
        self, network: SeenNetwork, fitted: Upgrade, posterior: LastLayerPosterior, outlier: OutlierScore
    ) -> None:
        self.network, self.fitted, self.posterior, self.outlier = network, fitted, posterior, outlier

    @property
    def classes(self) -> tuple[str, ...]:
        return self.fitted.classes

    def predict(self, x: Tensor | np.ndarray) -> Prediction:
        """What inputs show, and how certain that is: x is what the network takes, [N, …]."""
        x = torch.as_tensor(x) if isinstance(x, np.ndarray) else x
        if not isinstance(x, Tensor) or x.dim() < 2 or not len(x):
            raise CalgpError("Give inputs as a tensor [N, …], as the network takes them.")
        found = [self.network(part) for part in x.split(BATCH)]
        predictive = self.scored(*(torch.cat([part[place].cpu() for part in found]) for place in (0, 1)))
        decided = self._decided(predictive, keyed_uniform(x))
        return Prediction.of(predictive, ONE_PASS, self.classes, decided=decided, threshold=self.fitted.threshold)

    def evaluate(self, data: Data, *, outside: Data | None = None) -> UpgradedEvaluation:
        """Scores on labelled data that nothing was fitted on, beside those of the network without the upgrade.

        With `outside` (its labels do not count, and may be left out), also how well outliers are told from `data`.
        """
        _, (c, f, y, uniform, _) = collected(self.network.network, data, self.network.name)
        predictive = self.predictive(c, f)
        decided = add_outcomes(self._decided(predictive, uniform), y, outside=False)
        columns = columns_of(predictive) | decided | {"y": y}
        return UpgradedEvaluation(
            len(y),
            _scores(predictive.log_probs, y),
            _scores((f.double() / self.fitted.temperature).log_softmax(1), y),
            _scores(f.double().log_softmax(1), y),
            self.fitted.decisions
            and decision_metrics(self.fitted.decisions, columns, len(self.classes), outside=False),
            {} if outside is None else self._detection(c, f, outside),
        )

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        source: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        """Write a run folder, which `calgp.load` and all commands take; or one .safetensors file without the network.

        The folder holds the network as data: a list of torch's operations and their tensors, no pickle, no code. It
        takes images with pixels from 0 to 1; `mean` and `std` of the channels say how they become what the network
        takes. A .safetensors file needs the network again: `UpgradedClassifier.load(path, network)`.

        Args:
            source: the images that it was trained for, such as folder:photos; `calgp evaluate` tests on these.
        """
        if Path(path).suffix != ".safetensors":
            from calgp.upgraded.run import write_folder  # it needs this class

            return write_folder(self, Path(path), source=source, mean=mean, std=std)
        if (source, mean, std) != (None, None, None):
            raise CalgpError("source, mean and std are for a run folder; a .safetensors file holds no network.")
        tensors = self.tensors()
        described = {"calgp": json.dumps(to_json(self.fitted)), "sha256": digest(tensors)}
        with wrap_os_errors(Path(path)):
            write_whole(Path(path), in_order(save(tensors, described)))

    def tensors(self) -> dict[str, Tensor]:
        """All tensors but the network's; with `fitted` they are all that was fitted."""
        tensors = {"weight": self.network.weight, "bias": self.network.bias}
        tensors = {name: value for name, value in tensors.items() if value is not None}
        tensors |= {f"posterior.{name}": value for name, value in self.posterior.tensors().items()}
        tensors |= {f"outlier.{name}": value for name, value in self.outlier.tensors().items()}
        return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}

    @staticmethod
    def load(path: str | os.PathLike[str], network: nn.Module) -> "UpgradedClassifier":
        """What `save` wrote into a .safetensors file, with the network that it was written for."""
        header = read_header(Path(path))
        with wrap_read_errors(Path(path)):
            fitted = parse(Upgrade, header.metadata)
        tensors = read_tensors(Path(path), header)
        last = LastLayer(network, fitted.layer)
        for name, mine in (("weight", last.weight), ("bias", last.bias)):
            if (mine is None) != (name not in tensors) or (
                mine is not None and not torch.equal(mine.cpu(), tensors[name])
            ):
                raise CalgpError(
                    f"{path} was saved for another network: the {name} of its last layer {last.name!r} is another. "
                    "Load the weights that it was saved with, or upgrade this network."
                )
        with wrap_read_errors(Path(path)):
            return UpgradedClassifier.of(last, fitted, tensors)

    @staticmethod
    def of(network: SeenNetwork, fitted: Upgrade, tensors: Mapping[str, Tensor]) -> "UpgradedClassifier":
        """From what `tensors` gave."""
        parts = {
            kind: {name.removeprefix(kind): each.clone() for name, each in tensors.items() if name.startswith(kind)}
            for kind in ("posterior.", "outlier.")
        }
        posterior = posterior_from(fitted.structure, fitted.numbers, parts["posterior."])
        outlier = outlier_scores.from_state(fitted.outlier, fitted.settings, parts["outlier."])
        return UpgradedClassifier(network, fitted, posterior, outlier)

    def _decided(self, predictive: Predictive, uniform: Tensor) -> dict[str, Tensor]:
        made = self.fitted.decisions
        return {} if made is None else decide_by(made.decisions, columns_of(predictive), predictive.log_probs, uniform)

    def predictive(self, c: Tensor, f: Tensor) -> Predictive:
        """Probabilities by the scaling; expected entropy, mutual information and spread by draws of the logits."""
        covariance = self.posterior.logit_covariance
        return Predictive.cat([self.predictive_at_once(f, covariance(c)) for c, f in parts(c, f)])

    @property
    def outlier_names(self) -> tuple[str, ...]:
        """Scores that `scored` adds: the fitted one, what it is made of, the variance, and the network's own."""
        return (*self._outliers(), NETWORK_CONFIDENCE)

    def scored(self, c: Tensor, f: Tensor) -> Predictive:
        """`predictive` with outlier scores, in the order of `outlier_names`."""
        predictive = self.predictive(c, f)
        read = self.as_decided(predictive)
        found = [each.score(c, read) for each in self._outliers().values()]
        return replace(predictive, outlier_scores=torch.stack([*found, 1 - f.double().softmax(1).amax(1)], 1))

    def as_decided(self, predictive: Predictive) -> Predictive:
        """With the probabilities that the outlier score reads."""
        return predictive.calibrated((self.fitted.power * predictive.log_probs).log_softmax(-1))

    def _outliers(self) -> dict[str, OutlierScore]:
        return self.outlier.parts() | {Variance.name: Variance()}

    def predictive_at_once(self, f: Tensor, covariance: Tensor, kept: Kept | None = None) -> Predictive:
        """Of logits f with their covariance; in double precision, in which logits that differ stay in their order.

        `kept`: draws by their place, which a first call fills; exports have them as constants.
        """
        draws = DRAWS if f.shape[1] <= 100 else DRAWS_OF_MANY
        rows = torch.zeros_like(f[:, 0], dtype=torch.long)
        noise = Noise(0, torch.zeros(1, dtype=torch.long), rows, draws=draws, kept=kept)
        points = Latent(f[None], covariance=covariance.to(f)[None]).points(draws, noise)
        log_probs = self.fitted.scaling.apply(f.double(), log_odds_variance(f, covariance).double())
        drawn = Predictive.of(points.double().log_softmax(-1)).calibrated(log_probs)
        return replace(drawn, latent_variance=covariance.diagonal(dim1=1, dim2=2).mean(1))

    def _detection(self, c: Tensor, f: Tensor, outside: Data) -> dict[str, OutOfDistribution]:
        parts = [self.network(x) for x, _ in batches_of(outside)]
        other = [torch.cat([part[place].cpu() for part in parts]) for place in (0, 1)]
        found = []
        for features, logits in ((c, f), other):
            predictive = self.scored(features, logits)
            read = {name: kind() for name, kind in outlier_scores.OUTLIER_SCORES.items() if not kind.reads_features}
            columns = {name: each.score(None, predictive) for name, each in read.items()}
            assert predictive.outlier_scores is not None  # noqa: S101 (for the type checker)
            found.append(columns | dict(zip(self.outlier_names, predictive.outlier_scores.unbind(1), strict=True)))
        return {name: metrics.ood(found[0][name], found[1][name]) for name in found[0]}


def parts(c: Tensor, f: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and logits of so many rows that their covariances over classes fit."""
    size = min(BATCH, max(1, NUMBERS // f.shape[1] ** 2))
    return zip(c.split(size), f.split(size), strict=True)


def _scores(log_probs: Tensor, y: Tensor) -> Scores:
    return metrics.scores(metrics.outcomes(log_probs, y))
