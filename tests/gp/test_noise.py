import itertools
import math

import pytest
import scipy.stats
import torch

import reference
from calgp.gp import Noise
from calgp.gp.noise import _mix, _signed, bernoulli, binary_digits, normal, quasi_normal, site_key

KEEPS = [0.5, 0.25, 0.75, 0.9, 0.3, 1 / 3, 0.01, 0.999]


def noise(seed=0, samples=4, rows=50):
    return Noise(seed, torch.arange(samples), torch.arange(rows))


def draw(keys, size, *, keep=0.5, site=7, shared=False, dtype=torch.float32, rows=None):
    rows = len(keys.rows) if rows is None else rows
    like = torch.zeros((), dtype=dtype)
    return bernoulli(keys, site, size, digits=binary_digits(keep), rows=rows, shared=shared, like=like)


def correlation(a, b):
    """Of two sets of masks, with what chance allows: five standard deviations of zero correlation."""
    a, b = a.flatten().double(), b.flatten().double()
    assert a.numel() == b.numel()
    return torch.corrcoef(torch.stack([a, b]))[0, 1].abs().item(), 5 / math.sqrt(a.numel())


def test_hash_gives_the_published_numbers_of_splitmix64():
    """The reference values for the seed 1234567 (prng.di.unimi.it, Rosetta Code)."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [_signed((1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(5)]
    assert [word % 2**64 for word in _mix(torch.tensor(states)).tolist()] == published


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("keep", KEEPS)
def test_mean_is_keep(keep, keyed):
    """Within 4.5 standard deviations of a binomial of 200,000."""
    if keyed:
        z = draw(noise(samples=4), 1000, keep=keep)
    else:
        torch.manual_seed(0)
        z = draw(None, 1000, keep=keep, rows=200)
    assert set(z.unique().tolist()) == {0.0, 1.0}
    assert z.numel() == 200_000
    bound = 4.5 * math.sqrt(keep * (1 - keep) / z.numel()) + 2**-17  # keep is rounded to multiples of 2^-16
    assert z.mean().item() == pytest.approx(keep, abs=bound)


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_every_element_row_and_sample_has_that_mean(keep):
    z = draw(noise(samples=60, rows=70), 130, keep=keep).double()
    for axes in [(0, 1), (1, 2), (0, 2)]:
        means = z.mean(axes)
        score = (means - keep) / math.sqrt(keep * (1 - keep) * means.numel() / z.numel())
        assert score.abs().max() < 4.5
        assert score.std() == pytest.approx(1, abs=0.35)  # neither more nor less scattered than chance: 60 numbers


@pytest.mark.parametrize("keep", [0.5, 0.3])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 8, 64])
def test_neighbours_are_independent(keep, axis, lag):
    """Along samples, rows and elements; 64 elements make a word, 8 a byte."""
    z = draw(noise(samples=70, rows=70), 70, keep=keep)
    n = z.shape[axis]
    found, bound = correlation(z.narrow(axis, lag, n - lag), z.narrow(axis, 0, n - lag))
    assert found < bound


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_samples_and_rows_do_not_add_up(keep):
    """(sample s, row r) is not (sample r, row s), nor (sample s + 1, row r − 1)."""
    z = draw(noise(samples=60, rows=60), 64, keep=keep)
    off_diagonal = ~torch.eye(60, dtype=torch.bool)
    for other in (z.transpose(0, 1), z.roll((1, -1), (0, 1))):
        found, bound = correlation(z[off_diagonal], other[off_diagonal])
        assert found < bound


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_sites_and_seeds_are_independent(keep):
    zs = [draw(noise(seed), 400, keep=keep, site=site_key(name)) for seed in (0, 1, 2**40) for name in ("a", "b", "")]
    for a, b in itertools.combinations(zs, 2):
        found, bound = correlation(a, b)
        assert found < bound


def test_words_never_repeat():
    """900,000 words of 64 bits: a repetition by chance has probability 2e-8."""
    words = [
        noise(seed, samples=30, rows=100).words(site_key(site), 50, shared=False).flatten()
        for seed in (0, 1, 2)
        for site in ("a", "b")
    ]
    words = torch.cat(words)
    assert words.unique().numel() == words.numel() == 900_000


def test_masks_are_a_function_of_keys_alone():
    """Whatever the batch, the order of the rows, the chunk of samples, the number of elements that are needed."""
    whole = draw(noise(samples=9, rows=20), 100, keep=0.3)
    rows, samples = torch.tensor([17, 3, 3, 0]), torch.tensor([8, 2])
    part = draw(Noise(0, samples, rows), 100, keep=0.3)
    assert torch.equal(part, whole[samples][:, rows])


def test_masks_do_not_read_or_move_the_global_generator():
    torch.manual_seed(0)
    first = draw(noise(), 100)
    before = torch.get_rng_state()
    second = draw(noise(), 100)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, second)


def test_shared_masks_are_one_for_all_rows_and_independent_of_the_rows():
    one, other = Noise(0, torch.arange(5), torch.arange(8)), Noise(0, torch.arange(5), torch.tensor([99, 3]))
    z = draw(one, 100, shared=True)
    assert z.shape == (5, 1, 100)
    assert torch.equal(z, draw(other, 100, shared=True))
    for row in range(8):  # and no row's own mask
        assert not torch.equal(z[:, 0], draw(one, 100)[:, row])


def test_rows_have_their_own_masks_otherwise():
    z = draw(noise(samples=2, rows=30), 200)
    assert z.shape == (2, 30, 200)
    assert z.flatten(0, 1).unique(dim=0).shape[0] == 60


def test_without_keys_torch_seeds_reproduce():
    def first(seed):
        torch.manual_seed(seed)
        return draw(None, 300, rows=3)

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    assert first(0).shape == (1, 3, 300)
    assert draw(None, 300, rows=3, shared=True).shape == (1, 1, 300)
    assert not torch.equal(draw(None, 300, rows=3), draw(None, 300, rows=3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masks_have_the_type_they_are_asked_for_and_the_same_values(dtype):
    z = draw(noise(), 100, dtype=dtype)
    assert z.dtype == dtype
    assert torch.equal(z.double(), draw(noise(), 100).double())


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1000])
def test_any_number_of_elements(size):
    assert draw(noise(), size).shape == (4, 50, size)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("keep", [0.5, 0.75, 0.3])
def test_masks_equal_the_naive_ones_bit_by_bit(keep, shared):
    """What a seed means does not change from one version to the next."""
    keys = Noise(2**40 + 1, torch.tensor([0, 5]), torch.tensor([3, 10**6]))
    z = draw(keys, 70, keep=keep, site=-9, shared=shared)
    for (s, sample), (r, row) in itertools.product(enumerate([0, 5]), enumerate([3, 10**6])):
        naive = [
            reference.mask_element(2**40 + 1, -9, sample, row, i, size=70, keep=keep, shared=shared) for i in range(70)
        ]
        assert z[s, 0 if shared else r].tolist() == naive


def test_sites_have_fixed_keys():
    """BLAKE2b of the name, not Python's salted hash: the published digest (8 bytes) of the empty string."""
    assert site_key("") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little", signed=True)


def test_probabilities_of_few_digits_need_few_planes_of_bits():
    assert [len(binary_digits(keep)) for keep in (0.5, 0.25, 0.75, 0.875)] == [1, 2, 2, 3]
    assert max(len(binary_digits(keep)) for keep in KEEPS) == 16


def test_normal_numbers_are_normal_and_independent():
    noise = Noise(0, torch.arange(4), torch.arange(500))
    draws = normal(noise, 7, 21, rows=500, like=torch.zeros(()).double())
    assert draws.shape == (4, 500, 21)
    # Kolmogorov–Smirnov against the exact distribution, and correlations of columns within five errors of zero
    assert scipy.stats.kstest(draws.flatten().numpy(), "norm").pvalue > 0.01
    columns = draws.flatten(0, 1)
    correlation = torch.corrcoef(columns.T) - torch.eye(21)
    assert correlation.abs().max() < 5 / len(columns) ** 0.5
    assert torch.corrcoef(columns.T.square()).fill_diagonal_(0).abs().max() < 5 / len(columns) ** 0.5


def test_normal_numbers_depend_on_their_key_alone():
    def of(samples, rows):
        return normal(Noise(3, samples, rows), 7, 5, rows=len(rows), like=torch.zeros(()))

    whole = of(torch.arange(4), torch.arange(6))
    rows = torch.tensor([5, 0, 3])
    assert torch.equal(of(torch.tensor([2]), rows), whole[2:3, rows])
    assert whole.dtype == torch.float32


def test_normal_numbers_without_keys_come_from_torchs_generator():
    torch.manual_seed(0)
    drawn = normal(None, 0, 5, rows=3, like=torch.zeros(()))
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.randn(1, 3, 5))


def test_what_is_kept_is_taken_and_what_is_not_is_kept():
    rows, like = torch.arange(3), torch.empty(0)
    kept: dict[tuple[int, int], torch.Tensor] = {}
    noise = Noise(0, torch.arange(2), rows[:1], kept)
    options = {"digits": binary_digits(0.5), "shared": False, "like": like}
    z = bernoulli(noise, 1, 70, rows=1, **options)
    epsilon = normal(noise, 2, 5, rows=1, like=like)
    assert set(kept) == {(1, 70), (2, 5)}
    others = noise._replace(rows=rows, seed=9)  # which would draw something else, for three rows
    assert torch.equal(bernoulli(others, 1, 70, rows=3, **options), z)
    assert torch.equal(normal(others, 2, 5, rows=3, like=like), epsilon)
    plain = Noise(0, torch.arange(2), rows[:1])
    assert torch.equal(bernoulli(plain, 1, 70, rows=1, **options), z)
    assert torch.equal(normal(plain, 2, 5, rows=1, like=like), epsilon)


# Quasi-random points


def points(samples, draws, *, seed=0, outputs=5, rows=3):
    keys = Noise(seed, torch.tensor(samples), torch.arange(rows))
    return quasi_normal(keys, 7, draws, outputs, like=torch.zeros((), dtype=torch.float64))


def test_quasi_random_points_are_scrambled_sobol_points():
    found = points([0], 16)
    sobol = torch.quasirandom.SobolEngine(5, scramble=True, seed=0).draw(16, dtype=torch.float64)
    torch.testing.assert_close(torch.special.ndtr(found[0]), sobol)


@pytest.mark.parametrize("draws", [5, 16, 256])
def test_samples_take_turns_in_one_sequence_whatever_the_chunk(draws):
    whole = points(list(range(7)), draws)
    assert torch.equal(whole.flatten(0, 1), points([0], 7 * draws)[0])
    for chunk in ([3], [5, 6], [6, 0]):
        assert torch.equal(points(chunk, draws), whole[chunk])


def test_quasi_random_points_have_the_seed_and_not_the_row_in_their_key():
    assert torch.equal(points([2], 8, rows=3), points([2], 8, rows=9))
    assert not torch.isclose(points([2], 8), points([2], 8, seed=1)).any()
