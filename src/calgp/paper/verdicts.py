"""The paper's claims, judged: pure functions from rows to a verdict, each with its comparisons and intervals."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .intervals import Estimate, estimate
from .rows import PAPER, Row, difference, error_over_images
from .scales import at_paper_scale

State = Literal["held", "not held", "undecided", "one seed"]  # of a comparison
Overall = Literal["held", "not held", "mixed", "undecided", "one seed", "not run"]  # of a claim
Side = Literal["below", "above", "within"]
Rows = Sequence[Row]
Judge = Callable[[Rows], "Verdict"]
STATES: tuple[State, ...] = ("held", "undecided", "one seed", "not held")
SAYS = {"one seed": "one seed: indicative"}  # in words, where the state alone says too little
ALIKE = 0.2  # two numbers are alike if they differ by less than this share of the larger one …
FLOOR = 0.005  # … or by less than this


@dataclass(frozen=True)
class Part:
    """One comparison: a difference with its interval, and what the claim says about it.

    side, margin: the claim says that the difference is below −margin, above margin, or within ±margin (0 unless given).
    rows, metrics: what was subtracted: the metric of two rows, two metrics of one row, or a metric of one row and
    `offset`, a fixed number.
    """

    what: str
    panel: str
    metric: str
    estimate: Estimate
    side: Side
    rows: tuple[Row, ...]
    metrics: tuple[str, ...]
    margin: float = 0.0
    offset: float = 0.0

    @property
    def difference(self) -> float:
        return self.estimate.value

    @property
    def against(self) -> float:
        """How far the difference is on the wrong side of the claim; below 0 on its own side."""
        if self.side == "within":
            return abs(self.difference) - self.margin
        return self.difference if self.side == "below" else -self.difference

    def state_of(self, comparisons: int = 1) -> State:
        """By the 95 % interval, or by the wider one that holds for so many comparisons at once."""
        if self.estimate.one_seed:
            return "one seed"
        half = self.estimate.half(comparisons)
        if half is None or abs(self.against) <= half:
            return "undecided"
        return "held" if self.against < 0 else "not held"

    @property
    def state(self) -> State:
        return self.state_of()

    @property
    def leaning(self) -> Literal["for", "against", "unclear"]:
        """What a comparison of single seeds indicates: its side by the interval over test images alone."""
        half = self.estimate.half()
        if half is None or abs(self.against) <= half:
            return "unclear"
        return "for" if self.against < 0 else "against"

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.estimate.half()
        return None if half is None else (self.difference - half, self.difference + half)

    @property
    def at_paper_scale(self) -> bool:
        """Whether all its runs have the paper's network and all training images."""
        return all(at_paper_scale(row.panel, row.runs) for row in self.rows)

    @property
    def summary(self) -> str:
        ends = self.interval
        interval = "no interval" if ends is None else f"{ends[0]:.4f} … {ends[1]:.4f}"
        return f"{self.difference:.4f} ({interval})".replace("-", "−") + ", one seed" * (self.state == "one seed")


@dataclass(frozen=True)
class Verdict:
    """A claim with the comparisons that it stands on.

    A comparison holds if its whole 95 % interval is on the claim's side, and is against the claim if the whole
    interval is on the other side. One seed against one seed is only indicative. The claim as a whole is

    - not run: there is no comparison; one seed: all comparisons are of single seeds;
    - held: at least half of all comparisons hold, and none is surely against;
    - not held: at least half are decided, and more are surely against than hold;
    - mixed: some hold and some are surely against, otherwise;
    - undecided: anything else.

    Of many comparisons some are against a true claim by chance. "Surely against" means by the wider interval that has
    95 % for all comparisons of the claim together (Bonferroni, with Student quantiles).
    """

    claim: str
    parts: tuple[Part, ...]

    @property
    def state(self) -> Overall:
        if not self.parts:
            return "not run"
        repeated = [part for part in self.parts if part.state != "one seed"]
        if not repeated:
            return "one seed"
        hold = sum(part.state == "held" for part in repeated)
        against = sum(part.state_of(len(repeated)) == "not held" for part in repeated)
        enough = 2 * (hold + against) >= len(self.parts)
        if against and hold and not (enough and against > hold):
            return "mixed"
        if not enough:
            return "undecided"
        return "held" if hold > against else "not held"

    def at_paper_scale(self) -> "Verdict":
        """The claim by those comparisons alone whose runs have the paper's networks and all training images."""
        return replace(self, parts=tuple(part for part in self.parts if part.at_paper_scale))

    def count(self, panel: str | None = None, metric: str | None = None) -> Counter[State]:
        """How many comparisons went how; of one panel or one metric alone."""
        chosen = (part for part in self.parts if panel in (None, part.panel) and metric in (None, part.metric))
        return Counter(part.state for part in chosen)

    @property
    def indications(self) -> str:
        """What comparisons of single seeds indicate."""
        leaning = Counter(part.leaning for part in self.parts if part.state == "one seed")
        return f"{leaning.total()} of one seed ({leaning['for']} indicate it, {leaning['against']} the opposite)"

    @property
    def summary(self) -> str:
        """How the comparisons went."""
        if not self.parts:
            return "not run"
        if len(self.parts) == 1:
            return f"{self.parts[0].what}: {self.parts[0].summary}"
        count = self.count()
        counts = f"{count['held']} for it, {count['not held']} against, {count['undecided']} undecided"
        counts += f", {self.indications}" if count["one seed"] else ""
        worst = max(
            self.parts, key=lambda part: (part.state == "not held", part.state == "undecided", abs(part.difference))
        )
        return f"of {len(self.parts)} comparisons {counts}; the least for it: {worst.what}: {worst.summary}"


def lower(claim: str, better: Iterable[str], worse: Iterable[str], metrics: Sequence[str] = PAPER) -> Judge:
    """Every method of `better` has lower numbers than every one of `worse`, wherever both were run."""
    better, worse = tuple(better), tuple(worse)
    return _judge(
        claim, lambda rows: (part for a, b in _pairs(rows, better, worse) for m in metrics for part in _less(a, b, m))
    )


def where(chosen: Callable[[Row], bool], judge: Judge) -> Judge:
    """A claim about some of the rows only."""
    return lambda rows: judge([row for row in rows if chosen(row)])


def alike(claim: str, first: str, second: str, metrics: Sequence[str] = PAPER, share: float = ALIKE) -> Judge:
    """Two methods differ by little, wherever both were run: the whole interval lies within what counts as alike."""
    return _judge(
        claim,
        lambda rows: (p for a, b in _pairs(rows, (first,), (second,)) for m in metrics for p in _near(a, b, m, share)),
    )


def below(claim: str, methods: Iterable[str], metric: str, bound: float) -> Judge:
    """A number of these methods is below a bound wherever they were run."""
    return _bounded(claim, methods, metric, bound, "below")


def above(claim: str, methods: Iterable[str], metric: str, bound: float) -> Judge:
    """A number of these methods is above a bound wherever they were run."""
    return _bounded(claim, methods, metric, bound, "above")


def _bounded(claim: str, methods: Iterable[str], metric: str, bound: float, side: Side) -> Judge:
    def parts(rows: Rows) -> Iterator[Part]:
        for row in rows:
            if row.method in methods and (found := row.estimate(metric)) is not None:
                name = "confidence − accuracy" if metric == "gap" else metric.upper()
                what = f"{row.label}: {name}" + (f" − {bound:g}" if bound else "")
                moved = replace(found, value=found.value - bound)
                yield Part(what, row.panel, metric, moved, side, (row,), (metric,), offset=bound)

    methods = tuple(methods)
    return _judge(claim, parts)


def trend(claim: str, metric: str, sign: Literal[-1, 1]) -> Judge:
    """From the least to the largest x of each panel a number falls (−1) or rises (1)."""

    def parts(rows: Rows) -> Iterator[Part]:
        for key in dict.fromkeys((row.method, row.panel) for row in rows):
            own = (row for row in rows if (row.method, row.panel) == key and row.values and row.x is not None)
            line = sorted(own, key=lambda row: row.x or 0)
            if len(line) > 1:
                yield from _less(line[-1], line[0], metric) if sign < 0 else _less(line[0], line[-1], metric)

    return _judge(claim, parts)


def between_panels(claim: str, method: str, metric: str, *, less: str, more: str) -> Judge:
    """A number of a method is lower in one panel than in another."""

    def parts(rows: Rows) -> Iterator[Part]:
        low, high = ([row for row in rows if (row.method, row.panel) == (method, panel)] for panel in (less, more))
        return (part for a in low for b in high if a.x == b.x for part in _less(a, b, metric))

    return _judge(claim, parts)


def exceeds(claim: str, methods: Iterable[str], more: str, less: str) -> Judge:
    """Within a row one number is above another, seed by seed (entropy outside above entropy inside)."""

    def parts(rows: Rows) -> Iterator[Part]:
        for row in rows:
            if row.method in methods and (found := within_row(row, less, more)) is not None:
                what = f"{row.label}: {less.replace('_', ' ')} − {more.replace('_', ' ')}"
                yield Part(what, row.panel, more, found, "below", (row,), (less, more))

    methods = tuple(methods)
    return _judge(claim, parts)


def within_row(row: Row, first: str, second: str) -> Estimate | None:
    """One metric minus another, seed by seed. They are of different images, so their errors over images add."""
    gaps = [a - b for a, b in zip(row.values.get(first, ()), row.values.get(second, ()), strict=False)]
    if not gaps:
        return None
    one, two = error_over_images(row, first), error_over_images(row, second)
    return estimate(gaps, None if one is None or two is None else math.hypot(one, two))


def on(panels: Iterable[str], judge: Judge) -> Judge:
    """The same claim on some panels alone."""
    panels = tuple(panels)
    return where(lambda row: row.panel in panels, judge)


def _judge(claim: str, parts: Callable[[Rows], Iterable[Part]]) -> Judge:
    return lambda rows: Verdict(claim, tuple(parts(rows)))


def _pairs(rows: Rows, first: Sequence[str], second: Sequence[str]) -> list[tuple[Row, Row]]:
    """A row of the first methods with one of the second in the same cell."""
    return [
        (a, b)
        for a in rows
        for b in rows
        if a.method in first and b.method in second and (a.panel, a.x) == (b.panel, b.x)
    ]


def _less(a: Row, b: Row, metric: str) -> list[Part]:
    if (found := difference(a, b, metric)) is None:
        return []
    return [Part(_against(a, b, metric), a.panel, metric, found, "below", (a, b), (metric,))]


def _near(a: Row, b: Row, metric: str, share: float) -> list[Part]:
    if (found := difference(a, b, metric)) is None:
        return []
    margin = max(FLOOR, share * max(abs(a.mean(metric) or 0.0), abs(b.mean(metric) or 0.0)))
    what = f"{_against(a, b, metric)} (alike: within {margin:.2g})"
    return [Part(what, a.panel, metric, found, "within", (a, b), (metric,), margin)]


def _against(a: Row, b: Row, metric: str) -> str:
    name = metric.replace("_", " ") if "_" in metric else metric.upper()
    if a.method == b.method and a.panel == b.panel:
        return f"{name} of {a.method}, {a.x:,g} − {b.x:,g} ({a.panel})"
    if a.method == b.method:
        return f"{name} of {a.method}, {a.panel} − {b.panel}"
    where = a.panel if a.x is None else f"{a.panel}, {a.x:,g}"
    return f"{name} of {a.method} − {b.method} ({where})"
