"""Laplace's posterior of a last layer: against autograd's Hessian, laplace-torch, and definitions."""

import itertools
import math
import time
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from architectures import library
from calgp.errors import CalgpError
from calgp.posthoc.calibration import Temperature
from calgp.posthoc.last_layer import UncertaintyScaling, best_precision, fit_last_layer, log_odds_variance

TAU = 0.7


def problem(n=60, d=5, classes=4, *, bias=True, seed=0):
    """Features, labels and a last layer, in double precision."""
    g = torch.Generator().manual_seed(seed)
    c, y = torch.randn(n, d, generator=g).double(), torch.randint(classes, (n,), generator=g)
    weight = torch.randn(classes, d, generator=g).double()
    return c, y, weight, torch.randn(classes, generator=g).double() if bias else None


def autograd_precision(c, y, weight, bias, precision):
    """The Hessian of the cross-entropy and the prior over (W, b), class by class as (w_q, b_q)."""
    theta = torch.cat([weight, bias[:, None]], 1) if bias is not None else weight
    phi = torch.cat([c, torch.ones(len(c), 1).double()], 1) if bias is not None else c

    def energy(flat):
        theta_ = flat.view_as(theta)
        return F.cross_entropy(phi @ theta_.mT, y, reduction="sum") + precision / 2 * flat.square().sum()

    return torch.autograd.functional.hessian(energy, theta.flatten())


@pytest.mark.parametrize("bias", [True, False])
def test_the_full_covariance_is_the_inverse_of_autograds_hessian(bias):
    given = problem(bias=bias)
    hessian = autograd_precision(*given, TAU)
    found = fit_last_layer(*given, structure="full", precision=TAU).covariance
    torch.testing.assert_close(found.reshape(hessian.shape), hessian.inverse(), rtol=1e-9, atol=1e-12)


def test_logits_have_the_covariance_of_the_linear_map():
    c, y, weight, bias = problem()
    posterior = fit_last_layer(c, y, weight, bias, precision=TAU)
    flat = posterior.covariance.reshape(24, 24)
    for row in c[:3]:
        phi = torch.cat([row, torch.ones(1).double()])
        jacobian = torch.kron(torch.eye(4).double(), phi[None])  # of f = (I ⊗ φᵀ) θ
        torch.testing.assert_close(posterior.logit_covariance(row[None])[0], jacobian @ flat @ jacobian.mT)


def test_the_evidence_is_that_of_the_determinant():
    """log p(D | θ) − τ/2 ‖θ‖² + P/2 log τ − ½ log |H + τI|, by autograd's Hessian."""
    c, y, weight, bias = problem()
    hessian = autograd_precision(c, y, weight, bias, TAU)
    theta = torch.cat([weight, bias[:, None]], 1)
    energy = F.cross_entropy(c @ weight.mT + bias, y, reduction="sum") + TAU / 2 * theta.square().sum()
    expected = -energy + theta.numel() / 2 * math.log(TAU) - torch.logdet(hessian) / 2
    found = fit_last_layer(c, y, weight, bias, precision=TAU)
    assert found.log_evidence == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_the_precision_has_the_largest_evidence(structure):
    given = problem(n=300)
    chosen = fit_last_layer(*given, structure=structure)
    for factor in (0.5, 0.9, 1.1, 2.0):
        other = fit_last_layer(*given, structure=structure, precision=factor * chosen.precision)
        assert other.log_evidence < chosen.log_evidence
        assert other.precision == factor * chosen.precision


def test_at_the_best_precision_the_data_determine_as_many_parameters_as_the_weights_say():
    """MacKay's fixed point τ ‖θ‖² = Σ λ / (λ + τ), from eigenvalues over nine decades."""
    values = torch.logspace(-4, 5, 50, dtype=torch.float64)
    tau = best_precision(values, squared=3.0)
    assert tau * 3.0 == pytest.approx((values / (values + tau)).sum().item(), rel=1e-9)


def test_kronecker_is_the_product_of_two_means():
    c, y, weight, bias = problem()
    phi = torch.cat([c, torch.ones(len(c), 1).double()], 1)
    p = (c @ weight.mT + bias).softmax(1)
    classes = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    precision = torch.kron(classes, phi.mT @ phi) + TAU * torch.eye(24).double()
    found = fit_last_layer(c, y, weight, bias, structure="kronecker", precision=TAU).logit_covariance(c[:2])
    for row, covariance in zip(phi, found, strict=False):
        jacobian = torch.kron(torch.eye(4).double(), row[None])
        torch.testing.assert_close(covariance, jacobian @ precision.inverse() @ jacobian.mT)


def test_kronecker_is_exact_where_all_probabilities_are_the_same():
    c, y, weight, bias = problem()
    full, kronecker = (
        fit_last_layer(c, y, 0 * weight, bias, structure=each, precision=TAU).logit_covariance(c[:5])
        for each in ("full", "kronecker")
    )
    torch.testing.assert_close(full, kronecker)


@pytest.mark.parametrize("features, classes, bias, tau", [(6, 3, True, TAU), (1, 2, True, 1e-3), (30, 10, False, 50.0)])
def test_the_covariance_and_the_evidence_are_those_of_laplace_torch(features, classes, bias, tau):
    """laplace-torch 0.3, full GGN of the last layer, double precision: to 1e-6, as the issue asks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            laplace = library("laplace")
        except ImportError as error:
            pytest.skip(f"laplace-torch is not installed ({error})")
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, features), nn.Tanh(), nn.Linear(features, classes, bias=bias)).double()
        x, y = torch.randn(50, 4).double(), torch.arange(50) % classes
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20)
        theirs = laplace.Laplace(
            network, "classification", subset_of_weights="last_layer", hessian_structure="full", prior_precision=tau
        )
        theirs.fit(loader)
        _, expected = theirs._glm_predictive_distribution(x)
        evidence = theirs.log_marginal_likelihood().item()
    last = network[2]
    own = last.bias.detach() if bias else None
    mine = fit_last_layer(network[:2](x).detach(), y, last.weight.detach(), own, precision=tau)
    assert (mine.logit_covariance(network[:2](x).detach()) - expected).abs().max() < 1e-6
    assert mine.log_evidence == pytest.approx(evidence, rel=1e-6)


def test_the_variance_of_log_odds_of_two_classes_is_that_of_the_difference():
    covariance = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]])
    found = log_odds_variance(torch.tensor([[1.0, -1.0]]), covariance)
    assert found.item() == pytest.approx(2 + 1 - 2 * 0.5)


def test_the_variance_of_log_odds_is_the_delta_method():
    """Gradient of log p_ŷ / (1 − p_ŷ) by autograd."""
    g = torch.Generator().manual_seed(0)
    f = (3 * torch.randn(20, 5, generator=g)).double().requires_grad_()
    root = torch.randn(20, 5, 5, generator=g).double()
    covariance = root @ root.mT
    top = f.softmax(1).amax(1)
    (slope,) = torch.autograd.grad((top.log() - (1 - top).log()).sum(), f)
    expected = torch.einsum("nq,nqr,nr->n", slope, covariance, slope)
    torch.testing.assert_close(log_odds_variance(f.detach(), covariance), expected)


def held_out(n=500, seed=0):
    """Logits that are too large, with noise whose variance is known: those of large variance are wrong more often."""
    g = torch.Generator().manual_seed(seed)
    true, variance = torch.randn(n, 4, generator=g).double() * 3, torch.rand(n, generator=g).double() * 30
    y = torch.distributions.Categorical(logits=true).sample()
    return 2 * (true + variance.sqrt()[:, None] * torch.randn(n, 4, generator=g).double()), 4 * variance, y


def test_scaling_never_falls_behind_temperature_on_its_hold_out_and_uses_variance_that_tells():
    torch.manual_seed(0)
    logits, variance, y = held_out()
    found = UncertaintyScaling.fit(logits, variance, y)
    alone = Temperature.fit(logits.log_softmax(1), y).apply(logits.log_softmax(1))
    assert found.trust > 0
    assert F.nll_loss(found.apply(logits, variance), y) < F.nll_loss(alone, y) - 0.02


def test_without_trust_scaling_is_temperature_scaling():
    logits, variance, _ = held_out()
    found = UncertaintyScaling(1.7, 0.0).apply(logits, variance)
    torch.testing.assert_close(found, Temperature(1.7).apply(logits.log_softmax(1)))


@pytest.mark.parametrize("temperature, trust", list(itertools.product([0.05, 1.0, 20.0], [0.0, 1.0, 100.0])))
def test_the_order_of_logits_never_changes(temperature, trust):
    """Also of logits that are neighbours in single precision."""
    logits, variance, _ = held_out()
    close = logits.float()
    close[:, 1] = torch.nextafter(close[:, 0], torch.tensor(torch.inf))
    found = UncertaintyScaling(temperature, trust).apply(close.double(), 1e3 * variance)
    assert found.argsort(dim=1, stable=True).equal(close.argsort(dim=1, stable=True))


def test_1280_features_and_10_classes_take_seconds():
    """The size of EfficientNet-Lite0: 12,810 parameters. Twenty seconds of a busy core are the limit."""
    g = torch.Generator().manual_seed(0)
    c, y = torch.randn(2000, 1280, generator=g).relu(), torch.arange(2000) % 10
    clock = time.process_time()
    posterior = fit_last_layer(c, y, torch.randn(10, 1280, generator=g) / 30, torch.zeros(10))
    covariance = posterior.logit_covariance(c)
    assert time.process_time() - clock < 20
    assert covariance.shape == (2000, 10, 10) and (covariance.diagonal(dim1=1, dim2=2) > 0).all()


def test_wrong_shapes_and_names_are_refused():
    c, y, weight, bias = problem()
    with pytest.raises(CalgpError, match=r"features \[N, 5\]"):
        fit_last_layer(c[:, :4], y, weight, bias)
    with pytest.raises(CalgpError, match="did you mean 'full'"):
        fit_last_layer(c, y, weight, bias, structure="ful")
    with pytest.raises(CalgpError, match="T is positive"):
        UncertaintyScaling(0.0, 1.0)
