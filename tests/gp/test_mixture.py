import numpy as np
import pytest
import torch
from torch import nn

from calgp.gp import UNMASKED, Bound, Latent, MaskedLinear, Masking, Mixture, Model, Noise, Softmax, predict
from calgp.gp.noise import site_key

N, D, Q = 7, 6, 3


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Toy(Model):
    """A linear map, its inputs masked or not."""

    def __init__(self, seed, masking=Masking(), likelihood=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = MaskedLinear(D, Q, masking=masking, std=1.0, generator=generator)
        self.likelihood = Softmax() if likelihood is None else likelihood

    def sample(self, h, noise):
        return Latent(self.linear(h, noise).unflatten(0, (-1, len(h))))

    def kl(self):
        return self.linear.kl()


class GaussianToy(Toy):
    """One Gaussian, as a sparse Gaussian process has it."""

    def sample(self, h, noise):
        mean = (h @ self.linear.weight).unsqueeze(0)
        return Latent(mean, 0.5 + mean.square())


class Other(Softmax):
    """Another likelihood."""


@pytest.fixture
def x():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(9))


def test_points_of_models_without_masks_are_averaged(x):
    """Five members, five components, whatever S is; in NumPy: the mean, and the variance over members."""
    members = [Toy(seed, UNMASKED) for seed in range(5)]
    result = predict(Mixture(members), x, passes=50)
    probs = np.stack([predict(member, x, passes=50).probs.numpy() for member in members])
    np.testing.assert_allclose(result.probs, probs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(result.variance, probs.var(0, ddof=1), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(result.expected_entropy, -(probs * np.log(probs)).sum(-1).mean(0), rtol=1e-4)
    assert result.samples == 5 and Mixture(members).sites() == {}


def test_masked_members_draw_their_own_masks_and_are_averaged(x):
    """Each member alone, its masks keyed by its name in the mixture: S components each, then NumPy's mean over all."""
    one = Toy(0)
    twin = Toy(0)  # the same weights: what differs is the masks
    mixture = Mixture([one, twin])
    assert list(mixture.sites()) == ["members.0.linear.mask", "members.1.linear.mask"]
    result = predict(mixture, x, passes=4, seed=3)
    noise, probs = Noise(3, torch.arange(4), torch.arange(N)), []
    for number, member in enumerate((one, twin)):
        member.linear.mask.site = site_key(f"members.{number}.linear.mask")
        probs.append(member(x, noise).mean.softmax(-1).detach().numpy())
    assert not np.allclose(probs[0], probs[1])
    np.testing.assert_allclose(result.probs, np.concatenate(probs).mean(0), rtol=1e-5)
    assert result.samples == 8


@pytest.mark.parametrize("kinds", [(Toy, Toy), (Toy, GaussianToy), (GaussianToy, GaussianToy)])
def test_the_answer_depends_on_no_batch_and_no_chunk(x, kinds):
    mixture = Mixture([kind(seed) for seed, kind in enumerate(kinds)])
    whole = predict(mixture, x, passes=6, seed=1)
    rows = torch.arange(N)
    parts = predict(mixture, [(x[:3], rows[:3]), (x[3:], rows[3:])], passes=6, seed=1, memory=1)
    torch.testing.assert_close(parts.log_probs, whole.log_probs, rtol=0, atol=1e-5)
    assert parts.samples == whole.samples


def test_a_member_without_masks_weighs_as_much_as_one_with(x):
    masked, plain = Toy(0), Toy(1, UNMASKED)
    result = predict(Mixture([masked, plain]), x, passes=10, memory=1)
    masked.linear.mask.site = site_key("members.0.linear.mask")
    noise = Noise(0, torch.arange(10), torch.arange(N))
    expected = (masked(x, noise).mean.softmax(-1).mean(0) + plain(x).mean[0].softmax(-1)) / 2
    torch.testing.assert_close(result.probs, expected.detach(), rtol=1e-5, atol=1e-6)


def test_gaussian_members_are_integrated_each_with_draws_of_its_own(x):
    """Against a NumPy average over independent draws, within five standard errors of the two."""
    members = [GaussianToy(0), GaussianToy(1)]
    mixture = Mixture(members)
    latent = mixture(x, Noise(0, torch.arange(2), torch.arange(N)))
    assert latent.mean.shape == (4, N, Q)
    epsilon = latent.points(3, Noise(0, torch.arange(2), torch.arange(N))).unflatten(0, (4, 3)) - latent.mean[:, None]
    assert len((epsilon / latent.variance.sqrt()[:, None]).flatten().unique()) == 4 * 3 * N * Q
    result = predict(mixture, x, passes=200)
    rng, draws, probs = np.random.default_rng(0), 20_000, []
    for member in members:
        f = member(x)
        mean, deviation = f.mean[0].detach().numpy(), f.variance[0].sqrt().detach().numpy()
        points = np.exp(mean + deviation * rng.standard_normal((draws, N, Q)))
        probs.append(points / points.sum(-1, keepdims=True))
    error = np.sqrt(result.variance.numpy() * (1 / result.samples + 1 / (2 * draws)))
    assert (np.abs(result.probs.numpy() - np.concatenate(probs).mean(0)) < 5 * error).all()
    assert result.samples == 200 * 2 * 16


def test_points_and_gaussians_mix(x):
    result = predict(Mixture([Toy(0, UNMASKED), GaussianToy(1)]), x, passes=300)
    halves = [predict(member, x, passes=300).probs for member in (Toy(0, UNMASKED), GaussianToy(1))]
    # 4,800 draws on either side: standard errors below ½/√4800
    torch.testing.assert_close(result.probs, sum(halves) / 2, rtol=0, atol=5 * 2**0.5 * 0.5 / 4800**0.5)


def test_its_bound_is_the_mean_of_its_members_bounds(x):
    members = [Toy(seed, UNMASKED) for seed in range(3)]
    y = torch.arange(N) % Q
    parts = torch.tensor([[part.item() for part in Bound(member, n=N)(x, y)] for member in members])
    nll, kl = Bound(Mixture(members), n=N)(x, y)
    torch.testing.assert_close(torch.stack([nll, kl]), parts.mean(0))


def test_it_works_without_keys_in_anybodys_loop(x):
    mixture = Mixture([Toy(0), Toy(1, UNMASKED)])
    assert mixture(x).mean.shape == (2, N, Q)
    sum(Bound(mixture, n=N)(x, torch.arange(N) % Q)).backward()
    assert all(parameter.grad is not None for parameter in mixture.parameters())


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(ValueError, match="different models"):
        Mixture([])
    with pytest.raises(ValueError, match="different models"):
        Mixture([model := Toy(0), model])
    with pytest.raises(ValueError, match="one kind of likelihood"):
        Mixture([Toy(0), Toy(1, likelihood=Other())])
    with pytest.raises(ValueError, match="mixture of mixtures"):
        Mixture([Mixture([Toy(0)]), Toy(1)])


def test_one_member_is_itself(x):
    assert isinstance(Mixture([Toy(0)]), nn.Module)
    torch.testing.assert_close(
        predict(Mixture([Toy(0, UNMASKED)]), x).log_probs, predict(Toy(0, UNMASKED), x).log_probs
    )


def test_members_with_a_covariance_and_without_make_one_mixture():
    """A point has no covariance, a variance is one of independent functions."""
    a = randn(3, 3, seed=0)
    parts = [Latent(randn(1, 2, 3, seed=1)), Latent(randn(1, 2, 3, seed=2), torch.full((1, 2, 3), 4.0).double()),
             Latent(randn(1, 2, 3, seed=3), covariance=(a @ a.mT).expand(1, 2, 3, 3))]  # fmt: skip
    found = Mixture([Known(part) for part in parts])(torch.zeros(2, 1))
    assert torch.equal(found.mean, torch.cat([part.mean for part in parts])) and found.variance is None
    expected = [torch.zeros(3, 3).double(), 4 * torch.eye(3).double(), a @ a.mT]
    for component, covariance in zip(found.covariance, expected, strict=True):
        torch.testing.assert_close(component, covariance.expand(2, 3, 3))


class Known(Model):
    """Says the same of every input."""

    def __init__(self, latent):
        super().__init__()
        self.latent, self.likelihood = latent, Softmax()

    def sample(self, h, noise):
        return self.latent

    def kl(self):
        return torch.zeros(())
