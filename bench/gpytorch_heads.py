"""GPyTorch's two scalable classification heads on the same LeNet, as its documentation writes them."""

import warnings
from collections.abc import Callable

import gpytorch
import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    GridInterpolationVariationalStrategy,
    IndependentMultitaskVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor, nn

from bench.straightforward import LeNet


class GridLayer(gpytorch.models.ApproximateGP):
    """64 one-dimensional GPs on a grid (Wilson et al. 2016)."""

    def __init__(self, features: int, grid: int = 64) -> None:
        distribution = CholeskyVariationalDistribution(grid, batch_shape=torch.Size([features]))
        strategy = IndependentMultitaskVariationalStrategy(
            GridInterpolationVariationalStrategy(self, grid, [(-10.0, 10.0)], distribution), num_tasks=features
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class SVDKL(gpytorch.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.extractor = nn.Sequential(LeNet(masks=False), nn.Linear(4096, features))
        self.scale = gpytorch.utils.grid.ScaleToBounds(-10.0, 10.0)
        self.gp = GridLayer(features)

    def forward(self, x: Tensor) -> gpytorch.distributions.Distribution:
        features = self.scale(self.extractor(x))
        return self.gp(features.transpose(-1, -2).unsqueeze(-1))


class InducingLayer(gpytorch.models.ApproximateGP):
    """A sparse GP for each class, sharing nothing: 200 inducing points among the 4096 features."""

    def __init__(self, inducing: Tensor, classes: int) -> None:
        distribution = CholeskyVariationalDistribution(inducing.shape[-2], batch_shape=torch.Size([classes]))
        strategy = IndependentMultitaskVariationalStrategy(
            VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True), num_tasks=classes
        )
        super().__init__(strategy)
        shape = torch.Size([classes])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=shape)
        kernel.lengthscale = 64.0  # √4096: with 1 the covariance of 4096 features would be the identity
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=shape)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class SVGP(gpytorch.Module):
    def __init__(self, x: Tensor, points: int = 200, classes: int = 10) -> None:
        super().__init__()
        self.extractor = LeNet(masks=False)
        with torch.no_grad():
            start = self.extractor(x.repeat(-(-points // len(x)), 1, 1, 1)[:points])
            start = start + 0.1 * torch.randn_like(start)
        self.gp = InducingLayer(start.repeat(classes, 1, 1), classes)

    def forward(self, x: Tensor) -> gpytorch.distributions.Distribution:
        return self.gp(self.extractor(x))


def svdkl_step(x: Tensor, y: Tensor, n: int) -> Callable[[], object]:
    torch.manual_seed(0)
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=64, num_classes=10)
    return _step(SVDKL(), likelihood, x, y, n)


def svgp_step(x: Tensor, y: Tensor, n: int) -> Callable[[], object]:
    torch.manual_seed(0)
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=10, mixing_weights=False)
    return _step(SVGP(x), likelihood, x, y, n)


def _step(model: gpytorch.Module, likelihood: gpytorch.likelihoods.Likelihood, x: Tensor, y: Tensor, n: int):
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()])
    bound = gpytorch.mlls.VariationalELBO(likelihood, model.gp, num_data=n)

    def run() -> None:
        optimiser.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own, about jitter
            (-bound(model(x), y)).backward()
        optimiser.step()

    return run
