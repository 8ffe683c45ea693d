"""`upgrade`: a classifier that is already trained keeps its labels and gets trustworthy probabilities."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from calgp import metrics
from calgp.data import Images
from calgp.data.images import to_unit_interval
from calgp.errors import CalgpError
from calgp.gp import Latent, Noise, Passes, Predictive
from calgp.metrics import OutOfDistribution, Scores
from calgp.nets.last_layer import LastLayer
from calgp.posthoc import outliers as outlier_scores
from calgp.posthoc.calibration import Temperature
from calgp.posthoc.decisions import PredictionSets, Selection, keyed_uniform, uncertainty
from calgp.posthoc.last_layer import (
    POSTERIORS,
    LastLayerPosterior,
    Structure,
    UncertaintyScaling,
    fit_last_layer,
    log_odds_variance,
    posterior_from,
)
from calgp.posthoc.outliers import Combined, Density, MaximumProbability, OutlierScore, Threshold, left_out_density
from calgp.runs.classifier import Prediction
from calgp.runs.decision_metrics import add_outcomes, decision_metrics
from calgp.runs.evaluation import columns_of
from calgp.runs.folder import in_order
from calgp.runs.reading import digest, read_header, read_tensors, wrap_read_errors
from calgp.runs.record import Count, Text, Whole, parse, to_json
from calgp.runs.results import DecisionMetrics, FittedDecisions
from calgp.runs.writing import wrap_os_errors, write_whole

Data: TypeAlias = tuple[Tensor, Tensor] | Iterable[Any] | Images  # (x, y), a loader or data set of such, or images
BATCH = 256
NUMBERS = 2**24  # of covariances that are there at a time
DRAWS, DRAWS_OF_MANY = 256, 64  # of the logits; of more than 100 classes


@dataclass(frozen=True)
class Upgrade:
    """What was fitted, but for tensors.

    layer: the network's last. structure, numbers: of Laplace's posterior. scaling: from logits and their variance to
    probabilities. temperature: of the logits alone, to compare with. outlier, settings: the score of features.
    threshold: of that score. decisions: prediction sets, and when to abstain. train, fitted, decided: how many images
    the posterior and the outlier score, the scaling, and the decisions were fitted on. warning: what to know of the
    temperature before it is trusted.
    """

    layer: Text
    classes: tuple[Text, ...]
    structure: Text
    numbers: dict[str, float]
    scaling: UncertaintyScaling
    temperature: float
    outlier: Text
    settings: dict[str, Any]
    threshold: Threshold | None
    decisions: FittedDecisions | None
    train: Count
    fitted: Count
    decided: Whole
    warning: Text | None = None
    format: Literal[1] = 1


@dataclass(frozen=True)
class UpgradedEvaluation:
    """How good probabilities are before and after.

    scores: of the upgraded classifier; `temperature_alone`: of the network with a temperature that was fitted on the
    same images; `before`: of the network as it is. decisions: what they did. ood: how well each score tells images from
    `outside` from these; `network-confidence` is the maximum probability of the network as it is.
    """

    n: int
    scores: Scores
    temperature_alone: Scores
    before: Scores
    decisions: DecisionMetrics | None
    ood: dict[str, OutOfDistribution]


def upgrade(
    network: nn.Module,
    held_out: Data,
    *,
    train: Data | None = None,
    layer: str | None = None,
    classes: Sequence[str] | None = None,
    structure: Structure | None = None,
    outliers: str = "combined",
    false_alarm: float | None = 0.05,
    coverage: float | None = 0.9,
    sets: str = "aps",
    error: float | None = None,
    confidence: float | None = 0.95,
    share: float = 0.5,
    seed: int = 0,
) -> "UpgradedClassifier":
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
        train: what it was trained on. Laplace's posterior and the outlier score are fitted on it; without, on the
            hold-out, of which there is less: uncertainties are then larger.
        layer: the name of the last layer; None: it is found.
        classes: their names; None: 0, 1, …
        structure: of Laplace's Hessian: full or kronecker; None: full up to 3,000 weights.
        outliers: the outlier score: combined (density of the features and confidence), density, neighbours, or another
            of `calgp.posthoc.outliers`.
        false_alarm: the share of ordinary images that may be called outliers; None: no threshold.
        coverage, sets: prediction sets that hold the true class so often, and their kind; None: no sets.
        error, confidence: abstain so that answers err at most so often; None: answer always.
        share: of the hold-out that the scaling is fitted on; the rest is for thresholds and sets.
        seed: of the split.
    """
    outlier_scores.find(outliers)
    if not 0 < share < 1:
        raise CalgpError(f"Invalid share={share:g}: must be a share between 0 and 1, such as 0.5.")
    last, (c, f, y, uniform) = _collected(network, held_out, layer)
    names = tuple(map(str, range(f.shape[1]) if classes is None else classes))
    if len(names) != f.shape[1]:
        raise CalgpError(f"{len(names)} classes are named; the network has {f.shape[1]}.")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    fitted, decided = order.tensor_split([max(1, round(share * len(y)))])
    seen, labels = c[fitted], y[fitted]
    if train is not None:
        seen, _, labels, _ = _collected(network, train, last.name, keyed=False)[1]
    posterior = fit_last_layer(seen, labels, last.weight.cpu(), _cpu(last.bias), structure=structure)
    variance = [log_odds_variance(f_, posterior.logit_covariance(c_)) for c_, f_ in _parts(c[fitted], f[fitted])]
    scaling = UncertaintyScaling.fit(f[fitted].double(), torch.cat(variance).double(), y[fitted])
    alone = Temperature.fit(f[fitted].double().log_softmax(1), y[fitted])
    found = Upgrade(
        last.name, names, _structure(posterior), posterior.numbers(), scaling, alone.temperature, outliers, {}, None,
        None, len(labels), len(fitted), len(decided), alone.warning,
    )  # fmt: skip
    upgraded = UpgradedClassifier(last, found, posterior, MaximumProbability())
    if outliers == Combined.name:
        unsure = MaximumProbability().score(None, upgraded._predictive(c[fitted], f[fitted]))
        outlier: OutlierScore = _combined(seen, labels, unsure, None if train is None else c[fitted])
    else:
        outlier = outlier_scores.find(outliers).fit(seen, labels)
    found = replace(found, settings=outlier.settings())
    upgraded.fitted, upgraded.outlier = found, outlier
    predictive = upgraded._predictive(c[decided], f[decided]) if len(decided) else None
    if predictive is None and (false_alarm, coverage, error) != (None, None, None):
        raise CalgpError(f"A share of {share:g} leaves none of {len(y)} held-out images for thresholds and sets.")
    if predictive is not None:
        inside = outlier.score(c[decided], predictive)
        upgraded.fitted = replace(
            found,
            threshold=None if false_alarm is None else Threshold.fit(inside, false_alarm=false_alarm),
            decisions=_decisions(predictive, y[decided], uniform[decided], coverage, sets, error, confidence, seed),
        )
    return upgraded


class UpgradedClassifier:
    """What `upgrade` makes. It has the methods of a `Classifier`; it has no run folder, since nothing was trained here.

    fitted: what was found. posterior: Laplace's, of the last layer. outlier: the score of features.
    """

    def __init__(
        self, network: LastLayer, fitted: Upgrade, posterior: LastLayerPosterior, outlier: OutlierScore
    ) -> None:
        self.network, self.fitted, self.posterior, self.outlier = network, fitted, posterior, outlier

    @property
    def classes(self) -> tuple[str, ...]:
        return self.fitted.classes

    def predict(self, x: Tensor) -> Prediction:
        """What inputs show, and how certain that is: x is what the network takes, [N, …]."""
        if not isinstance(x, Tensor) or x.dim() < 2 or not len(x):
            raise CalgpError("Give inputs as a tensor [N, …], as the network takes them.")
        found = [(part, *self.network(part)) for part in x.split(BATCH)]
        c, f = (torch.cat([part[place].cpu() for part in found]) for place in (1, 2))
        predictive, decisions = self._predictive(c, f), self.fitted.decisions
        score = self.outlier.score(c, predictive)
        decided = {} if decisions is None else _decided(decisions, predictive, keyed_uniform(x))
        return Prediction(
            None, self.classes, predictive, Passes(1, "moments"), decided.get("abstained"), decided.get("sets"), score,
            None if self.fitted.threshold is None else self.fitted.threshold.flags(score),
        )  # fmt: skip

    def evaluate(self, data: Data, *, outside: Data | None = None) -> UpgradedEvaluation:
        """Scores on labelled data that nothing was fitted on, beside those of the network without the upgrade.

        With `outside` (its labels do not count, and may be left out), also how well outliers are told from `data`.
        """
        _, (c, f, y, uniform) = _collected(self.network.network, data, self.network.name)
        predictive = self._predictive(c, f)
        plain = f.double().log_softmax(1)
        sets: dict[str, Tensor] = {}
        if self.fitted.decisions is not None:
            sets = _decided(self.fitted.decisions, predictive, uniform)
            sets = add_outcomes(sets, y, outside=False)
        columns = columns_of(predictive) | sets | {"y": y}
        return UpgradedEvaluation(
            len(y),
            _scores(predictive.log_probs, y),
            _scores((f.double() / self.fitted.temperature).log_softmax(1), y),
            _scores(plain, y),
            self.fitted.decisions
            and decision_metrics(self.fitted.decisions, columns, len(self.classes), outside=False),
            {} if outside is None else self._detection(c, f, outside),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all but the network into one safetensors file; `load` needs the network again."""
        tensors = {"weight": self.network.weight, "bias": self.network.bias}
        tensors = {name: value for name, value in tensors.items() if value is not None}
        tensors |= {f"posterior.{name}": value for name, value in self.posterior.tensors().items()}
        tensors |= {f"outlier.{name}": value for name, value in self.outlier.tensors().items()}
        tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        described = {"calgp": json.dumps(to_json(self.fitted)), "sha256": digest(tensors)}
        with wrap_os_errors(Path(path)):
            write_whole(Path(path), in_order(save(tensors, described)))

    @staticmethod
    def load(path: str | os.PathLike[str], network: nn.Module) -> "UpgradedClassifier":
        """What `save` wrote, with the network that it was written for."""
        header = read_header(Path(path))
        with wrap_read_errors(Path(path)):
            fitted = parse(Upgrade, header.metadata)
        tensors = read_tensors(Path(path), header)
        last = LastLayer(network, fitted.layer)
        for name, mine in (("weight", last.weight), ("bias", last.bias)):
            if (mine is None) != (name not in tensors) or (
                mine is not None and not torch.equal(mine.cpu(), tensors[name])
            ):
                raise CalgpError(
                    f"{path} was saved for another network: the {name} of its last layer {last.name!r} is another. "
                    "Load the weights that it was saved with, or upgrade this network."
                )
        parts = {
            kind: {name.removeprefix(kind): each.clone() for name, each in tensors.items() if name.startswith(kind)}
            for kind in ("posterior.", "outlier.")
        }
        with wrap_read_errors(Path(path)):
            posterior = posterior_from(fitted.structure, fitted.numbers, parts["posterior."])
            outlier = outlier_scores.from_state(fitted.outlier, fitted.settings, parts["outlier."])
        return UpgradedClassifier(last, fitted, posterior, outlier)

    def _predictive(self, c: Tensor, f: Tensor) -> Predictive:
        """Probabilities by the scaling; expected entropy, mutual information and spread by draws of the logits."""
        return Predictive.cat([self._part(*part) for part in _parts(c, f)])

    def _part(self, c: Tensor, f: Tensor) -> Predictive:
        covariance = self.posterior.logit_covariance(c)
        draws = DRAWS if f.shape[1] <= 100 else DRAWS_OF_MANY
        noise = Noise(0, torch.zeros(1, dtype=torch.long), torch.arange(len(f)), draws=draws)
        points = Latent(f[None], covariance=covariance.to(f)[None]).points(draws, noise)
        # in double precision: logits that differ stay in their order
        log_probs = self.fitted.scaling.apply(f.double(), log_odds_variance(f, covariance).double())
        drawn = Predictive.of(points.double().log_softmax(-1)).calibrated(log_probs)
        return replace(drawn, latent_variance=covariance.diagonal(dim1=1, dim2=2).mean(1))

    def _detection(self, c: Tensor, f: Tensor, outside: Data) -> dict[str, OutOfDistribution]:
        parts = [self.network(x) for x, _ in _batches(outside)]
        other = [torch.cat([part[place].cpu() for part in parts]) for place in (0, 1)]
        found = []
        for features, logits in ((c, f), other):
            predictive = self._predictive(features, logits)
            read = {name: kind() for name, kind in outlier_scores.OUTLIER_SCORES.items() if not kind.reads_features}
            columns = {name: each.score(None, predictive) for name, each in read.items()}
            columns["network-confidence"] = 1 - logits.double().softmax(1).amax(1)
            found.append(columns | {self.fitted.outlier: self.outlier.score(features, predictive)})
        return {name: metrics.ood(found[0][name], found[1][name]) for name in found[0]}


def _combined(seen: Tensor, labels: Tensor, unsure: Tensor, unseen: Tensor | None) -> Combined:
    """Of training features `seen`; `unseen` ones say what is ordinary, or else leaving some of `seen` out in turn."""
    density = Density.fit(seen, labels)
    if unseen is not None:
        return Combined.of(density, unsure, density.score(unseen))
    return Combined.of(density, unsure, left_out_density(seen, labels))


def _parts(c: Tensor, f: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and logits of so many rows that their covariances over classes fit."""
    size = min(BATCH, max(1, NUMBERS // f.shape[1] ** 2))
    return zip(c.split(size), f.split(size), strict=True)


def _collected(
    network: nn.Module, data: Data, layer: str | None, *, keyed: bool = True
) -> tuple[LastLayer, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Features, logits, labels and uniform numbers (for randomised sets; 0 if not `keyed`) of all data, on the CPU."""
    last, parts = None, []
    for x, y in _batches(data):
        if last is None:
            last = LastLayer.find(network, x, layer)
        if not isinstance(y, Tensor) or y.shape != x.shape[:1] or y.is_floating_point():
            raise CalgpError(f"Data must have a whole number as the label of each input; there are {_described(y)}.")
        c, f = last(x)
        low, high = (int(end) for end in y.aminmax())
        if low < 0 or high >= f.shape[1]:
            raise CalgpError(f"Labels must lie in 0 … {f.shape[1] - 1}; these run from {low} to {high}.")
        parts.append((c.cpu(), f.cpu(), y.cpu().long(), keyed_uniform(x) if keyed else torch.zeros(len(y))))
    if last is None:
        raise CalgpError("There are no data to fit or measure on.")
    c, f, y, uniform = (torch.cat(column) for column in zip(*parts, strict=True))
    return last, (c, f, y, uniform)


def _batches(data: Data) -> Iterator[tuple[Tensor, Any]]:
    """Inputs and labels, batch by batch, of whatever was given; no labels are None."""
    if isinstance(data, Images):
        for part, pixels in data.read(data.parts(BATCH)):
            yield to_unit_interval(pixels), data.y[part]
        return
    if isinstance(data, Tensor):
        yield from ((x, None) for x in data.split(BATCH))
        return
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
        if len(x) != len(y):
            raise CalgpError(f"There are {len(x)} inputs and {len(y)} labels.")
        yield from zip(x.split(BATCH), y.split(BATCH), strict=True)
        return
    for batch in DataLoader(data, BATCH) if isinstance(data, Dataset) else data:
        if isinstance(batch, Tensor):
            yield batch, None
        elif isinstance(batch, tuple | list) and len(batch) >= 2 and isinstance(batch[0], Tensor):
            yield batch[0], batch[1]
        else:
            raise CalgpError(f"A batch must be (inputs, labels), both tensors; there is {_described(batch)}.")


def _decisions(
    predictive: Predictive, y: Tensor, uniform: Tensor, coverage: float | None, sets: str, error: float | None,
    confidence: float | None, seed: int,
) -> FittedDecisions | None:  # fmt: skip
    if coverage is None and error is None:
        return None
    selection = None
    if error is not None:
        wrong = predictive.labels != y
        selection = Selection.fit(uncertainty(columns_of(predictive)), wrong, error=error, confidence=confidence)
    found = None
    if coverage is not None:
        found = PredictionSets.fit(predictive.log_probs, y, coverage=coverage, kind=sets, uniform=uniform)
    told = None if selection is None else selection.warning
    return FittedDecisions(selection, found, n=len(y), samples=1, engine="moments", seed=seed, warning=told)


def _decided(decisions: FittedDecisions, predictive: Predictive, uniform: Tensor) -> dict[str, Tensor]:
    found = {}
    if decisions.selection is not None:
        found["abstained"] = decisions.selection.abstains(
            uncertainty(columns_of(predictive), decisions.selection.score)
        )
    if decisions.sets is not None:
        found["sets"] = decisions.sets.apply(predictive.log_probs, uniform)
    return found


def _scores(log_probs: Tensor, y: Tensor) -> Scores:
    return metrics.scores(metrics.outcomes(log_probs, y))


def _structure(posterior: LastLayerPosterior) -> str:
    return next(name for name, kind in POSTERIORS.items() if isinstance(posterior, kind))


def _cpu(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu()


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
