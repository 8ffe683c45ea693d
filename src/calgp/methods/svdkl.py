"""SVDKL (Wilson et al. 2016): one-dimensional Gaussian processes of the features, on grids, mixed into the classes.

The only file that needs GPyTorch, which is imported when a model is built: `pip install calgp[svdkl]`.
"""

import math
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Freezable, Latent, MaskedLinear, MixedSoftmax, Model, Noise
from calgp.methods.base import Method
from calgp.methods.start import first_features
from calgp.nets import Backbone, Features, FeaturesModel, Task
from calgp.options import COUNT, Interval, check_options, option

EDGE = 0.95  # inputs stay within ±0.95: up to there a grid of 8 points or more, over ±1, has two on either side
START_IMAGES = 500


@dataclass(frozen=True)
class Svdkl(Method):
    """Features, a linear map to `reduced` of them, a GP of each on a grid, mixed linearly before the softmax.

    >>> from calgp.nets import LeNet, Task
    >>> Svdkl(grid=8).build(Task(1, 28, 28, 10), LeNet(channels=(2, 4))).reduction.weight.shape
    torch.Size([256, 64])
    """

    summary: ClassVar[str] = "CNN+one-dimensional GPs on grids, mixed (needs GPyTorch)"

    reduced: int = option(
        64, "How many one-dimensional GPs; a network with no more features than that gets no linear map.", within=COUNT
    )
    grid: int = option(64, "Inducing points of each GP; up to 800 GPyTorch's KL is exact.", within=Interval(8, 800))

    def __post_init__(self) -> None:
        check_options(self)

    def build(self, task: Task, backbone: Backbone, *, generator: torch.Generator | None = None) -> "SvdklModel":
        features = backbone.build(task, UNMASKED, generator=generator)
        d = features.out_features
        reduction, width = nn.Identity(), d
        if d > self.reduced:
            width = self.reduced
            reduction = MaskedLinear(d, width, masking=UNMASKED, std=d**-0.5, generator=generator)
        processes = GridProcesses(width, self.grid)
        likelihood = MixedSoftmax(width, task.classes, generator=generator)
        return SvdklModel(features, reduction, Squash(width), processes, likelihood)

    def start(self, model: Model, train: Images, *, generator: torch.Generator | None = None) -> None:
        """Spread the features of some training images over the grids."""
        model = cast(SvdklModel, model)
        chosen = torch.randperm(len(train), generator=generator)[:START_IMAGES]
        with torch.no_grad():
            model.squash.fit(model.reduction(first_features(model, train, chosen, size=START_IMAGES)))


class SvdklModel(FeaturesModel):
    """A Gaussian over the one-dimensional functions g; the classes' f = A g are the likelihood's."""

    def __init__(
        self,
        features: Features,
        reduction: nn.Module,
        squash: "Squash",
        processes: "GridProcesses",
        likelihood: MixedSoftmax,
    ) -> None:
        super().__init__(features)
        self.reduction, self.squash, self.processes, self.likelihood = reduction, squash, processes, likelihood

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        mean, variance = self.processes(self.squash(self.reduction(self.features(h, noise))))
        return Latent(mean.unsqueeze(0), variance.unsqueeze(0))

    def kl(self) -> Float[Tensor, ""]:
        return self.processes.kl()


class Squash(nn.Module):
    """c ↦ 0.95 tanh((c − shift) · scale), both learned: smooth, and the same for an image whatever its batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.log_scale = nn.Parameter(torch.full((width,), -math.log(2)))

    def forward(self, c: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        return EDGE * ((c.to(self.shift.dtype) - self.shift) * self.log_scale.exp()).tanh()

    @torch.no_grad()
    def fit(self, c: Float[Tensor, "N k"]) -> None:
        """One standard deviation of c becomes tanh(½); a feature that is hardly there is not blown up."""
        deviation = c.std(0)
        self.shift.copy_(c.mean(0))
        self.log_scale.copy_(-(2 * deviation.clamp_min(0.1 * deviation.mean() + 1e-6)).log())


class GridProcesses(Freezable):
    """Independent GPs g_k of x_k ∈ (−1, 1) with q(u_k) = N(m_k, S_k) at the points of a grid.

    g = V u with V the cubic interpolation from the grid: mean V m, variance diag(V S Vᵀ).
    """

    def __init__(self, width: int, grid: int) -> None:
        super().__init__()
        variational = _gpytorch().variational
        self.prior = Prior(width)
        q = variational.CholeskyVariationalDistribution(grid, batch_shape=torch.Size([width]))
        self.strategy = variational.GridInterpolationVariationalStrategy(self.prior, grid, [(-1.0, 1.0)], q)
        # q starts here, and not at the first call from torch's own generator: g_k(x) = x, spread as the prior
        with torch.no_grad():
            q.variational_mean.copy_(self.strategy.inducing_points.squeeze(-1))
            q.chol_variational_covar.copy_(torch.linalg.cholesky(self.strategy.prior_distribution.covariance_matrix))
        self.strategy.variational_params_initialized.fill_(1)

    @torch.no_grad()
    def frozen(self) -> "FrozenProcesses":
        q = self.strategy.variational_distribution
        grid = self.strategy.inducing_points.flatten()
        return FrozenProcesses(grid, q.mean, q.lazy_covariance_matrix.root.to_dense())

    def forward(self, x: Float[Tensor, "N k"]) -> tuple[Float[Tensor, "N k"], Float[Tensor, "N k"]]:
        from linear_operator.utils.interpolation import left_interp

        with self._exact():
            g = self.strategy(x.mT.unsqueeze(-1))  # k processes, N inputs of one dimension
        covariance = g.lazy_covariance_matrix  # V S Vᵀ, not yet computed
        # diag(V L Lᵀ Vᵀ) = Σ_j (V L)_j²: GPyTorch's own `variance` is the same, ten times as slow
        lower = covariance.base_linear_op.root.to_dense()
        variance = left_interp(covariance.left_interp_indices, covariance.left_interp_values, lower).square().sum(-1)
        return g.mean.mT, variance.mT

    def kl(self) -> Float[Tensor, ""]:
        """Σ_k KL[q(u_k) ‖ p(u_k)]."""
        with self._exact():
            return self.strategy.kl_divergence().sum()

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """Around calls of GPyTorch: its cache is stale after a step or a load, and half precision is not enough.

        Nor does the cache stay, since a module that holds results of computations cannot be copied. One thread at a
        time: they would clear each other's cache.
        """
        clear = _gpytorch().utils.memoize.clear_cache_hook
        with _CACHE, torch.autocast(self.strategy.inducing_points.device.type, enabled=False):
            clear(self.strategy)
            yield
            clear(self.strategy)


class FrozenProcesses(nn.Module):
    """`GridProcesses` in plain formulas: V dense, by the cubic convolution that GPyTorch interpolates with."""

    def __init__(self, grid: Float[Tensor, "G"], mean: Float[Tensor, "k G"], lower: Float[Tensor, "k G G"]) -> None:
        super().__init__()
        for name, value in (("grid", grid), ("mean", mean), ("lower", lower)):
            self.register_buffer(name, value.detach().clone(), persistent=False)
        self.grid: Tensor
        self.mean: Tensor
        self.lower: Tensor
        self.step = float(grid[1] - grid[0])

    def forward(self, x: Float[Tensor, "N k"]) -> tuple[Float[Tensor, "N k"], Float[Tensor, "N k"]]:
        s = (x.mT.unsqueeze(-1) - self.grid).abs() / self.step  # [k, N, G]
        near, far = (1.5 * s - 2.5) * s * s + 1, ((-0.5 * s + 2.5) * s - 4) * s + 2  # Keys 1981
        v = torch.where(s < 1, near, torch.where(s < 2, far, 0))
        mean = (v @ self.mean.unsqueeze(-1)).squeeze(-1)
        return mean.mT, (v @ self.lower).square().sum(-1).mT


class Prior(nn.Module):
    """p(g_k) = GP(0, σ_k² exp(−½ (x − x')² / ℓ_k²)); what GPyTorch's strategy asks at the grid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        kernels, batch = _gpytorch().kernels, torch.Size([width])
        self.covariance = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=batch), batch_shape=batch)

    def forward(self, x: Tensor) -> Any:
        covariance = self.covariance(x)
        return _gpytorch().distributions.MultivariateNormal(x.new_zeros(covariance.shape[:-1]), covariance)


_CACHE = threading.RLock()  # of GPyTorch


def _gpytorch() -> Any:
    try:
        if "gpytorch" not in sys.modules:  # not each time: catch_warnings concerns all threads
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its import scripts functions, which newer versions of torch deprecate
                import gpytorch
        import gpytorch
    except ImportError:
        raise CalgpError("svdkl needs GPyTorch, which is not here: pip install 'calgp[svdkl]'.") from None
    return gpytorch
