"""Successive halving with a budget that is the same for every method: pure planning, which trains nothing itself."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from calgp.errors import CalgpError
from calgp.methods.space import Axis, Side, Value

SIDES: tuple[Side, Side] = ("low", "high")
Options = dict[str, Value]
Space = Mapping[str, Axis]


@dataclass(frozen=True)
class Budget:
    """What each method may spend, the same for all of them.

    pilots: short trainings of the first rung; the last quarter of them are neighbours of the best so far.
    steps: of the last rung; a rung has 1/`factor` of the next one's steps, and `factor` times its pilots.
    samples: predictive samples for the hold-out score.
    images: training images of each rung, a balanced part; none given: all. Short pilots on all images see each of them
        a few times only, and so favour options that learn fast over those that do not overfit.
    finalists: pilots of the last rung. As many as `pilots`: all have the full length, so none is judged too early.

    >>> Budget(pilots=8, steps=2000).rungs
    ((8, 222), (3, 667), (1, 2000))
    >>> Budget().total_pilots, Budget().total_steps
    (12, 5777)
    >>> Budget(pilots=9, steps=900, finalists=3).rungs
    ((9, 300), (3, 900))
    """

    pilots: int = 8
    steps: int = 2000
    factor: int = 3
    samples: int = 20
    images: tuple[int, ...] = ()
    finalists: int = 1

    def __post_init__(self) -> None:
        for name, least in (("pilots", 1), ("steps", 1), ("factor", 2), ("samples", 1), ("finalists", 1)):
            if getattr(self, name) < least:
                raise CalgpError(f"Invalid {name}={getattr(self, name)}: must be at least {least}.")
        if self.images and len(self.images) != len(self._counts):
            raise CalgpError(f"Invalid images={self.images}: {self.pilots} pilots have {len(self._counts)} rungs.")
        least = self.factor ** (len(self._counts) - 1)
        if self.steps < least:
            raise CalgpError(
                f"Invalid steps={self.steps}: {self.pilots} pilots are halved {len(self._counts) - 1} times, so that "
                f"the first of them would have no step; give at least {least}, or fewer pilots."
            )

    @property
    def _counts(self) -> list[int]:
        counts = [self.pilots]
        while counts[-1] > self.finalists:
            counts.append(max(math.ceil(counts[-1] / self.factor), self.finalists))
        return counts

    @property
    def rungs(self) -> tuple[tuple[int, int], ...]:
        """(pilots, steps of each) of every rung, from many short ones to a few long ones."""
        counts = self._counts
        return tuple((n, round(self.steps / self.factor ** (len(counts) - rung))) for rung, n in enumerate(counts, 1))

    def images_of(self, steps: int) -> int | None:
        """The training images of the rung with so many steps; None: all."""
        return next((n for n, (_, own) in zip(self.images, self.rungs, strict=False) if own == steps), None)

    @property
    def local(self) -> int:
        """How many pilots of the first rung are neighbours of the best so far."""
        return self.pilots // 4

    @property
    def total_pilots(self) -> int:
        return sum(count for count, _ in self.rungs)

    @property
    def total_steps(self) -> int:
        return sum(count * steps for count, steps in self.rungs)


@dataclass(frozen=True)
class Pilot:
    """One short training and its score on the hold-out.

    options: those that are searched. key: of its run's folder. failure: why it has no score; its MNLL is then infinite.
    """

    options: Options
    rung: int
    steps: int
    seed: int = 0
    mnll: float = math.inf
    err: float | None = None
    ece: float | None = None
    seconds: float = 0.0
    key: str = ""
    failure: str | None = None

    @property
    def order(self) -> float:
        """The MNLL; a number that is none comes last."""
        return math.inf if math.isnan(self.mnll) else self.mnll


@dataclass(frozen=True)
class Edge:
    """An option of the winner that is the last of its values on a side; `limit`: there are no sensible ones beyond."""

    option: str
    value: Value
    side: Side
    limit: bool


@dataclass(frozen=True)
class Search:
    """What was tried, in this order, and the space as it was searched: widened, and refined where it was too small."""

    pilots: tuple[Pilot, ...] = ()
    space: Space = field(default_factory=dict)


Attempt = Callable[[Options, int, int], Pilot]  # options, rung, steps


def successive_halving(space: Space, first: Options, budget: Budget, attempt: Attempt, *, seed: str) -> Search:
    """Try `first`, draws from the space, and neighbours of the best; then the best third for longer, and so on.

    Every search makes the same number of pilots and steps, however small its space is. The same seed and the same
    scores make the same search, so that it can be resumed by doing it again.
    """
    generator = random.Random(seed)  # noqa: S311 (nothing is secret)
    search = Search((), {name: axis.including(first[name]) for name, axis in space.items()})
    for rung, (count, steps) in enumerate(budget.rungs):
        promoted = best_of(search.pilots, rung - 1, count)
        for place in range(count):
            if rung:
                options, searched = promoted[place].options, search.space
            elif not place:
                options, searched = first, search.space
            elif place < count - budget.local:
                options, searched = draw(search, generator)
            else:
                options, searched = step_from_best(search, generator)
            search = Search((*search.pilots, attempt(options, rung, steps)), searched)
    return search


def best_of(pilots: Sequence[Pilot], rung: int, count: int = 1) -> list[Pilot]:
    """The pilots of a rung with the lowest MNLL; of equal ones the earlier."""
    return sorted((pilot for pilot in pilots if pilot.rung == rung), key=lambda pilot: pilot.order)[:count]


def draw(search: Search, generator: random.Random) -> tuple[Options, Space]:
    """Untried options, drawn at random with the value of the first axis (the learning rate) that was tried least.

    A space that is used up gets values in between.
    """
    first, tried = next(iter(search.space)), [pilot.options for pilot in search.pilots]
    used = Counter(options[first] for options in tried)
    for value in sorted(search.space[first].values, key=lambda value: (used[value], generator.random())):
        fixed = {name: axis.values for name, axis in search.space.items()} | {first: (value,)}
        settings = [dict(zip(fixed, chosen, strict=True)) for chosen in itertools.product(*fixed.values())]
        if left := [options for options in settings if options not in tried]:
            return generator.choice(left), search.space
    return draw(Search(search.pilots, refine(search.space)), generator)


def step_from_best(search: Search, generator: random.Random) -> tuple[Options, Space]:
    """An untried neighbour of the best options so far; those beyond an edge of the space, which is widened, first."""
    tried = [pilot.options for pilot in search.pilots]
    best = best_of(search.pilots, 0)[0].options
    found: list[tuple[bool, float, Options, Space]] = []
    for name, axis in search.space.items():
        for side in SIDES:
            value = axis.next_to(best[name], side)
            if value is not None and (options := best | {name: value}) not in tried:
                inside = value in axis.values
                wider = {**search.space, name: axis.including(value)}
                found.append((inside, inside * generator.random(), options, wider))
    if not found:
        return step_from_best(Search(search.pilots, refine(search.space)), generator)
    _, _, options, space = min(found, key=lambda each: each[:2])  # the first axis first, of those beyond an edge
    return options, space


def refine(space: Space) -> Space:
    """The space with values between those that it has."""
    refined = {name: axis.refined() for name, axis in space.items()}
    if refined == dict(space):
        raise CalgpError(f"The search space of {', '.join(space)} has fewer settings than pilots; give fewer pilots.")
    return refined


def edges_of(space: Space, options: Options) -> tuple[Edge, ...]:
    """The options that stand at the end of their axis."""
    return tuple(
        Edge(name, options[name], side, axis.beyond(side) is None)
        for name, axis in space.items()
        for side in SIDES
        if axis.is_edge(options[name], side)
    )
