"""The paper's claims, judged: pure functions from rows to held, not held or undecided, each with its intervals."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, variance
from typing import Literal

from .rows import PAPER, Row, student

State = Literal["held", "not held", "undecided"]
Rows = Sequence[Row]
Judge = Callable[[Rows], "Verdict"]
ALIKE = 0.2  # two numbers are alike if they differ by less than this share of the larger one …
FLOOR = 0.005  # … or by less than this


@dataclass(frozen=True)
class Part:
    """One comparison: a difference with half its 95 % interval (None: of a single run without one).

    panel, metric: where it was made, and of what. against: how far it is on the other side of the claim; below 0 on
    the claim's own.
    """

    what: str
    panel: str
    metric: str
    difference: float
    half: float | None
    against: float

    @property
    def state(self) -> State:
        if self.half is None or abs(self.against) <= self.half:
            return "undecided"
        return "held" if self.against < 0 else "not held"

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.difference - self.half, self.difference + self.half)

    @property
    def told(self) -> str:
        ends = self.interval
        told = "no interval" if ends is None else f"{ends[0]:.4f} … {ends[1]:.4f}"
        return f"{self.difference:.4f} ({told})".replace("-", "−")


@dataclass(frozen=True)
class Verdict:
    """A claim with the comparisons that it stands on: held if all hold, not held if one is against it.

    Of many comparisons some are against a true claim by chance, so one that refutes it alone must stand against it by
    the wider interval that has 95 % for all of them together (Bonferroni).
    """

    claim: str
    parts: tuple[Part, ...]

    @property
    def state(self) -> State:
        wider = widening(len(self.parts))
        if any(part.half is not None and part.against > wider * part.half for part in self.parts):
            return "not held"
        return "held" if {part.state for part in self.parts} == {"held"} else "undecided"

    def count(self, panel: str | None = None, metric: str | None = None) -> Counter[State]:
        """How many comparisons went how; of one panel or one metric alone."""
        chosen = (part for part in self.parts if panel in (None, part.panel) and metric in (None, part.metric))
        return Counter(part.state for part in chosen)

    @property
    def told(self) -> str:
        """How the comparisons went."""
        if not self.parts:
            return "not run"
        if len(self.parts) == 1:
            return f"{self.parts[0].what}: {self.parts[0].told}"
        count = self.count()
        counts = f"{count['held']} for it, {count['not held']} against, {count['undecided']} undecided"
        worst = max(
            self.parts, key=lambda part: (part.state == "not held", part.state == "undecided", abs(part.difference))
        )
        return f"of {len(self.parts)} comparisons {counts}; the least for it: {worst.what}: {worst.told}"


def widening(comparisons: int) -> float:
    """How much wider an interval must be to hold for so many comparisons at once: Bonferroni, by normal quantiles.

    >>> round(widening(1), 3), round(widening(40), 3)
    (1.0, 1.647)
    """
    normal = NormalDist()
    return normal.inv_cdf(1 - 0.025 / max(comparisons, 1)) / normal.inv_cdf(0.975)


def difference(a: Row, b: Row, metric: str) -> tuple[float, float | None] | None:
    """a − b with half its 95 % interval: pooled Student's t over seeds, or the test set's chance, if that is larger."""
    first, second = a.values.get(metric, ()), b.values.get(metric, ())
    if not first or not second:
        return None
    found = sum(first) / len(first) - sum(second) / len(second)
    known = []
    freedom = len(first) + len(second) - 2
    if freedom:
        squares = sum((len(values) - 1) * variance(values) for values in (first, second) if len(values) > 1)
        error = math.sqrt(squares / freedom * (1 / len(first) + 1 / len(second)))
        known.append(student(freedom) * error)
    if metric in a.halves and metric in b.halves:
        known.append(math.hypot(a.halves[metric], b.halves[metric]))
    return found, max(known) if known else None


def lower(claim: str, better: Iterable[str], worse: Iterable[str], metrics: Sequence[str] = PAPER) -> Judge:
    """Every method of `better` has lower numbers than every one of `worse`, wherever both were run."""

    def judge(rows: Rows) -> Verdict:
        pairs = [(a, b) for a in rows for b in rows if a.method in better and b.method in worse and _meet(a, b)]
        return Verdict(claim, tuple(part for a, b in pairs for m in metrics for part in _less(a, b, m)))

    better, worse = tuple(better), tuple(worse)
    return judge


def among(chosen: Callable[[Row], bool], judge: Judge) -> Judge:
    """A claim about some of the rows only."""
    return lambda rows: judge([row for row in rows if chosen(row)])


def alike(claim: str, first: str, second: str, metrics: Sequence[str] = PAPER, share: float = ALIKE) -> Judge:
    """Two methods differ by little, wherever both were run: the whole interval lies within what counts as alike."""

    def judge(rows: Rows) -> Verdict:
        pairs = [(a, b) for a in rows for b in rows if a.method == first and b.method == second and _meet(a, b)]
        return Verdict(claim, tuple(part for a, b in pairs for m in metrics for part in _near(a, b, m, share)))

    return judge


def signed(claim: str, method: str, metric: str, sign: Literal[-1, 1]) -> Judge:
    """A number of a method is above (or below) 0 wherever it was run."""

    def judge(rows: Rows) -> Verdict:
        return Verdict(claim, tuple(_sided(row, metric, sign) for row in rows if row.method == method and row.values))

    return judge


def below(claim: str, methods: Iterable[str], metric: str, bound: float) -> Judge:
    """A number of these methods is below a bound wherever they were run."""

    def judge(rows: Rows) -> Verdict:
        parts = [
            Part(f"{row.label}: {metric.upper()} − {bound:g}", row.panel, metric, value - bound, half, value - bound)
            for row in rows
            if row.method in methods and (value := row.mean(metric)) is not None
            for half in [row.half(metric)]
        ]
        return Verdict(claim, tuple(parts))

    methods = tuple(methods)
    return judge


def trend(claim: str, metric: str, sign: Literal[-1, 1]) -> Judge:
    """From the least to the largest x of each panel a number falls (−1) or rises (1)."""

    def judge(rows: Rows) -> Verdict:
        parts: list[Part] = []
        for key in dict.fromkeys((row.method, row.panel) for row in rows):
            line = sorted(
                (row for row in rows if (row.method, row.panel) == key and row.values and row.x is not None),
                key=lambda row: row.x or 0,
            )
            if len(line) > 1:
                parts += _less(line[-1], line[0], metric) if sign < 0 else _less(line[0], line[-1], metric)
        return Verdict(claim, tuple(parts))

    return judge


def exceeds(claim: str, methods: Iterable[str], more: str, less: str) -> Judge:
    """Within a row one number is above another, seed by seed (entropy outside above entropy inside)."""

    def judge(rows: Rows) -> Verdict:
        parts = []
        for row in rows:
            pairs = list(zip(row.values.get(more, ()), row.values.get(less, ()), strict=False))
            if row.method in methods and pairs:
                gaps = Row(row.method, row.panel, row.x, {"gap": tuple(b - a for a, b in pairs)})
                value, half = gaps.mean("gap") or 0.0, gaps.half("gap")
                what = f"{row.label}: {less.replace('_', ' ')} − {more.replace('_', ' ')}"
                parts.append(Part(what, row.panel, more, value, half, value))
        return Verdict(claim, tuple(parts))

    methods = tuple(methods)
    return judge


def on(panels: Iterable[str], judge: Judge) -> Judge:
    """The same claim on some panels alone."""
    panels = tuple(panels)
    return lambda rows: judge([row for row in rows if row.panel in panels])


def _meet(a: Row, b: Row) -> bool:
    return (a.panel, a.x) == (b.panel, b.x)


def _less(a: Row, b: Row, metric: str) -> list[Part]:
    if (found := difference(a, b, metric)) is None:
        return []
    return [Part(_against(a, b, metric), a.panel, metric, *found, found[0])]


def _near(a: Row, b: Row, metric: str, share: float) -> list[Part]:
    if (found := difference(a, b, metric)) is None:
        return []
    value, half = found
    margin = max(FLOOR, share * max(abs(a.mean(metric) or 0.0), abs(b.mean(metric) or 0.0)))
    what = f"{_against(a, b, metric)} (alike: within {margin:.2g})"
    return [Part(what, a.panel, metric, value, half, abs(value) - margin)]


def _sided(row: Row, metric: str, sign: Literal[-1, 1]) -> Part:
    value, half = row.mean(metric) or 0.0, row.half(metric)
    told = "confidence − accuracy" if metric == "gap" else metric.upper()
    return Part(f"{row.label}: {told}", row.panel, metric, value, half, -sign * value)


def _against(a: Row, b: Row, metric: str) -> str:
    if a.method == b.method:
        return f"{metric.upper()} of {a.method}, {a.x:,g} − {b.x:,g} ({a.panel})"
    where = a.panel if a.x is None else f"{a.panel}, {a.x:,g}"
    return f"{metric.upper()} of {a.method} − {b.method} ({where})"
