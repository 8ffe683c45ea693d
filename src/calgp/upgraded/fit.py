"""`upgrade`: a classifier that is already trained keeps its labels and gets trustworthy probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from calgp.data import Images
from calgp.errors import CalgpError, name_error
from calgp.nets.last_layer import LastLayer
from calgp.posthoc import last_layer
from calgp.posthoc import outliers as outlier_scores
from calgp.posthoc.calibration import Temperature
from calgp.posthoc.decisions import Wanted
from calgp.posthoc.last_layer import MOST_TRIED, LastLayerPosterior, Structure, UncertaintyScaling, fit_last_layer
from calgp.posthoc.outliers import Combined, Entropy, MaximumProbability, Threshold
from calgp.runs.fit_decisions import fit_decisions
from calgp.runs.run_outliers import ONE_PASS
from calgp.upgraded.classifier import Upgrade, UpgradedClassifier, parts
from calgp.upgraded.fixed_mean import POSTERIORS, candidates
from calgp.upgraded.labelled_data import Collected, Data, collected

Uncertainty = Literal["laplace", "gp"]
ROWS = 500  # of a hold-out that choose a Gaussian process, however many classes there are


def upgrade(
    network: nn.Module,
    held_out: Data,
    *,
    train: Data | None = None,
    layer: str | None = None,
    classes: Sequence[object] | None = None,
    posterior: Uncertainty = "laplace",
    structure: Structure | None = None,
    outliers: str = "combined",
    false_alarm: float | None = 0.05,
    coverage: float | None = 0.9,
    sets: str = "aps",
    error: float | None = None,
    confidence: float | None = 0.95,
    share: float = 0.5,
    seed: int = 0,
) -> UpgradedClassifier:
    """A trained classifier with calibrated probabilities, their uncertainty, outlier scores and prediction sets.

    Its labels never change: all logits of an image are divided by one number. That number is a temperature times what
    the uncertainty of the last layer says about this image (`UncertaintyScaling`).

    >>> import torch, calgp
    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.randn(400, 2), torch.arange(400) % 2
    >>> x[:, 0] += 2 * y
    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))  # somebody has trained it
    >>> upgraded = calgp.upgrade(network, (x, y))
    >>> p = upgraded.predict(x[:3])
    >>> p.probs.shape, p.outlier_score.shape, p.sets.shape
    (torch.Size([3, 2]), torch.Size([3]), torch.Size([3, 2]))

    Args:
        network: gives logits of a last `nn.Linear`, or their (log-)softmax. It is neither copied nor changed.
        held_out: data that it was not trained on: (x, y), a loader or a data set of such pairs, or `calgp.data` images.
            x is what the network takes.
        train: what it was trained on. The posterior and the outlier score are fitted on it; without, on the
            hold-out, of which there is less: uncertainties are then larger.
        layer: the name of the last layer; None: it is found.
        classes: their names; None: those of `calgp.data` images, or 0, 1, …
        posterior: where uncertainty comes from: laplace, of the last layer's weights; gp, a Gaussian process on the
            features whose mean is the network, which needs `train`.
        structure: of Laplace's Hessian: full or kronecker; None: full up to 3,000 weights.
        outliers: the outlier score: combined (entropy, and unusual features), density, direction, neighbours, or
            another of `calgp.posthoc.outliers`.
        false_alarm: the share of ordinary images that may be called outliers; None: no threshold.
        coverage, sets: prediction sets that hold the true class so often, and their kind; None: no sets.
        error, confidence: abstain so that answers err at most so often; None: answer always.
        share: of the hold-out that chooses how much of the uncertainty counts; the rest is for thresholds and sets.
            The temperature is that of all of it.
        seed: of the split.
    """
    outlier_scores.find(outliers)
    _check_posterior(posterior, structure, train)
    if not 0 < share < 1:
        raise CalgpError(f"Invalid share={share:g}: must be a share between 0 and 1, such as 0.5.")
    last, held = collected(network, held_out, layer)
    names = _class_names(classes, held_out, held.f.shape[1])
    fitting, deciding = _parted(held, share, seed, decides=(false_alarm, coverage, error) != (None, None, None))
    trained = None if train is None else collected(network, train, last.name, keyed=False)[1]
    upgraded = _fitted(last, names, fitting, trained, posterior, structure, outliers, len(deciding.y))
    if not len(deciding.y):
        return upgraded
    predictive = upgraded.predictive(deciding.c, deciding.f)
    inside, decisions = upgraded.outlier.score(deciding.c, predictive), None
    if coverage is not None or error is not None:
        wanted = Wanted(error, confidence, coverage=coverage, sets=sets)
        decisions = fit_decisions(wanted, predictive, deciding.y, lambda: deciding.uniform, ONE_PASS, seed=seed)
    upgraded.fitted = replace(
        upgraded.fitted,
        threshold=None if false_alarm is None else Threshold.fit(inside, false_alarm=false_alarm),
        decisions=decisions,
    )
    upgraded.fitted = _scaled_by_all(upgraded, held)
    return upgraded


def _class_names(given: Sequence[object] | None, held_out: Data, count: int) -> tuple[str, ...]:
    if given is None:
        own = held_out.classes if isinstance(held_out, Images) else ()
        given = own if len(own) == count else range(count)
    if len(given) != count:
        raise CalgpError(f"{len(given)} classes are named; the network has {count}.")
    return tuple(map(str, given))


def _parted(held: Collected, share: float, seed: int, *, decides: bool) -> tuple[Collected, Collected]:
    """What the scaling is fitted on, and what thresholds and sets are."""
    order = torch.randperm(len(held.y), generator=torch.Generator().manual_seed(seed))
    fitting, deciding = (held.take(rows) for rows in order.tensor_split([max(1, round(share * len(held.y)))]))
    if decides and not len(deciding.y):
        raise CalgpError(f"share={share:g} leaves none of {len(held.y)} held-out images to decide on; hold out more.")
    return fitting, deciding


def _scaled_by_all(upgraded: UpgradedClassifier, held: Collected) -> Upgrade:
    """With temperatures of the whole hold-out; what was decided goes on reading those of its half, by a power."""
    fitted, logits = upgraded.fitted, held.f.double()
    scaling = UncertaintyScaling.with_trust(fitted.scaling.trust, logits, _variance(upgraded.posterior, held), held.y)
    alone, power = Temperature.fit(logits.log_softmax(1), held.y), scaling.temperature / fitted.scaling.temperature
    decisions = None if fitted.decisions is None else replace(fitted.decisions, power=power)
    return replace(
        fitted, scaling=scaling, temperature=alone.temperature, warning=alone.warning, fitted=len(held.y), power=power,
        decisions=decisions,
    )  # fmt: skip


def _variance(posterior: LastLayerPosterior, data: Collected) -> Tensor:
    """Of the log-odds of each label, [N]."""
    found = [last_layer.log_odds_variance(f, posterior.logit_covariance(c)) for c, f in parts(data.c, data.f)]
    return torch.cat(found).double()


def _check_posterior(posterior: str, structure: str | None, train: Data | None) -> None:
    if posterior not in get_args(Uncertainty):
        raise name_error("There is no posterior", posterior, get_args(Uncertainty))
    if posterior == "gp" and structure is not None:
        raise CalgpError(f"Invalid structure={structure!r}: it is of Laplace's Hessian; leave it out with a gp.")
    if posterior == "gp" and train is None:
        raise CalgpError("posterior='gp' needs the data that the network was trained on: give train as well.")


def _fixed_mean_gp(c: Tensor, f: Tensor, fitting: Collected) -> LastLayerPosterior:
    """Of all lengthscales and variances, those that give held-out labels the largest likelihood, as ρ is found."""
    some = fitting.take(torch.arange(min(len(fitting.y), max(ROWS, MOST_TRIED // 10 // f.shape[1]))))

    def loss(posterior: LastLayerPosterior) -> float:
        logits, variance = some.f.double(), _variance(posterior, some)
        log_p = UncertaintyScaling.fit(logits, variance, some.y).apply(logits, variance)
        return -log_p.gather(1, some.y[:, None]).mean().item()

    return min(candidates(c, f), key=loss)


def _fitted(
    last: LastLayer, names: tuple[str, ...], fitting: Collected, trained: Collected | None,
    uncertainty: Uncertainty, structure: Structure | None, outliers: str, decided: int,
) -> UpgradedClassifier:  # fmt: skip
    """Posterior, scaling and outlier score: by the training data, or else by what the scaling is fitted on."""
    seen = fitting if trained is None else trained
    alone = Temperature.fit(fitting.f.double().log_softmax(1), fitting.y)
    if uncertainty == "gp":
        posterior = _fixed_mean_gp(seen.c, seen.f / alone.temperature, fitting)
    else:
        bias = None if last.bias is None else last.bias.cpu()
        posterior = fit_last_layer(seen.c, seen.y, last.weight.cpu(), bias, structure=structure)
    scaling = UncertaintyScaling.fit(fitting.f.double(), _variance(posterior, fitting), fitting.y)
    kind = next(name for name, each in POSTERIORS.items() if isinstance(posterior, each))
    found = Upgrade(
        last.name, names, kind, posterior.numbers(), scaling, alone.temperature, outliers, {}, None, None,
        len(seen.y), len(fitting.y), decided, alone.warning, fitting.shape,
    )  # fmt: skip
    upgraded = UpgradedClassifier(last, found, posterior, MaximumProbability())
    if outliers == Combined.name:
        entropy = Entropy().score(None, upgraded.predictive(fitting.c, fitting.f))
        upgraded.outlier = Combined.of(seen.c, seen.y, entropy, None if trained is None else fitting.c)
    else:
        upgraded.outlier = outlier_scores.find(outliers).fit(seen.c, seen.y)
    upgraded.fitted = replace(found, settings=upgraded.outlier.settings())
    return upgraded
