"""A Gaussian process over vectors with a softmax likelihood, by Laplace's approximation: exact for few points.

f_q ~ GP(b_q, σ² k), one independent function for each class. With features φ(x) = k(x, Z) A, where A Aᵀ = k(Z, Z)⁻¹,
the process is linear, f_q = φ w_q + b_q with w_q ~ N(0, σ² I): exactly at the inducing inputs Z, and for all training
inputs if Z are these. The basis is turned so that ΦᵀΦ is diagonal: the curvature of the likelihood is nearly so, too,
and the mode is found in a few dozen steps whatever the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from calgp.gp.cholesky import inverse_root
from calgp.gp.laplace import shared
from calgp.gp.likelihoods import Latent

SMALLEST = 1e-7  # eigenvalues of a covariance that count, relative to the largest
BIAS_VARIANCE = 10.0**2
ROWS = 2**24  # numbers that are handled at a time
CURVATURE = 0.1  # a typical p (1 − p), for the scale of steps
ARMIJO, HALVINGS = 1e-4, 20  # of the line search


@dataclass(frozen=True)
class VectorKernel:
    """k(u, v) = linear · u·v + radial · exp(−‖u − v‖² / 2ℓ²): straight lines, and what bends.

    Inputs are standardised and divided by √d, so that their length is about one.

    >>> VectorKernel(linear=1.0).covariance(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]]))
    tensor([[11.]])
    """

    linear: float = 0.0
    radial: float = 0.0
    lengthscale: float = 1.0

    def covariance(self, u: Float[Tensor, "N d"], v: Float[Tensor, "M d"]) -> Float[Tensor, "N M"]:
        product = u @ v.mT
        if not self.radial:
            return product.mul_(self.linear)
        # −‖u − v‖² / 2ℓ²
        exponent = product.sub(u.square().sum(1, keepdim=True) / 2).sub_(v.square().sum(1) / 2)
        exponent = exponent.clamp_max_(0).div_(self.lengthscale**2).exp_().mul_(self.radial)
        return exponent.add_(product, alpha=self.linear) if self.linear else exponent

    def diagonal(self, u: Float[Tensor, "N d"]) -> Float[Tensor, "N"]:
        return self.linear * u.square().sum(1) + self.radial


@dataclass(frozen=True, eq=False)
class Basis:
    """φ(u) = k(u, Z) A: features whose products are the covariance, as far as Z tells it (Nyström)."""

    kernel: VectorKernel
    inducing: Float[Tensor, "M d"]  # Z
    project: Float[Tensor, "M m"]  # A

    @staticmethod
    def exact(kernel: VectorKernel, u: Float[Tensor, "N d"]) -> tuple["Basis", Float[Tensor, "N m"]]:
        """The basis of all inputs, and its features at them, by one eigendecomposition K = V S Vᵀ: Φ = V √S."""
        values, vectors = _spectrum(kernel.covariance(u, u))
        basis = Basis(kernel, u.contiguous(), (vectors / values.sqrt()).to(u).contiguous())
        return basis, (vectors * values.sqrt()).to(u)

    @staticmethod
    def of(
        kernel: VectorKernel, inducing: Float[Tensor, "M d"], u: Float[Tensor, "N d"]
    ) -> tuple["Basis", Float[Tensor, "N m"]]:
        """The basis of some inputs, turned so that ΦᵀΦ at `u` is diagonal; and the features at `u`."""
        values, vectors = _spectrum(kernel.covariance(inducing, inducing))
        whiten = vectors / values.sqrt()
        gram = torch.zeros(len(inducing), len(inducing), dtype=torch.float64)
        phi = u.new_empty(len(u), len(inducing))  # first k(u, Z), then Φ in its memory
        parts = list(zip(u.split(rows := max(1, ROWS // len(inducing))), phi.split(rows), strict=True))
        for part, place in parts:
            place.copy_(kernel.covariance(part, inducing))
            gram += place.mT @ place
        _, turn = torch.linalg.eigh(whiten.mT @ gram @ whiten)
        project = (whiten @ turn).to(u).contiguous()
        width = project.shape[1]
        for _, place in parts:
            place[:, :width] = place @ project
        return Basis(kernel, inducing, project), phi[:, :width]

    def __call__(self, u: Float[Tensor, "N d"]) -> Float[Tensor, "N m"]:
        return self.kernel.covariance(u, self.inducing) @ self.project

    def residual(self, u: Float[Tensor, "N d"], phi: Float[Tensor, "N m"]) -> Float[Tensor, "N"]:
        """k(u, u) − ‖φ‖²: prior variance that Z does not explain. It is all of it far from the training inputs."""
        return (self.kernel.diagonal(u) - phi.square().sum(1)).clamp_min(0)


def _spectrum(covariance: Float[Tensor, "M M"]) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors in double precision, without those that rounding has made."""
    values, vectors = torch.linalg.eigh(covariance.double())
    kept = values > SMALLEST * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    return values[kept], vectors[:, kept]


@dataclass(frozen=True, eq=False)
class Mode:
    """The most probable weights of f = ΦW + b."""

    weight: Float[Tensor, "m Q"]
    bias: Float[Tensor, "Q"]

    def __call__(self, phi: Float[Tensor, "N m"]) -> Float[Tensor, "N Q"]:
        return phi @ self.weight + self.bias


def find_mode(
    phi: Float[Tensor, "N m"],
    y: Int[Tensor, "N"],
    classes: int,
    variance: float,
    *,
    start: Mode | None = None,
    root: Float[Tensor, "m m"] | None = None,
    tolerance: float = 1e-3,
    steps: int = 100,
) -> Mode:
    """The minimum of −Σ log softmax(ΦW + b)_y + ‖W‖² / 2σ² + ‖b‖² / 2σ_b²: convex; L-BFGS on scaled weights.

    start: a mode nearby, of fewer rows or another σ².
    root: R of `weight_root` there, if known: V of W = start + R V, with a curvature nearer to one, is found sooner.
    tolerance: of the gradient's largest entry. In these coordinates the curvature is about one, so that the objective
        is then within its square, times the number of weights that matter, of the minimum.
    """
    scale = (CURVATURE * phi.square().sum(0) + 1 / variance).rsqrt().unsqueeze(1)  # [m, 1]
    bias_scale = (CURVATURE * len(phi)) ** -0.5
    first = Mode(phi.new_zeros(phi.shape[1], classes), phi.new_zeros(classes)) if start is None else start

    def mode(v: Tensor) -> Mode:
        moved = scale * v[:-1] if root is None else root @ v[:-1]
        return Mode(first.weight + moved, first.bias + bias_scale * v[-1])

    def objective(v: Tensor) -> tuple[float, Tensor]:
        weight, bias = (at := mode(v)).weight, at.bias
        f = (weight.mT.contiguous() @ phi.mT).mT + bias  # classes by rows: BLAS is ten times as fast that way
        log_norm = f.logsumexp(1, keepdim=True)
        loss = (log_norm.squeeze(1) - f.gather(1, y[:, None]).squeeze(1)).sum(dtype=torch.float64)
        loss += weight.square().sum(dtype=torch.float64) / (2 * variance)
        loss += bias.square().sum(dtype=torch.float64) / (2 * BIAS_VARIANCE)
        error = f.sub_(log_norm).exp_()  # p − onehot(y)
        error[torch.arange(len(y)), y] -= 1
        slope = (error.mT @ phi).mT + weight / variance
        slope = scale * slope if root is None else root.mT @ slope
        return loss.item(), torch.cat([slope, bias_scale * (error.sum(0) + bias / BIAS_VARIANCE)[None]])

    return mode(minimise(objective, phi.new_zeros(phi.shape[1] + 1, classes), tolerance=tolerance, steps=steps))


def minimise(
    objective: Callable[[Tensor], tuple[float, Tensor]], x: Tensor, *, tolerance: float, steps: int, memory: int = 10
) -> Tensor:
    """L-BFGS with a backtracking line search (Nocedal & Wright 2006, alg. 7.5); for smooth convex functions.

    Starts with a step of one, as suits coordinates in which the curvature is about one. Ends where the gradient's
    largest entry is below `tolerance`, or where rounding hides any progress.

    >>> minimise(lambda x: ((x**4).sum().item(), 4 * x**3), torch.ones(2), tolerance=1e-6, steps=50).abs().max() < 0.01
    tensor(True)
    """
    value, gradient = objective(x)
    pairs: list[tuple[Tensor, Tensor, float]] = []  # s, y, 1 / s·y
    for _ in range(steps):
        if gradient.abs().max() <= tolerance:
            break
        direction = _two_loops(gradient, pairs)
        slope = -torch.sum(direction * gradient, dtype=torch.float64).item()
        rate = 1.0
        for _ in range(HALVINGS):
            moved, step = objective(x - rate * direction), rate * direction
            if moved[0] <= value + ARMIJO * rate * slope:
                break
            rate /= 2
        else:
            break
        change = moved[1] - gradient
        curvature = -torch.sum(step * change, dtype=torch.float64).item()
        if curvature > 0:
            pairs = [*pairs[-memory + 1 :], (-step, change, 1 / curvature)]
        x, (value, gradient) = x - step, moved
    return x


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """H g with the inverse Hessian H that the last steps s and changes of gradient y tell."""
    q, alphas = gradient.clone(), []
    for s, y, rho in reversed(pairs):
        alphas.append(rho * torch.sum(s * q))
        q -= alphas[-1] * y
    if pairs:
        _, y, rho = pairs[-1]
        q /= rho * y.square().sum()
    for (s, y, rho), alpha in zip(pairs, reversed(alphas), strict=True):
        q += s * (alpha - rho * torch.sum(y * q))
    return q


@dataclass(frozen=True, eq=False)
class VectorGP:
    """q(f): Laplace's Gaussian around the mode, in a basis. The classes share one covariance.

    Its curvature at a training point is that of the most uncertain class, p̂ (1 − p̂). `spread` multiplies the variance
    of f: 1 is Laplace's own, which is often wider than what predicts best.
    """

    basis: Basis
    mode: Mode
    root: Float[Tensor, "m m"]  # R, R Rᵀ the covariance of every w_q
    variance: float  # σ²
    spread: float = 1.0

    @staticmethod
    def fit(basis: Basis, phi: Float[Tensor, "N m"], mode: Mode, variance: float, *, spread: float = 1.0) -> "VectorGP":
        return VectorGP(basis, mode, weight_root(phi, mode, variance), variance, spread)

    def latent(self, u: Float[Tensor, "N d"]) -> Latent:
        """Mean [1, N, Q] and variance [1, N, Q] of f, in one pass."""
        phi = self.basis(u)
        mean = self.mode(phi).unsqueeze(0)
        variance = weight_variance(phi, self.root) + self.variance * self.basis.residual(u, phi)
        return Latent(mean, (self.spread * variance)[None, :, None].expand_as(mean))

    def to(self, like: Tensor) -> "VectorGP":
        """The same in another floating type."""
        if self.root.dtype == like.dtype:
            return self
        basis = replace(self.basis, inducing=self.basis.inducing.to(like), project=self.basis.project.to(like))
        mode = Mode(self.mode.weight.to(like), self.mode.bias.to(like))
        return VectorGP(basis, mode, self.root.to(like), self.variance, self.spread)


def weight_variance(phi: Float[Tensor, "N m"], root: Float[Tensor, "m m"]) -> Float[Tensor, "N"]:
    """φᵀ R Rᵀ φ."""
    return (phi @ root).square().sum(1)


def weight_root(phi: Float[Tensor, "N m"], mode: Mode, variance: float) -> Float[Tensor, "m m"]:
    """R with R Rᵀ = (Σ_i h_i φ_i φ_iᵀ + I / σ²)⁻¹."""
    precision = torch.eye(phi.shape[1], dtype=torch.float64).div_(variance).unsqueeze(0)
    for part in phi.split(max(1, ROWS // max(1, phi.shape[1]))):
        root_h = shared(mode(part)).sqrt().to(part)
        weighted = root_h * part  # in the floating type of Φ: twice as fast, and sums of squares lose few digits
        precision[0] += weighted.mT @ weighted
    return inverse_root(precision)[0].to(phi).contiguous()
