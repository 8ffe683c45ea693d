"""What an outlier score is, and those that read a predictive: confidence, entropy, mutual information, variance."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError
from calgp.json_values import Json


class PredictiveLike(Protocol):
    """What scores read of a `calgp.Predictive`."""

    @property
    def confidence(self) -> Tensor: ...
    @property
    def entropy(self) -> Tensor: ...
    @property
    def mutual_information(self) -> Tensor: ...
    @property
    def variance(self) -> Tensor: ...
    @property
    def latent_variance(self) -> Tensor | None: ...


class OutlierScore(ABC):
    """A score of inputs, fitted on training features. Subclasses are frozen dataclasses of numbers and tensors."""

    name: ClassVar[str]
    summary: ClassVar[str]
    reads_features: ClassVar[bool]
    reads_predictive: ClassVar[bool]

    @classmethod
    @abstractmethod
    def fit(cls, features: Float[Tensor, "N d"], y: Int[Tensor, "N"]) -> "OutlierScore":
        """The score for a classifier that was trained on these features and labels."""

    @abstractmethod
    def score(self, features: Float[Tensor, "N d"] | None, predictive: PredictiveLike | None = None) -> Tensor:
        """[N] in float64, higher is more of an outlier. What the score does not read may be None."""

    def elementary(self, features: Float[Tensor, "N d"], predictive: PredictiveLike) -> Tensor:
        """`score` by operations that a file of another run time has, for any number of inputs at once: for exports."""
        return self.score(features, predictive)

    def parts(self) -> dict[str, "OutlierScore"]:
        """This score by its name, and those that it is made of."""
        return {self.name: self}

    @property
    def step(self) -> float:
        """How far rounding may move the score: 0, but for one that counts ordinary inputs."""
        return 0.0

    def settings(self) -> dict[str, Json]:
        """The plain numbers, for JSON; with `tensors` it is all of the score."""
        return {key: value for key, value in vars(self).items() if not isinstance(value, Tensor)}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, for safetensors."""
        return {key: value for key, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class _OfPredictive(OutlierScore):
    """Read from a predictive: there is nothing to fit."""

    reads_features, reads_predictive = False, True

    @classmethod
    def fit(cls, features: Tensor | None = None, y: Tensor | None = None) -> "OutlierScore":
        return cls()

    def score(self, features: Tensor | None, predictive: PredictiveLike | None = None) -> Tensor:
        if predictive is None:
            raise CalgpError(f"The outlier score {self.name!r} reads a predictive; none was given.")
        return self.read(predictive).double()

    @abstractmethod
    def read(self, predictive: PredictiveLike) -> Tensor: ...


class MaximumProbability(_OfPredictive):
    """1 − max_q p_q (Hendrycks & Gimpel 2017)."""

    name = "confidence"
    summary = "1 less the largest probability"

    def read(self, predictive: PredictiveLike) -> Tensor:
        return 1 - predictive.confidence


class Entropy(_OfPredictive):
    """−Σ p log p: the total uncertainty."""

    name = "entropy"
    summary = "entropy of the probabilities"

    def read(self, predictive: PredictiveLike) -> Tensor:
        return predictive.entropy


class MutualInformation(_OfPredictive):
    """Entropy less expected entropy: what more data could take away."""

    name = "mutual-information"
    summary = "mutual information of label and function: the part of the entropy that more data could take away"

    def read(self, predictive: PredictiveLike) -> Tensor:
        return predictive.mutual_information


class Variance(_OfPredictive):
    """Mean variance of the functions f_q; where the predictive does not know it, Σ_q Var p_q over samples."""

    name = "variance"
    summary = "variance of the Gaussian process; of other classifiers, of the probabilities over samples"

    def read(self, predictive: PredictiveLike) -> Tensor:
        latent = predictive.latent_variance
        return predictive.variance.sum(-1) if latent is None else latent
