"""Calibration after training: what a hold-out says of probabilities, turned into a map log-probabilities → same.

Every calibrator is a frozen value that `fit` finds on held-out predictions and `apply` uses on any others. It acts on
the *averaged* log-probabilities of a predictive, log p̄(y | x), so that it serves every method alike. Everything is
computed in float64; log-probabilities below −1000 count as −1000, so that all that comes out is finite.

>>> import torch
>>> log_probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.1, 0.9]]).log()  # 90 % sure, half of them right
>>> calibrator = Temperature.fit(log_probs, torch.tensor([0, 1, 0, 1]))
>>> calibrator.apply(log_probs).exp().amax(1).round(decimals=2)
tensor([0.5300, 0.5300, 0.5300, 0.5300])
>>> calibrator.warning
'T = 20 is the edge of its range [0.05, 20]: on the hold-out, confidence says next to nothing about being right.'
"""

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from calgp.errors import CalgpError, short_repr
from calgp.json_values import Json
from calgp.posthoc.checks import check_choice, check_labels, normalised

LOWEST = -1000.0  # log-probabilities below are clamped to it
LOWEST_T, UNTOLD_T, HIGHEST_T = 0.05, 1.0, 20.0  # the edges; and where a hold-out says nothing of it
HALVINGS = 60  # of the bracket: beyond the precision of a float64
STEPS = 500  # of L-BFGS, at most


class Calibrator(ABC):
    """A map of log-probabilities [N, Q], found on held-out ones. Subclasses are frozen dataclasses of plain numbers."""

    summary: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, log_probs: Tensor, y: Tensor) -> "Calibrator":
        """The calibrator of held-out log-probabilities [N, Q] and their labels [N]."""

    def apply(self, log_probs: Tensor) -> Tensor:
        """Calibrated log-probabilities, in the floating type and on the device of those given."""
        return self.transform(_checked(log_probs, self.classes)).to(log_probs)

    @abstractmethod
    def transform(self, log_p: Tensor) -> Tensor:
        """The map itself, on log-probabilities in float64 of at least −1000 each: operations of torch and no checks, so
        that it can be traced and exported."""

    @property
    def classes(self) -> int | None:
        """How many it is for; None for any number."""
        first = dataclasses.astuple(self)[0]  # type: ignore[call-overload]
        return len(first) if isinstance(first, tuple) else None

    @property
    def warning(self) -> str | None:
        """What there is to know of the fit before it is trusted; None if nothing."""
        return None


class Prior(NamedTuple):
    """1/T ~ N(mean, spread²): what is believed of a temperature before the hold-out is seen; by default nothing."""

    mean: float = 1.0
    spread: float = math.inf


FLAT = Prior()


@dataclass(frozen=True)
class Temperature(Calibrator):
    """p ∝ p̄^β with β = 1/T (Guo et al. 2017; for a network without masks p̄ is its softmax): labels stay as they are.

    The negative log-likelihood is convex in β: its slope is bisected over T in [0.05, 20], so that the fit can neither
    diverge nor become negative, and ends at an edge if it must. A hold-out without a mistake has its optimum at T = 0,
    certainty of everything: without a prior T then stays 1.

    A small hold-out says little, and the best T for it can be far off. If it is known what such classifiers need, that
    is a prior, and the fit is the most probable T given both:

    >>> log_probs = torch.tensor([[0.9, 0.1]] * 10).log()  # 90 % sure, 7 of 10 right
    >>> y = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    >>> round(Temperature.fit(log_probs, y).temperature, 2)
    2.59
    >>> round(Temperature.fit(log_probs, y, Prior(1.0, 0.2)).temperature, 2)
    1.17
    """

    summary: ClassVar[str] = "one temperature: p ∝ p̄^(1/T)"

    temperature: float

    def __post_init__(self) -> None:
        if not LOWEST_T <= self.temperature <= HIGHEST_T:
            raise CalgpError(f"Invalid temperature={self.temperature}: must be from {LOWEST_T:g} to {HIGHEST_T:g}.")

    @classmethod
    def fit(cls, log_probs: Tensor, y: Tensor, prior: Prior = FLAT) -> "Temperature":
        log_p, y = _held_out(log_probs, y)

        def slope(beta: float) -> float:
            # d/dβ of −mean log p^β_y: the mean of E_{p^β}[log p̄] − log p̄_y, which grows with β; and of the prior
            expected = ((beta * log_p).softmax(1) * log_p).sum(1)
            found = (expected - log_p.gather(1, y[:, None]).squeeze(1)).mean().item()
            return found + (beta - prior.mean) / (len(y) * prior.spread**2)

        uniform = (log_p.amax(1) - log_p.amin(1)).amax() < 1e-6  # whatever the temperature
        faultless = log_p.gather(1, y[:, None]).equal(log_p.amax(1, keepdim=True))
        if uniform or (faultless and prior == FLAT):
            return cls(UNTOLD_T)
        if slope(1 / LOWEST_T) <= 0:
            return cls(LOWEST_T)
        if slope(1 / HIGHEST_T) >= 0:
            return cls(HIGHEST_T)
        # a positive slope in β: too sharp, T must be larger
        return cls(bisect(math.log(LOWEST_T), math.log(HIGHEST_T), lambda log_t: slope(math.exp(-log_t)) > 0))

    def transform(self, log_p: Tensor) -> Tensor:
        return (log_p / self.temperature).log_softmax(-1)

    @property
    def warning(self) -> str | None:
        edge = f"T = {self.temperature:g} is the edge of its range [{LOWEST_T:g}, {HIGHEST_T:g}]: "
        reasons = {
            LOWEST_T: edge + "the hold-out has almost no mistake to learn from; more held-out images would tell.",
            HIGHEST_T: edge + "on the hold-out, confidence says next to nothing about being right.",
            UNTOLD_T: "T stays 1: the hold-out has no mistake to learn from, or its predictions are all uniform; more "
            "held-out images would tell.",
        }
        return reasons.get(self.temperature)


def bisect(low: float, high: float, is_below: Callable[[float], bool]) -> float:
    """e^x for the x in [low, high] up to which `is_below` holds, as exact as a float64.

    >>> round(bisect(0.0, 3.0, lambda x: math.exp(x) < 5), 9)
    5.0
    """
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class VectorScaling(Calibrator):
    """p_q ∝ exp(w_q log p̄_q + b_q): a scale and a bias for each class (Guo et al. 2017), which may change labels.

    Minimises the negative log-likelihood of the hold-out plus ½ Σ (w_q − 1)² + ½ Σ b_q², which is convex and, by the
    second part, has a minimum whatever the hold-out: as if w and b had been N(1, 1) and N(0, 1) before it was seen.
    L-BFGS, 500 steps at most.
    """

    summary: ClassVar[str] = "a scale and a bias for each class"

    scale: tuple[float, ...]
    bias: tuple[float, ...]
    gradient: float  # the largest entry at the end, per image: near 0 where the fit has converged

    @classmethod
    def fit(cls, log_probs: Tensor, y: Tensor) -> "VectorScaling":
        log_p, y = _held_out(log_probs, y)
        start = torch.stack([torch.ones_like(log_p[0]), torch.zeros_like(log_p[0])])
        parameters = start.clone().requires_grad_()
        optimiser = torch.optim.LBFGS(
            [parameters], max_iter=STEPS, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimiser.zero_grad()
            scale, bias = parameters
            nll = torch.nn.functional.cross_entropy(scale * log_p + bias, y, reduction="sum")
            value = (nll + (parameters - start).square().sum() / 2) / len(y)
            value.backward()
            return value

        with torch.enable_grad():
            optimiser.step(loss)  # type: ignore[arg-type]
            loss()
        assert parameters.grad is not None  # noqa: S101 (for the type checker)
        scale, bias = parameters.detach().tolist()
        return cls(tuple(scale), tuple(bias), parameters.grad.abs().amax().item())

    def transform(self, log_p: Tensor) -> Tensor:
        scale, bias = (log_p.new_tensor(values) for values in (self.scale, self.bias))
        return (scale * log_p + bias).log_softmax(-1)

    @property
    def warning(self) -> str | None:
        if self.gradient > 1e-4:
            return f"The fit stopped before it converged (gradient {self.gradient:.1e} an image); trust it less."
        return None


class OneVsRest(Calibrator):
    """Each class against the rest; of those that are `absent` nothing could be learned."""

    absent: tuple[int, ...]

    @property
    def warning(self) -> str | None:
        if not self.absent:
            return None
        classes = ", ".join(map(str, self.absent))
        return f"The hold-out tells nothing of class {classes} (counted from 0): left as it was."


@dataclass(frozen=True)
class Platt(OneVsRest):
    """Each class against the rest: σ(a_q s_q + b_q) of its log-odds s_q, then normalised (Platt 1999, Zadrozny 2002).

    The logistic regressions are scikit-learn's (L2 with C = 1 on a_q, lbfgs); log-odds beyond ±100 count as ±100. A
    class that the hold-out does not have, or has alone, keeps its probability.
    """

    summary: ClassVar[str] = "a logistic regression for each class against the rest, normalised"

    slope: tuple[float, ...]
    intercept: tuple[float, ...]
    absent: tuple[int, ...]

    @classmethod
    def fit(cls, log_probs: Tensor, y: Tensor) -> "Platt":
        from sklearn.linear_model import LogisticRegression

        log_p, y = _held_out(log_probs, y)
        odds, labels = _log_odds(log_p).cpu().numpy(), y.cpu().numpy()
        slope, intercept, absent = [1.0] * log_p.shape[1], [0.0] * log_p.shape[1], []
        for q in range(log_p.shape[1]):
            if len(np.unique(labels == q)) < 2:
                absent.append(q)
                continue
            found = LogisticRegression(C=1.0, max_iter=1000).fit(odds[:, [q]], labels == q)
            slope[q], intercept[q] = float(found.coef_[0, 0]), float(found.intercept_[0])
        return cls(tuple(slope), tuple(intercept), tuple(absent))

    def transform(self, log_p: Tensor) -> Tensor:
        odds = _log_odds(log_p)
        slope, intercept = (odds.new_tensor(values) for values in (self.slope, self.intercept))
        return torch.nn.functional.logsigmoid(slope * odds + intercept).log_softmax(-1)


def _log_odds(log_p: Tensor) -> Tensor:
    """log p_q − log(1 − p_q). Of the most probable class, 1 − p is summed over the others: it may be 1 − p = 10⁻³⁰."""
    top = log_p.argmax(1, keepdim=True)
    others = log_p.scatter(1, top, -math.inf).logsumexp(1, keepdim=True)
    rest = torch.log1p(-log_p.exp().clamp_max(0.5)).scatter(1, top, others)  # no other class has more than ½
    return (log_p - rest).clamp(-100, 100)


@dataclass(frozen=True)
class Isotonic(OneVsRest):
    """Each class against the rest: a monotone step of its probability, then normalised (Zadrozny & Elkan 2002).

    The regressions are scikit-learn's (linear between their knots). They say 0 where the hold-out never saw the class,
    for which the MNLL would be infinite: values are clipped to at least 1/(N Q), one image spread over the classes. A
    class that the hold-out does not have, or has alone, keeps its probability.
    """

    summary: ClassVar[str] = "a monotone regression for each class against the rest, normalised"

    knots: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]
    floor: float
    absent: tuple[int, ...]

    def __post_init__(self) -> None:
        if [len(knots) for knots in self.knots] != [len(values) for values in self.values]:
            raise CalgpError("every knot needs a value")

    @classmethod
    def fit(cls, log_probs: Tensor, y: Tensor) -> "Isotonic":
        from sklearn.isotonic import IsotonicRegression

        log_p, y = _held_out(log_probs, y)
        probs, labels = log_p.exp().cpu().numpy(), y.cpu().numpy()
        n, classes = probs.shape
        knots, values, absent = [(0.0, 1.0)] * classes, [(0.0, 1.0)] * classes, []
        for q in range(classes):
            if len(np.unique(labels == q)) < 2:
                absent.append(q)
                continue
            found = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(probs[:, q], labels == q)
            knots[q], values[q] = tuple(found.X_thresholds_.tolist()), tuple(found.y_thresholds_.tolist())
        return cls(tuple(knots), tuple(values), 1 / (n * classes), tuple(absent))

    def transform(self, log_p: Tensor) -> Tensor:
        probs = log_p.exp().unbind(-1)
        columns = [_interpolated(p, *pair) for p, *pair in zip(probs, self.knots, self.values, strict=True)]
        return torch.stack(columns, -1).clamp_min(self.floor).log().log_softmax(-1)


def _interpolated(p: Tensor, knots: tuple[float, ...], values: tuple[float, ...]) -> Tensor:
    """numpy.interp by operations that can be traced: the first value, and what each piece up to p adds to it."""
    x, y = p.new_tensor(knots), p.new_tensor(values)
    width, rise = x.diff(), y.diff()
    done = torch.minimum((p.unsqueeze(-1) - x[:-1]).clamp_min(0), width)  # how far p has come in each piece
    return y[0] + (done * (rise / width.clamp_min(1e-300))).sum(-1)


CALIBRATORS: dict[str, type[Calibrator]] = {
    "temperature": Temperature,
    "vector": VectorScaling,
    "platt": Platt,
    "isotonic": Isotonic,
}


def find(name: str) -> type[Calibrator]:
    """A calibrator by its name."""
    return CALIBRATORS[check_choice("calibrator", name, CALIBRATORS)]


def to_json(calibrator: Calibrator) -> dict[str, Json]:
    """The calibrator as plain data; `from_json` gives the same value back, to the bit."""
    name = next(name for name, kind in CALIBRATORS.items() if type(calibrator) is kind)
    return {"calibrator": name, **json.loads(json.dumps(vars(calibrator)))}  # tuples as lists


def from_json(data: Mapping[str, Json]) -> Calibrator:
    """The calibrator of plain data, checked."""
    if not isinstance(data, Mapping) or not isinstance(name := data.get("calibrator"), str):
        raise CalgpError(f"A calibrator is a table with its name under 'calibrator', not {short_repr(data)}.")
    kind = find(name)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    try:
        calibrator = kind(**{name: _numbers(data[name]) for name in names})
        probe = torch.full((1, calibrator.classes or 2), 0.0).log_softmax(-1)
        usable = bool(calibrator.apply(probe).isfinite().all())
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError, CalgpError) as error:  # and RecursionError
        raise CalgpError(f"The {data['calibrator']} calibrator is damaged ({str(error)[:200]}).") from None
    if not usable:
        raise CalgpError(f"The {data['calibrator']} calibrator is damaged (it gives no finite probabilities).")
    return calibrator


def _numbers(value: Any) -> Any:
    """JSON's lists as tuples; anything but numbers is refused."""
    if isinstance(value, list):
        return tuple(_numbers(each) for each in value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{short_repr(value)} is no finite number")
    return value


def _held_out(log_probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What a fit starts from, checked: log-probabilities in float64 and labels."""
    if log_probs.dim() != 2 or min(log_probs.shape) < 1 or y.shape != log_probs.shape[:1]:
        shapes = f"{list(log_probs.shape)} and {list(y.shape)}"
        raise CalgpError(f"A calibrator is fitted on log-probabilities [N, Q] and labels [N], not on {shapes}.")
    check_labels(y, log_probs.shape[1])
    return _checked(log_probs, log_probs.shape[1]), y.long()


def _checked(log_probs: Tensor, classes: int | None) -> Tensor:
    """Log-probabilities in float64, of as many classes as the calibrator knows (None: any)."""
    if classes is not None and (log_probs.dim() != 2 or log_probs.shape[1] != classes):
        raise CalgpError(f"The calibrator is for [N, {classes}] log-probabilities, not for {list(log_probs.shape)}.")
    return normalised(log_probs).clamp_min(LOWEST)
