"""Predictive: probabilities of images with their uncertainty, and the sums over samples that it is made of."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Predictive:
    """Predicted probabilities of N images with their uncertainty, averaged over samples (or draws of f).

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
    >>> p = Predictive(log_probs, expected_entropy=torch.tensor([0.3, 0.6]), variance=torch.zeros(2, 2), samples=50)
    >>> p.labels, p.entropy, p.mutual_information
    (tensor([0, 1]), tensor([0.3251, 0.6730]), tensor([0.0251, 0.0730]))

    Calibrated probabilities are found from the averaged ones, so what compares samples (expected entropy, mutual
    information, variance, spread, Monte Carlo error) stays that of the predictive before; see `calibrated`.
    """

    log_probs: Float[Tensor, "N Q"]
    expected_entropy: Float[Tensor, "N"]
    variance: Float[Tensor, "N Q"]
    samples: int
    uncalibrated_entropy: Float[Tensor, "N"] | None = None  # of the average, where log_probs have been calibrated since
    latent_variance: Float[Tensor, "N"] | None = None  # of f, its mean over classes, where a classifier tells it
    outlier_scores: Float[Tensor, "N K"] | None = None  # a column each, where a classifier has fitted some

    @property
    def probs(self) -> Float[Tensor, "N Q"]:
        """p(y | x), Eq. (10)."""
        return self.log_probs.exp()

    @property
    def labels(self) -> Int[Tensor, "N"]:
        """The most probable class."""
        return self.log_probs.argmax(-1)

    @property
    def confidence(self) -> Float[Tensor, "N"]:
        """The probability of the most probable class."""
        return self.log_probs.amax(-1).exp()

    @property
    def entropy(self) -> Float[Tensor, "N"]:
        """−Σ p log p in nats: the total uncertainty."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def mutual_information(self) -> Float[Tensor, "N"]:
        """Entropy less expected entropy, of the average before calibration: what more data could take away."""
        entropy = self.entropy if self.uncalibrated_entropy is None else self.uncalibrated_entropy
        return (entropy - self.expected_entropy).clamp_min(0)

    @property
    def spread(self) -> Float[Tensor, "N Q"]:
        """Standard deviation of the probabilities over samples."""
        return self.variance.sqrt()

    @property
    def monte_carlo_error(self) -> Float[Tensor, "N Q"]:
        """Standard error of `probs`, for having averaged only so many samples."""
        return (self.variance / self.samples).sqrt()

    def calibrated(self, log_probs: Float[Tensor, "N Q"]) -> "Predictive":
        """The same with calibrated probabilities: labels, confidence and entropy are theirs.

        Mutual information and expected entropy remain those of the samples, which no map of their average changes; so
        they do not add up to the calibrated entropy.
        """
        before = self.entropy if self.uncalibrated_entropy is None else self.uncalibrated_entropy
        return replace(self, log_probs=log_probs, uncalibrated_entropy=before)

    @staticmethod
    def of(log_probs: Float[Tensor, "S N Q"]) -> "Predictive":
        """The average of S samples, Eq. (10)."""
        return SampleMoments.of(log_probs).predictive()

    @staticmethod
    def cat(parts: Iterable["Predictive"]) -> "Predictive":
        """Several batches as one."""
        parts = list(parts)
        if not parts:
            raise ValueError("there are no images to predict")
        names = [name for name, value in vars(parts[0]).items() if isinstance(value, Tensor)]
        return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class SampleMoments:
    """What samples leave behind. Two sets of them join without loss (Chan et al. 1983 for the squared deviations)."""

    count: int
    log_sum: Float[Tensor, "N Q"]  # log Σ_s p_s
    entropy: Float[Tensor, "N"]  # Σ_s H[p_s]
    mean: Float[Tensor, "N Q"]  # of p_s
    deviations: Float[Tensor, "N Q"]  # Σ_s (p_s − mean)²

    @staticmethod
    def of(log_probs: Float[Tensor, "S N Q"]) -> "SampleMoments":
        probs = log_probs.exp()
        mean = probs.mean(0)
        entropy = torch.special.entr(probs).sum((0, 2))
        return SampleMoments(len(probs), log_probs.logsumexp(0), entropy, mean, (probs - mean).square().sum(0))

    def predictive(self) -> Predictive:
        # log p̄ = log Σ_s exp(log p_s) − log S, normalised once more against rounding
        log_probs = (self.log_sum - math.log(self.count)).log_softmax(-1)
        variance = self.deviations / max(self.count - 1, 1)  # unbiased; a single sample has none
        return Predictive(log_probs, self.entropy / self.count, variance, self.count)

    def __add__(self, other: "SampleMoments") -> "SampleMoments":
        count = self.count + other.count
        step = other.mean - self.mean
        deviations = self.deviations + other.deviations + step.square() * (self.count * other.count / count)
        log_sum, mean = torch.logaddexp(self.log_sum, other.log_sum), self.mean + step * (other.count / count)
        return SampleMoments(count, log_sum, self.entropy + other.entropy, mean, deviations)
