"""From latent functions to labels."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from calgp.gp.cholesky import TINY, covariance_root
from calgp.gp.constants import constant
from calgp.gp.noise import Noise, normal, quasi_normal, site_key


class Latent(NamedTuple):
    """What a model knows of f at N inputs: a mixture of S equally likely components, points or Gaussians.

    A network with masks: S points; without: one; a sparse GP: one Gaussian; a sparse GP on a masked network: S of them;
    a masked network whose last layer is integrated: S Gaussians with a covariance over classes.

    >>> Latent(torch.zeros(5, 2, 3)).is_points  # five samples of two images and three classes
    True
    """

    mean: Float[Tensor, "S N Q"]
    variance: Float[Tensor, "S N Q"] | None = None  # of independent functions; None: points, or a covariance is known
    covariance: Float[Tensor, "S N Q Q"] | None = None  # over classes

    @staticmethod
    def of(found: "Latent | Tensor | tuple[Tensor, ...]") -> "Latent":
        """What a head gives: f itself, (mean, variance) of f, or what is known of it."""
        if isinstance(found, Latent):
            return found
        return Latent(*(part[None] for part in ([found] if isinstance(found, Tensor) else found)))

    def by_sample(self, rows: int) -> "Latent":
        """[K, S · N, …] to [K · S, N, …]: points of all samples, or K = 1 Gaussian of each."""
        mean, *rest = (None if part is None else part.unflatten(1, (-1, rows)).flatten(0, 1) for part in self)
        assert mean is not None  # noqa: S101 (for the type checker)
        return Latent(mean, *rest)

    @property
    def is_points(self) -> bool:
        return self.variance is None and self.covariance is None

    @property
    def marginal_variance(self) -> Float[Tensor, "S N Q"]:
        """Of each function alone; points have none."""
        if self.covariance is not None:
            return self.covariance.diagonal(dim1=-2, dim2=-1)
        return torch.zeros_like(self.mean) if self.variance is None else self.variance

    def points(self, draws: int, noise: Noise | None = None) -> Float[Tensor, "SK N Q"]:
        """The points, or `draws` of each Gaussian (for each sample of the noise, if there is only one component).

        Draws of a Gaussian with a covariance come in pairs mean ± δ (antithetic), so their number is even. Where the
        noise says how many quasi-random ones there are, it is these.
        """
        if self.is_points:
            return self.mean
        if noise is not None and noise.draws is not None:
            deviation = self._quasi_deviation(noise, noise.draws)
        elif self.covariance is None:
            deviation = self._deviation * self._epsilon(draws, noise)  # [S, draws, N, Q]
        else:
            half = self._epsilon(-(-draws // 2), noise)
            half = torch.einsum("snqr,sknr->sknq", covariance_root(self.covariance), half)
            deviation = torch.cat([half, -half], 1)
        return (self.mean.unsqueeze(1) + deviation).flatten(0, 1)

    def _quasi_deviation(self, noise: Noise, draws: int) -> Float[Tensor, "S K N Q"]:
        """R ε with R Rᵀ the covariance, for quasi-random points ε that all rows share.

        Their first coordinates fill space most evenly, so these go to the functions with the largest means, which
        decide the label: R is lower triangular in that order. It makes 256 points as good as 1,000.
        """
        epsilon = quasi_normal(noise, _SITE, draws, self.mean.shape[-1], like=self._like)  # [S, draws, Q]
        epsilon = epsilon.repeat(self._members(noise), 1, 1)
        order = self.mean.argsort(-1, descending=True)
        place = order.argsort(-1)  # of each function in that order
        if self.covariance is None:
            shape = (len(epsilon), draws, *self.mean.shape[1:])
            return self._deviation * epsilon.unsqueeze(2).expand(shape).gather(-1, place.unsqueeze(1).expand(shape))
        rows = [index.unsqueeze(-1).expand_as(self.covariance) for index in (order, place)]
        ordered = self.covariance.gather(-2, rows[0]).gather(-1, rows[0].mT)
        return torch.einsum("snqr,skr->sknq", covariance_root(ordered).gather(-2, rows[1]), epsilon)

    @property
    def _deviation(self) -> Float[Tensor, "S 1 N Q"]:
        return self.marginal_variance.clamp_min(TINY).sqrt().unsqueeze(1)

    def _epsilon(self, draws: int, noise: Noise | None) -> Float[Tensor, "SM K N Q"]:
        _, n, outputs = self.mean.shape
        members = self._members(noise)
        epsilon = normal(noise, _SITE, members * draws * outputs, rows=n, like=self._like)
        epsilon = epsilon.unflatten(-1, (members, draws, outputs)).permute(2, 0, 3, 1, 4)
        return epsilon.flatten(0, 1)  # [S · members, draws, N, Q]

    @property
    def _like(self) -> Tensor:
        """What draws are to be like: in half precision, the covariance has more digits than the mean."""
        return self.mean if self.covariance is None else self.covariance

    def _members(self, noise: Noise | None) -> int:
        """Components for each sample: those of an ensemble, whose members come one by one."""
        return max(1, len(self.mean) // (1 if noise is None else len(noise.samples)))


_SITE = site_key("likelihood")
MOST_POINTS = 32


class Likelihood(nn.Module, ABC):
    """p(y | f)."""

    draws: int = 16  # of a Gaussian f

    def points(self, noise: Noise | None) -> int:
        """How many points stand for a Gaussian of too many classes for a covariance; each costs a product with W."""
        return self.draws if noise is None or noise.draws is None else min(noise.draws, MOST_POINTS)

    @abstractmethod
    def expected_log_prob(self, latent: Latent, y: Tensor, noise: Noise | None = None) -> Float[Tensor, "N"]:
        """E_q log p(y | f): the average over samples that Eq. (9) has inside its sum."""

    @abstractmethod
    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        """log p(y = q | f_s) for each point s of the components; Eq. (10) averages their exponentials."""


class Softmax(Likelihood):
    """p(y = q | f) = exp f_q / Σ exp f. A Gaussian f is integrated by `draws` draws, which cost no network pass.

    >>> f = torch.tensor([[[0.0, 0.0]]])  # one sample of one image: [S, N, Q]
    >>> Softmax().log_probs(Latent(f)).exp()
    tensor([[[0.5000, 0.5000]]])

    Args:
        draws: of each Gaussian.
        alpha: which bound `expected_log_prob` gives: L_α = (1/α) log E_q[p(y | f)^α] (Li & Gal 2017). α → 0 is
            Eq. (6), the mean of log p; α = 1 is the log of the predictive probability itself.
    """

    def __init__(self, draws: int = 16, alpha: float = 0.0) -> None:
        super().__init__()
        if not 0 <= alpha <= 1 or draws < 1:
            raise ValueError(f"Invalid {alpha=}, {draws=}: α must lie in [0, 1], draws must be at least 1")
        self.draws, self.alpha = draws, alpha

    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"], noise: Noise | None = None) -> Float[Tensor, "N"]:
        log_probs = self.log_probs(latent, noise)
        found = log_probs.gather(-1, y.expand(len(log_probs), -1).unsqueeze(-1)).squeeze(-1)  # [S, N]
        if self.alpha == 0:
            return found.mean(0)
        return ((self.alpha * found).logsumexp(0) - math.log(len(found))) / self.alpha

    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        f = latent.points(self.draws, noise)
        # half precision would round a probability of 0.998 to 1
        return f.to(torch.promote_types(f.dtype, torch.float32)).log_softmax(-1)


class MixedSoftmax(Likelihood):
    """p(y = q | g) = softmax(g A)_q: the classes are learned mixtures of independent functions g, as many as may be.

    >>> latent = Latent(torch.zeros(1, 2, 5))  # one sample of 5 functions at 2 images
    >>> MixedSoftmax(5, 3).log_probs(latent).exp()[0, 0]
    tensor([0.3333, 0.3333, 0.3333], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self, functions: int, classes: int, draws: int = 16, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(functions, classes, generator=generator) / functions**0.5)  # A
        self.softmax = Softmax(draws)

    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"], noise: Noise | None = None) -> Float[Tensor, "N"]:
        return self.softmax.expected_log_prob(self._mixed(latent, noise), y)

    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        return self.softmax.log_probs(self._mixed(latent, noise))

    def _mixed(self, latent: Latent, noise: Noise | None) -> Latent:
        """Points of f; a Gaussian g is drawn before it is mixed, since its mixtures are correlated."""
        return Latent(latent.points(self.softmax.draws, noise) @ self.mixing)


class RobustMax(Likelihood):
    """p(y = q | f) = 1 − ε if f_q is the largest, else ε / (Q − 1) (Hernández-Lobato et al. 2011).

    Gaussians are integrated by Gauss–Hermite quadrature in one dimension, so that nothing is drawn. Points are the
    limit of small equal variances (ties share), and pass no gradient. Given f the label is all but certain:
    `log_probs` integrates each component, and what `Predictive` calls epistemic is only what the components differ in.

    >>> f = Latent(torch.tensor([[[3.0, 0.0, 0.0]]]))
    >>> RobustMax(epsilon=0.1).log_probs(f).exp()
    tensor([[[0.9000, 0.0500, 0.0500]]])

    Args:
        epsilon: ε, the share of labels that may be wrong.
        nodes: of the quadrature. 20 are right to 1e-3 where the deviations of f_q are within a factor of 3.
    """

    def __init__(self, epsilon: float = 1e-3, nodes: int = 20) -> None:
        super().__init__()
        if not 0 < epsilon < 1 or nodes < 1:
            raise ValueError(f"Invalid {epsilon=}, {nodes=}: ε must lie in (0, 1), nodes must be at least 1")
        self.epsilon, self.nodes = epsilon, nodes

    def expected_log_prob(self, latent: Latent, y: Int[Tensor, "N"], noise: Noise | None = None) -> Float[Tensor, "N"]:
        largest = self._largest(latent, y).mean(0)
        # P log(1 − ε) + (1 − P) log(ε / (Q − 1))
        wrong = math.log(self.epsilon / (latent.mean.shape[-1] - 1))
        return largest * math.log1p(-self.epsilon) + (1 - largest) * wrong

    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        _, n, classes = latent.mean.shape
        y = torch.arange(classes, device=latent.mean.device)
        largest = torch.stack([self._largest(latent, q.expand(n)) for q in y], -1)  # one class at a time: memory
        largest = largest / largest.sum(-1, keepdim=True)  # the quadratures of Q integrals need not add up to 1
        # P (1 − ε) + (1 − P) ε / (Q − 1)
        return (largest * (1 - self.epsilon) + (1 - largest) * self.epsilon / (classes - 1)).log()

    def _largest(self, latent: Latent, y: Int[Tensor, "N"]) -> Float[Tensor, "S N"]:
        """P(f_y is the largest) = ∫ N(f_y) Π_{q≠y} Φ((f_y − μ_q) / σ_q) df_y."""
        if latent.covariance is not None:
            raise TypeError("robust-max integrates independent functions, and these have a covariance; use softmax")
        dtype = torch.promote_types(latent.mean.dtype, torch.float32)
        mean = latent.mean.to(dtype)
        deviation = latent.marginal_variance.to(dtype).clamp_min(TINY).sqrt()
        nodes, weights = _gauss_hermite(self.nodes, dtype, mean.device)
        chosen = y.expand(len(mean), -1).unsqueeze(-1)  # [S, N, 1]
        # f_y − μ_q with f_y = μ_y + σ_y x; the difference of means first, which is exact for ties: [S, N, nodes, Q]
        steps = deviation.gather(-1, chosen).unsqueeze(-2) * nodes[:, None]
        above = ((mean.gather(-1, chosen) - mean).unsqueeze(-2) + steps) / deviation.unsqueeze(-2)
        others = torch.arange(mean.shape[-1], device=mean.device) != chosen  # [S, N, Q]
        # Φ(−30) is 0, and torch's derivative of log Φ is wrong far below
        log_below = torch.where(others.unsqueeze(-2), torch.special.log_ndtr(above.clamp_min(-30)), 0).sum(-1)
        return log_below.exp() @ weights


class Gaussian(Likelihood):
    """p(y | f) = N(y; f, σ²), for real targets: regression, where the exact GP is known. σ² is learned, as a logarithm.

    `y` is [N, Q], or [N] for one function. There are no classes, so `log_probs`, and with it `predict`, is refused:
    the moments of a prediction are those of the Latent, with σ² added to the variance.

    >>> Gaussian(variance=4.0).variance.item()
    4.0
    """

    def __init__(self, variance: float = 1.0) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(math.log(variance)))

    @property
    def variance(self) -> Float[Tensor, ""]:
        """σ²."""
        return self.log_variance.exp()

    def expected_log_prob(self, latent: Latent, y: Tensor, noise: Noise | None = None) -> Float[Tensor, "N"]:
        y = y.unsqueeze(-1) if y.dim() == 1 else y
        # E log N(y; f, σ²) = −½ log 2πσ² − ((y − μ)² + v) / 2σ²
        squared = ((y - latent.mean).square() + latent.marginal_variance) / self.variance
        return -(squared + self.log_variance + math.log(2 * math.pi)).sum(-1).mean(0) / 2

    def log_probs(self, latent: Latent, noise: Noise | None = None) -> Float[Tensor, "S N Q"]:
        raise TypeError("a Gaussian likelihood has real targets and no classes; read the moments of the Latent instead")


LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {"softmax": Softmax, "robust-max": RobustMax}  # those with classes


@constant
def _gauss_hermite(count: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "2 count"]:
    """Nodes x and weights w with E g(x) ≈ Σ w g(x) for x ~ N(0, 1).

    They are eigenvalues of the Jacobi matrix of the Hermite polynomials, and squares of first components of its
    eigenvectors (Golub & Welsch 1969).
    """
    roots = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(roots, 1) + torch.diag(roots, -1))
    return torch.stack([nodes, vectors[0].square()]).to(device, dtype)
