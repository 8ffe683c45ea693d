"""A sparse variational Gaussian process, whitened (Hensman et al. 2015), for any kind of inducing variables.

u = L v with K_uu = LLᵀ, q(v_q) = N(m_q, S_q) for each of Q functions that share kernel and inducing variables.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp.cholesky import cholesky, factor
from calgp.gp.freezing import Freezable, freeze
from calgp.gp.kernels import Kernel


class Covariances(NamedTuple):
    """What a sparse GP must know a priori of f at N inputs and of its M inducing variables u."""

    uu: Float[Tensor, "M M"]
    fu: Float[Tensor, "N M"]
    ff: Float[Tensor, "N"]  # the variances of f


class Inducing(nn.Module, ABC):
    """Inducing variables: how they vary together, and with f. SparseGP knows no more of them than this."""

    size: int  # M

    @abstractmethod
    def prior(self) -> Float[Tensor, "M M"]:
        """K_uu, which no input changes."""

    @abstractmethod
    def forward(self, x: Tensor) -> Covariances:
        """The covariances for the inputs x."""


class InducingPoints(Inducing):
    """u = f(Z), Z points in the space of the features.

    >>> from calgp.gp import RBF
    >>> InducingPoints(RBF(1), torch.zeros(3, 1)).prior().shape
    torch.Size([3, 3])
    """

    def __init__(self, kernel: Kernel, points: Float[Tensor, "M d"]) -> None:
        super().__init__()
        self.kernel, self.size = kernel, len(points)
        self.points = nn.Parameter(points)

    def prior(self) -> Float[Tensor, "M M"]:
        return self.kernel.covariance(self.points, self.points)

    def forward(self, x: Float[Tensor, "N d"]) -> Covariances:
        c = x.to(self.points.dtype)
        return Covariances(self.prior(), self.kernel.covariance(c, self.points), self.kernel.diagonal(c))


Chosen = TypeVar("Chosen", bound=Inducing)


class SparseGP(Freezable, Generic[Chosen]):
    """Q functions given M inducing variables. A plain module: forward gives the moments of q(f), `kl` their cost.

    q(v) starts at the prior N(0, I), where the cost is 0.

    >>> from calgp.gp import RBF
    >>> process = SparseGP(InducingPoints(RBF(2), torch.randn(8, 2)), outputs=3)
    >>> mean, variance = process(torch.randn(5, 2))
    >>> mean.shape, variance.shape
    (torch.Size([5, 3]), torch.Size([5, 3]))
    """

    def __init__(self, inducing: Chosen, outputs: int) -> None:
        super().__init__()
        self.inducing = inducing
        self.mean = nn.Parameter(torch.zeros(inducing.size, outputs))  # m, [M, Q]
        self.scale = nn.Parameter(torch.zeros(outputs, inducing.size, inducing.size))  # log of the diagonal, see `root`

    def frozen(self) -> "FrozenSparseGP":
        return FrozenSparseGP(self)

    @property
    def root(self) -> Float[Tensor, "Q M M"]:
        """L_q with S_q = L_q L_qᵀ: lower triangular, the diagonal kept as logarithms."""
        return self.scale.tril(-1) + self.scale.diagonal(dim1=-2, dim2=-1).exp().diag_embed()

    def forward(self, x: Tensor) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q"]]:
        """Mean and variance of q(f) at x."""
        with torch.autocast(x.device.type, enabled=False):  # half precision has no digits for distances and factors
            covariances = self.inducing(x)
            return _moments(covariances, self._whitened(covariances), self.mean, self.root)

    @torch.no_grad()
    def regress(self, batches: Iterable[tuple[Tensor, Float[Tensor, "N Q"]]], *, noise: float) -> None:
        """Set q(v) to the best there is for real targets with this variance of noise: closed-form regression.

        It is the exact optimum under a Gaussian likelihood, and a start that knows the labels under another.
        """
        precision = torch.eye(self.inducing.size, dtype=torch.float64, device=self.mean.device)
        weighted = torch.zeros_like(self.mean, dtype=torch.float64)
        for x, y in batches:
            a = self._whitened(self.inducing(x)).double()
            precision += a.mT @ a / noise  # S⁻¹ = I + AᵀA / σ²
            weighted += a.mT @ y.double() / noise
        lower = factor(precision, "the precision of the inducing variables")
        self.mean.copy_(torch.cholesky_solve(weighted, lower))  # m = S Aᵀy / σ²
        root = factor(torch.cholesky_inverse(lower), "the covariance of the inducing variables")
        self.scale.copy_(root.tril(-1) + root.diagonal().log().diag_embed())

    def _whitened(self, covariances: Covariances) -> Float[Tensor, "N M"]:
        """A = K_fu L⁻ᵀ, solved in the precision of L."""
        fu, lower = covariances.fu, cholesky(covariances.uu)
        return torch.linalg.solve_triangular(lower, fu.mT.double(), upper=False).mT.to(fu.dtype)

    def kl(self) -> Float[Tensor, ""]:
        """KL[q(v) ‖ N(0, I)] = ½ Σ_q (tr S_q + m_qᵀm_q − M − log|S_q|)."""
        off = self.scale.tril(-1).flatten()
        log_diagonal = self.scale.diagonal(dim1=-2, dim2=-1)
        trace = off.dot(off) + (2 * log_diagonal).exp().sum()
        return (trace + self.mean.square().sum() - self.mean.numel()) / 2 - log_diagonal.sum()


def _moments(
    prior: Covariances, a: Float[Tensor, "N M"], mean: Float[Tensor, "M Q"], root: Float[Tensor, "Q M M"]
) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q"]]:
    """Mean A m and variance k_ff − Q_ff + diag(A S_q Aᵀ) of q(f)."""
    residual = (prior.ff - a.square().sum(-1)).clamp_min(0)  # k_ff − Q_ff; rounding may bring it below zero
    return a @ mean, residual.unsqueeze(-1) + (a @ root).square().sum(-1).mT


class FrozenSparseGP(nn.Module):
    """q(f) of a `SparseGP` whose parameters stay: L⁻ᵀ and the roots of S are kept."""

    whitener: Tensor
    root: Tensor

    @torch.no_grad()
    def __init__(self, gp: SparseGP[Any]) -> None:
        super().__init__()
        lower = cholesky(gp.inducing.prior())
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        self.inducing, self.mean = freeze(gp.inducing), gp.mean
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        self.register_buffer("whitener", inverse.mT.contiguous())  # L⁻ᵀ
        self.register_buffer("root", gp.root)

    def forward(self, x: Tensor) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q"]]:
        with torch.autocast(x.device.type, enabled=False):
            covariances = self.inducing(x)
            a = (covariances.fu.double() @ self.whitener).to(covariances.fu.dtype)
            return _moments(covariances, a, self.mean, self.root)
