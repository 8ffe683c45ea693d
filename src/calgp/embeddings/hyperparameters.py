"""Kernel, σ², spread and temperature of a `GPClassifier`: those with the best likelihood of left-out rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calgp.embeddings.inputs import TRANSFORMS, Inputs, parts
from calgp.embeddings.prediction import log_average, numbers
from calgp.gp import Latent
from calgp.gp.laplace_softmax import Basis, Mode, VectorGP, VectorKernel, find_mode, weight_root, weight_variance
from calgp.posthoc.calibration import Temperature
from calgp.posthoc.checks import stratified_folds

SEARCHED, SEARCHED_CLASSES = 1000, 100  # training rows on which kernels are compared, and classes of them at most
MIDDLE = 6000  # training rows on which they are compared again, if there are so many
HELD_OUT = 5000  # rows at most that are left out of so many
COMPARED = 1000  # of them at most on which all spreads and σ² are looked at
ROUGHLY = 1e-2  # gradient of a mode that only compares
NEARLY = 3e-2  # in the coordinates of a mode nearby: within some 2e-4 nats a row of the minimum, for 50,000 rows
FEWEST = 20  # training rows that can tell one kernel from another
FOLDS, SEARCH_FOLDS = 5, 3
VARIANCES = tuple(10 ** (power / 2) for power in range(-1, 8))  # σ²: 0.3 … 3,000
LENGTHSCALES = tuple(2 ** (power / 2) for power in range(-6, 5))  # ℓ: 0.12 … 4, of inputs of length one
SPREADS = tuple(10 ** (-power / 2) for power in range(9))  # of Laplace's variance: 1 … 0.0001
CLEARLY = 0.002  # relative: less of a better likelihood is not worth another step
COLDEST, HOTTEST = 0.2, 5.0  # temperatures that left-out rows are believed
PRIOR_ROWS = 50  # what T = 1 counts beside the left-out rows


@dataclass(frozen=True)
class Choice:
    """Hyperparameters, and the mean negative log-likelihood of left-out rows with them (None: there were too few).

    >>> import numpy as np
    >>> from calgp import GPClassifier
    >>> X = np.random.default_rng(0).normal(size=(200, 3))
    >>> isinstance(GPClassifier().fit(X, X[:, 0] > 0).choice_.variance, float)
    True
    """

    transform: str
    kernel: VectorKernel
    variance: float  # σ²
    mnll: float | None = None
    spread: float = 1.0  # of Laplace's variance of f
    temperature: float = 1.0


def search(x: Tensor, y: Tensor, classes: int) -> tuple[Choice, tuple[Choice, ...]]:
    """The transform, the kernel and a first σ² by cross-validation on some rows, from the most likely ones outwards."""
    radial = VectorKernel(radial=1.0)
    if len(x) < FEWEST:
        return Choice("plain", radial, 10.0), ()
    x, y, classes = _some_classes(x, y, classes)
    x, y = x[:SEARCHED], y[:SEARCHED]
    tried: list[Choice] = []

    def score(transform: str, kernel: VectorKernel) -> float:
        for each in tried:
            if (each.transform, each.kernel) == (transform, kernel) and each.mnll is not None:
                return each.mnll
        _, phi = Basis.exact(kernel, Inputs.fit(transform, x)(x))
        first = tried[-1].variance if tried else 10.0
        variance, mnll = _best_variance(phi, y, stratified_folds(y, SEARCH_FOLDS), classes, first)
        tried.append(Choice(transform, kernel, variance, mnll))
        return mnll

    transform = min(TRANSFORMS, key=lambda name: score(name, radial))
    _compare_kernels(1.0, lambda kernel: score(transform, kernel))
    return min(tried, key=lambda each: each.mnll or 0.0), tuple(tried)


def search_further(x: Tensor, y: Tensor, classes: int, tried: Sequence[Choice], inducing: int) -> Choice:
    """The kernel and σ² again, on more rows, from the best bent kernel on.

    Where rows are few a straight line is often enough, or a long ℓ; with more of them a process that bends gains more.
    """
    x, y, classes = _some_classes(x, y, classes)
    x, y = x[: MIDDLE + COMPARED], y[: MIDDLE + COMPARED]
    kept = len(y) - min(len(y) // 5, COMPARED)
    found = min(tried, key=lambda each: each.mnll or 0.0)
    bent = min((each for each in tried if not each.kernel.linear), key=lambda each: each.mnll or 0.0)
    u = Inputs.fit(found.transform, x)(x)
    inputs = u[: min(inducing, SEARCHED)].clone()
    again: dict[VectorKernel, Choice] = {}

    def score(kernel: VectorKernel) -> float:
        if kernel not in again:
            _, phi = Basis.of(kernel, inputs, u)
            out = torch.arange(len(y)) >= kept
            variance, mnll = _best_variance(phi, y, [out], classes, (list(again.values()) or [bent])[-1].variance)
            again[kernel] = Choice(found.transform, kernel, variance, mnll)
        return again[kernel].mnll or 0.0

    _compare_kernels(bent.kernel.lengthscale, score)
    return min(again.values(), key=lambda each: each.mnll or 0.0)


def _compare_kernels(lengthscale: float, score: Callable[[VectorKernel], float]) -> None:
    """Score kernels that bend, from one lengthscale on, then the half straight and the straight one."""
    radial = VectorKernel(radial=1.0)
    best = _climb(LENGTHSCALES, lengthscale, lambda length: score(replace(radial, lengthscale=length)))
    score(VectorKernel(linear=0.5, radial=0.5, lengthscale=best / 2**0.5))
    score(VectorKernel(linear=1.0))


def _some_classes(x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor, int]:
    """Rows of some classes, evenly spaced, if there are many: the cost grows with them, and some tell as much."""
    if classes <= SEARCHED_CLASSES:
        return x, y, classes
    some = torch.linspace(0, classes - 1, SEARCHED_CLASSES).long()
    rows = torch.isin(y, some)
    return x[rows], torch.searchsorted(some, y[rows]), SEARCHED_CLASSES


def _climb(values: tuple[float, ...], first: float, score: Callable[[float], float]) -> float:
    """The value with the lowest score, from the one nearest to `first` on, as long as neighbours are clearly better."""
    place = min(range(len(values)), key=lambda k: abs(math.log(values[k] / first)))
    best, start = score(values[place]), place
    for step in (-1, 1):
        while 0 <= place + step < len(values):
            if step == 1 and place < start:  # it went down already
                return values[place]
            if (found := score(values[place + step])) >= (1 - CLEARLY) * best:
                break
            place, best = place + step, found
    return values[place]


def _best_variance(phi: Tensor, y: Tensor, folds: list[Tensor], classes: int, first: float) -> tuple[float, float]:
    """σ² and the mean negative log-likelihood of left-out rows at the mode, at its best temperature."""
    order = torch.cat([y[fold] for fold in folds])
    teaching = [(phi[~fold], y[~fold]) for fold in folds]
    modes: list[Mode | None] = [None] * len(folds)
    found: dict[float, float] = {}

    def score(variance: float) -> float:
        for place, rows in enumerate(teaching):
            modes[place] = find_mode(*rows, classes, variance, start=modes[place], tolerance=ROUGHLY)
        log_probs = torch.cat([mode(phi[fold]).log_softmax(1) for mode, fold in zip(modes, folds, strict=True) if mode])
        found[variance] = _mnll((log_probs / _temperature(log_probs, order)).log_softmax(1), order)
        return found[variance]

    best = _climb(VARIANCES, first, score)
    return best, found[best]


def cross_validate(phi: Tensor, y: Tensor, classes: int, found: Choice) -> tuple[Choice, Tensor]:
    """σ², spread and temperature of a process that all rows carry, by the likelihood of left-out rows.

    And the entropy of each row when it was left out; of too few rows, of all of them as they are.
    """
    if len(y) < FEWEST:
        mode = find_mode(phi, y, classes, found.variance)
        return found, _entropy(mode(phi).log_softmax(1))
    folds = stratified_folds(y, FOLDS)
    variance, _ = _best_variance(phi, y, folds, classes, found.variance)
    mean, spread = phi.new_empty(len(y), classes), phi.new_empty(len(y))
    for fold in folds:
        mode = find_mode(phi[~fold], y[~fold], classes, variance)
        mean[fold] = mode(phi[fold])
        spread[fold] = weight_variance(phi[fold], weight_root(phi[~fold], mode, variance))
    return _calibrated(replace(found, variance=variance), mean, spread, y)


def hold_out(
    basis: Basis, u: Tensor, phi: Tensor, y: Tensor, classes: int, found: Choice
) -> tuple[Choice, Tensor, VectorGP]:
    """The same of a process that only some rows carry, and the process without the last rows, which are left out.

    More rows can bear more variance: σ² grows as long as what is predicted in the end is clearly better.
    """
    kept = len(y) - min(len(y) // 5, HELD_OUT)
    few = find_mode(phi[: kept // 4], y[: kept // 4], classes, found.variance, tolerance=ROUGHLY)
    root = weight_root(phi[:kept], few, found.variance)

    def fitted(variance: float, near: Mode, root: Tensor) -> tuple[float, Choice, Tensor, Tensor, VectorGP]:
        mode = find_mode(phi[:kept], y[:kept], classes, variance, start=near, root=root, tolerance=NEARLY)
        process = VectorGP.fit(basis, phi[:kept], mode, variance)
        latents = [process.latent(part) for part in parts(u[kept:], len(basis.inducing))]
        mean = torch.cat([each.mean[0] for each in latents])
        spread = torch.cat([each.marginal_variance[0, :, 0] for each in latents])
        choice, some = replace(found, variance=variance), slice(kept, kept + COMPARED)
        tried, _ = _calibrated(choice, mean[:COMPARED], spread[:COMPARED], y[some])
        return tried.mnll or 0.0, choice, mean, spread, process

    best = fitted(found.variance, few, root)
    for larger in VARIANCES[VARIANCES.index(found.variance) + 1 :]:
        following = fitted(larger, best[-1].mode, best[-1].root)
        if following[0] >= (1 - CLEARLY) * best[0]:
            break
        best = following
    _, choice, mean, spread, process = best
    return *_calibrated(choice, mean, spread, y[kept:]), process


def _calibrated(found: Choice, mean: Tensor, variance: Tensor, y: Tensor) -> tuple[Choice, Tensor]:
    """The spread and the temperature with which the mean and the variance of f at left-out rows predict best.

    And the entropy of these rows. The likelihood may have two maxima, much spread with a low temperature and little
    with one near 1: some rows look at the whole range, all of them at what lies around the best.
    """

    def at(spread: float, rows: slice) -> tuple[Choice, Tensor]:
        wide = (spread * variance[rows])[:, None].expand_as(mean[rows])
        pairs = zip(*(parts(each, numbers(mean.shape[1])) for each in (mean[rows], wide)), strict=True)
        log_probs = torch.cat([log_average(Latent(m[None], v[None])) for m, v in pairs])
        temperature = _temperature(log_probs, y[rows])
        log_probs = (log_probs / temperature).log_softmax(1)
        choice = replace(found, mnll=_mnll(log_probs, y[rows]), spread=spread, temperature=temperature)
        return choice, _entropy(log_probs)

    some = slice(0, COMPARED)
    best = SPREADS.index(min(SPREADS[::2], key=lambda spread: at(spread, some)[0].mnll or 0.0))
    around = [at(spread, slice(None)) for spread in SPREADS[max(best - 1, 0) : best + 2]]
    least = min(choice.mnll or 0.0 for choice, _ in around)
    return next(each for each in around if (each[0].mnll or 0.0) <= (1 + CLEARLY) * least)  # the largest of the best


def _temperature(log_probs: Tensor, y: Tensor) -> float:
    """That of the left-out rows, within limits, and drawn to 1 where they are few."""
    found = min(max(Temperature.fit(log_probs, y).temperature, COLDEST), HOTTEST)
    return math.exp(math.log(found) * len(y) / (len(y) + PRIOR_ROWS))


def _entropy(log_probs: Tensor) -> Tensor:
    return torch.special.entr(log_probs.exp()).sum(1)


def _mnll(log_probs: Tensor, y: Tensor) -> float:
    return -log_probs.gather(1, y[:, None]).double().mean().item()
