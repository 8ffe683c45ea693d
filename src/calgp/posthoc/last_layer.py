"""Laplace's approximation of a trained last layer, and what its variance says of probabilities.

A classifier ends with logits f = W c + b. Around its trained θ = (W, b) the posterior is N(θ, (H + τI)⁻¹), with H the
Hessian of the softmax cross-entropy over the training features (which for a linear layer is the generalised
Gauss–Newton matrix, exactly), H = Σ_i (diag p_i − p_i p_iᵀ) ⊗ φ_i φ_iᵀ, φ = (c, 1), and τ the prior's precision, which
the evidence chooses. Logits of an input are then Gaussian, with the network's own as their mean.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.errors import CalgpError
from calgp.posthoc.calibration import Temperature, bisect
from calgp.posthoc.checks import check_choice

MOST_FULL = 3000  # parameters of a layer whose full covariance takes seconds
NUMBERS = 2**24  # that are handled at a time
GRID = torch.logspace(-8, 8, 161, dtype=torch.float64)  # of prior precisions
TRUSTS = (0.0, *(10 ** (place / 4) for place in range(-12, 9)))  # shares of the variance that may be believed
MOST_TRIED = 4_000_000  # logits on which shares are compared
Structure = Literal["full", "kronecker"]


class LastLayerPosterior(ABC):
    """Gaussian logits around those of a trained last layer. Subclasses are frozen dataclasses of tensors and floats."""

    precision: float  # τ of the prior

    @abstractmethod
    def logit_covariance(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "N Q Q"]:
        """Of the logits at features c."""

    def logit_covariance_at_once(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "N Q Q"]:
        """The same for any number of inputs, whatever memory that takes: for exports."""
        return self.logit_covariance(c)

    def numbers(self) -> dict[str, float]:
        """What is not a tensor; with `tensors` it is all of the posterior."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.type is float}  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.type is Tensor}  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class FullLaplace(LastLayerPosterior):
    """The covariance of all weights and biases."""

    covariance: Tensor  # [Q, m, Q, m]
    precision: float
    log_evidence: float  # log p(labels | τ), Laplace's

    def logit_covariance(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "N Q Q"]:
        size = max(1, NUMBERS // self.covariance[0].numel())
        return torch.cat([self.logit_covariance_at_once(each) for each in c.split(size)])

    def logit_covariance_at_once(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "N Q Q"]:
        classes, m = self.covariance.shape[:2]
        phi = _with_one(c.to(self.covariance), m)
        # Cov[f_q, f_r] = φᵀ S_qr φ
        rows = [(phi @ block.flatten(1)).unflatten(1, (classes, m)) @ phi.unsqueeze(-1) for block in self.covariance]
        return torch.stack([row.squeeze(-1) for row in rows], 1)


@dataclass(frozen=True, eq=False)
class KroneckerLaplace(LastLayerPosterior):
    """H ≈ (1/N) Σ_i (diag p_i − p_i p_iᵀ) ⊗ Σ_i φ_i φ_iᵀ (Martens & Grosse 2015; bias and weights together).

    By the eigenvectors of both factors the covariance of all weights need not exist: 1,280 features and 1,000 classes
    are matrices of these two sizes.
    """

    class_vectors: Tensor  # [Q, Q], of the first factor, in columns
    class_values: Tensor  # [Q]
    feature_vectors: Tensor  # [m, m], of the second factor
    feature_values: Tensor  # [m]
    precision: float
    log_evidence: float

    def logit_covariance(self, c: Float[Tensor, "N d"]) -> Float[Tensor, "N Q Q"]:
        phi = _with_one(c.to(self.feature_vectors), len(self.feature_values))
        # φᵀ (g A + τI)⁻¹ φ for each eigenvalue g of the classes' factor, [N, Q]
        inverse = 1 / (self.feature_values[:, None] * self.class_values + self.precision)
        variance = (phi @ self.feature_vectors).square() @ inverse
        return (self.class_vectors * variance.unsqueeze(1)) @ self.class_vectors.mT


Laplace = FullLaplace | KroneckerLaplace
POSTERIORS: dict[str, type[LastLayerPosterior]] = {"full": FullLaplace, "kronecker": KroneckerLaplace}


def fit_last_layer(
    c: Float[Tensor, "N d"],
    y: Int[Tensor, "N"],
    weight: Float[Tensor, "Q d"],
    bias: Float[Tensor, "Q"] | None,
    *,
    structure: Structure | None = None,
    precision: float | None = None,
) -> Laplace:
    """The posterior of a last layer with these features and labels.

    Args:
        structure: full, or kronecker; None: full up to 3,000 parameters.
        precision: τ of the prior N(0, I/τ); None: the one of the largest evidence.

    >>> c, y = torch.tensor([[1.0], [2.0], [-1.0], [-2.0]]), torch.tensor([0, 0, 1, 1])
    >>> posterior = fit_last_layer(c, y, torch.tensor([[0.5], [-0.5]]), None, precision=1.0)
    >>> near, far = posterior.logit_covariance(torch.tensor([[1.0], [9.0]])).diagonal(dim1=1, dim2=2)[:, 0]
    >>> round(float(far / near))
    81
    """
    classes, m = len(weight), weight.shape[1] + (bias is not None)
    if structure is None:
        structure = "full" if classes * m <= MOST_FULL else "kronecker"
    check_choice("structure", structure, POSTERIORS)
    if c.dim() != 2 or c.shape[1] != weight.shape[1] or y.shape != c.shape[:1] or not len(y):
        raise CalgpError(
            f"A last layer {list(weight.shape)} is fitted on features [N, {weight.shape[1]}] and labels [N], not on "
            f"{list(c.shape)} and {list(y.shape)}."
        )
    theta = (weight if bias is None else torch.cat([weight, bias[:, None]], 1)).detach().double()  # [Q, m]
    return (_fit_full if structure == "full" else _fit_kronecker)(_Layer(c, y, theta), precision)


class _Layer(NamedTuple):
    """What both structures are made from."""

    c: Tensor
    y: Tensor
    theta: Tensor  # [Q, m]

    def passes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Labels, φ and log p of some rows at a time, in double precision."""
        classes, m = self.theta.shape
        size = max(1, NUMBERS // (classes + m))
        for y, c in zip(self.y.split(size), self.c.split(size), strict=True):
            phi = _with_one(c.double(), m)
            yield y, phi, (phi @ self.theta.mT).log_softmax(1)

    def settle(self, eigenvalues: Tensor, precision: float | None) -> tuple[float, float]:
        """τ, as given or the best, and its log evidence."""
        squared = self.theta.square().sum().item()
        tau = best_precision(eigenvalues, squared) if precision is None else precision
        log_likelihood = sum(log_p.gather(1, y[:, None]).sum().item() for y, _, log_p in self.passes())
        return tau, log_likelihood + _evidence(eigenvalues, squared, tau)


def _fit_full(layer: _Layer, precision: float | None) -> FullLaplace:
    classes, m = layer.theta.shape
    hessian = layer.theta.new_zeros(classes, m, classes, m)
    for _, phi, log_p in layer.passes():
        p = log_p.exp()
        for q in range(classes):
            for r in range(q, classes):
                # Σ_i (p_q δ_qr − p_q p_r) φ φᵀ
                block = phi.mT @ ((p[:, q] * (float(q == r) - p[:, r]))[:, None] * phi)
                hessian[q, :, r] += block
                if r > q:
                    hessian[r, :, q] += block
    flat = hessian.view(classes * m, classes * m)
    precision, log_evidence = layer.settle(torch.linalg.eigvalsh(flat).clamp_min(0), precision)
    flat.diagonal().add_(precision)
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(flat)).view_as(hessian)
    return FullLaplace(covariance.to(layer.c.dtype), precision, log_evidence)


def _fit_kronecker(layer: _Layer, precision: float | None) -> KroneckerLaplace:
    classes, m = layer.theta.shape
    of_classes, of_features = layer.theta.new_zeros(classes, classes), layer.theta.new_zeros(m, m)
    for _, phi, log_p in layer.passes():
        p = log_p.exp()
        of_classes += (torch.diag(p.sum(0)) - p.mT @ p) / len(layer.c)
        of_features += phi.mT @ phi
    (class_values, class_vectors), (values, vectors) = (torch.linalg.eigh(each) for each in (of_classes, of_features))
    class_values, values = class_values.clamp_min(0), values.clamp_min(0)
    precision, log_evidence = layer.settle((class_values[:, None] * values).flatten(), precision)
    dtype = layer.c.dtype
    return KroneckerLaplace(
        class_vectors.to(dtype), class_values.to(dtype), vectors.to(dtype), values.to(dtype), precision, log_evidence
    )


def best_precision(eigenvalues: Float[Tensor, "P"], squared: float) -> float:
    """τ of the largest evidence, of the eigenvalues of H and ‖θ‖²: the best of a grid, refined by bisecting the slope.

    At the maximum τ ‖θ‖² = Σ λ / (λ + τ): as many parameters as the data determine (MacKay 1992).
    """
    best = int(torch.stack([torch.tensor(_evidence(eigenvalues, squared, tau)) for tau in GRID.tolist()]).argmax())
    low, high = (GRID[min(max(place, 0), len(GRID) - 1)].log().item() for place in (best - 1, best + 1))

    def is_rising(log_tau: float) -> bool:
        tau = math.exp(log_tau)
        return (eigenvalues / (eigenvalues + tau)).sum().item() > tau * squared

    return bisect(low, high, is_rising)


def _evidence(eigenvalues: Tensor, squared: float, precision: float) -> float:
    """log p(D | τ) − log p(D | θ) = −½ (τ ‖θ‖² + Σ log(1 + λ/τ))."""
    return -(precision * squared + torch.log1p(eigenvalues / precision).sum().item()) / 2


def _with_one(c: Tensor, m: int) -> Tensor:
    """φ: the features, and 1 where the layer has a bias."""
    return c if c.shape[1] == m else torch.cat([c, torch.ones_like(c[:, :1])], 1)


def log_odds_variance(logits: Float[Tensor, "N Q"], covariance: Float[Tensor, "N Q Q"]) -> Float[Tensor, "N"]:
    """Variance of log p_ŷ / (1 − p_ŷ), ŷ the most probable class: one number for an image, to first order.

    Of two classes it is the variance of f_1 − f_2, exactly. What all logits have in common does not count.
    """
    p = logits.softmax(1)
    top = logits.argmax(1, keepdim=True)
    rivals = p.scatter(1, top, 0)
    rivals = rivals / rivals.sum(1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    direction = -rivals.scatter(1, top, -1)  # the gradient: 1 of ŷ, minus the shares of the others
    along = (covariance * direction.unsqueeze(1)).sum(2)  # no einsum: torch.export would fix the number of rows
    return (direction * along).sum(1).clamp_min(0)


@dataclass(frozen=True)
class UncertaintyScaling:
    """p = softmax(f / (T · sqrt(1 + (π/8) ρ v))), v the variance of an image's log-odds: its label stays as it is.

    The root is MacKay's (1992) for the average of a sigmoid over a Gaussian. It and T are one positive number for all
    logits of an image, so that their order never changes. T and ρ are fitted on held-out logits; ρ = 1 believes the
    variance as it is, and ρ = 0 is temperature scaling, which the fit therefore never falls behind on the hold-out.
    """

    temperature: float
    trust: float  # ρ

    @classmethod
    def fit(
        cls, logits: Float[Tensor, "N Q"], variance: Float[Tensor, "N"], y: Int[Tensor, "N"]
    ) -> "UncertaintyScaling":
        """Of all ρ of a grid, each with its best T, the one that gives labels the largest likelihood.

        ρ is chosen on the first of very many rows, T on all.
        """
        some = slice(0, max(MOST_TRIED // logits.shape[1], MOST_TRIED // 1000))
        found = []
        for trust in TRUSTS:
            scaling = cls.with_trust(trust, logits[some], variance[some], y[some])
            log_p = scaling.apply(logits[some].double(), variance[some].double())
            found.append((-log_p.gather(1, y[some, None].long()).mean().item(), trust))
        return cls.with_trust(min(found)[1], logits, variance, y)

    @classmethod
    def with_trust(
        cls, trust: float, logits: Float[Tensor, "N Q"], variance: Float[Tensor, "N"], y: Int[Tensor, "N"]
    ) -> "UncertaintyScaling":
        """With this ρ, and the T of the largest likelihood."""
        return cls(Temperature.fit(cls(1.0, trust).apply(logits, variance), y).temperature, trust)

    def apply(self, logits: Float[Tensor, "N Q"], variance: Float[Tensor, "N"]) -> Float[Tensor, "N Q"]:
        """Log-probabilities."""
        scale = self.temperature * (1 + math.pi / 8 * self.trust * variance).sqrt()
        return (logits / scale[:, None]).log_softmax(1)

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf or not 0 <= self.trust < math.inf:
            raise CalgpError(f"Invalid T={self.temperature}, ρ={self.trust}: both must be finite, and T is positive.")
