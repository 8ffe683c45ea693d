"""The command `calgp demo`: a Gaussian process and a plain CNN, trained and compared in about two minutes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich import box
from rich.table import Column, Table
from typer import Option

from calgp.cli import rooms
from calgp.cli.shared import open_fabric, out, say
from calgp.cli.terminal import styled
from calgp.errors import CalgpError
from calgp.json_values import Json
from calgp.run import assign

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 600
# what equal tuning found (results/tuning/demo): 12 trainings of each method, judged by the same 1,000 held-out digits
DEMO: dict[str, dict[str, float | None]] = {
    "cnn-gp-sorf": {
        "method.lengthscale": 1.0, "method.scale": None, "method.sigma": 0.3, "method.keep": 0.8,
        "method.keep_filters": 0.8, "learning_rate": 0.064,
    },
    "cnn": {"learning_rate": 0.003084},
}  # fmt: skip
NAMES = {"cnn-gp-sorf": "CNN+GP(SORF)", "cnn": "CNN"}
SCORES = {"err": "% wrong", "mnll": "log loss", "ece": "calibration", "auroc": "letter or digit"}  # what they measure
NOTE = (
    "Intervals: 95 % over test images; the difference is taken image by image. ERR, MNLL, ECE: lower is better. AUROC: "
    "how well entropy tells letters, which were never seen, from digits. One training of each method."
)
Verdict = Literal["better", "worse", "not clear"]
Values = tuple[float, float, float]  # a score and the ends of its interval


def demo(
    folder: Annotated[Path, Option("--out", help="Where the runs and the report go.")] = Path("demo"),
    seed: Annotated[int, Option(help="Seed of both trainings.")] = 0,
    threads: Annotated[int, Option(help="CPU threads; with others sums are rounded otherwise: other numbers.")] = 1,
) -> None:
    """Train CNN+GP(SORF) and a plain CNN on 5,000 digits, compare them on 8,000 others and on letters, write a report.

    Example: calgp demo --out demo
    """
    fabric = open_fabric("cpu", "32-true", threads)
    folders = [rooms.runs.RunFolder(folder / method) for method in NAMES]
    results = []
    for (method, name), target in zip(NAMES.items(), folders, strict=True):
        if (target.path / "run.json").is_file():  # an earlier demo's
            shutil.rmtree(target.path)
        with rooms.bars.training_bar(f"Training {name} on 5,000 digits") as watch:
            classifier = rooms.training.train_run(demo_run(method, seed=seed), target, fabric, watch=watch)
        with rooms.bars.bar("Predicting 8,000 test digits") as advance:
            classifier.evaluate(passes=1, watch=advance)
        with rooms.bars.bar("Predicting 1,000 letters") as advance:
            classifier.evaluate("letters", passes=1, watch=advance)
        results.append(Result.of(name, target))
    first, second = results
    differences = paired(first, second)
    out.print(demo_table(first, second, differences))
    out.print(styled((conclusion(first.name, second.name, differences), "bold")), highlight=False)
    out.print(NOTE, highlight=False)
    say(f"Report: {rooms.report.write_report(folders, folder / 'report.html').resolve()}")


def demo_run(method: str, *, seed: int = 0) -> rooms.runs.Run:
    """The training of one of the two methods."""
    options: dict[str, Json] = {
        "method": {"name": method}, "backbone": "lenet", "source": "digits-large", "steps": STEPS,
        "epochs": 10.0, "schedule": "one-cycle", "holdout": 0.0, "augment": [], "crop": 4, "calibration": False,
    }  # fmt: skip
    for name, value in DEMO[method].items():
        options = assign(options, name, value)
    return rooms.runs.from_json({**options, "seed": seed})


@dataclass(frozen=True)
class Result:
    """What a method was found to be. entropy: of its predictions of each test digit, and of each letter."""

    name: str
    passes: int
    outcomes: rooms.metrics.Outcomes
    entropy: tuple[Tensor, Tensor]
    scores: dict[str, Values]

    @staticmethod
    def of(name: str, folder: rooms.runs.RunFolder) -> Result:
        """What the evaluations of a folder say."""
        digits, letters = folder.evaluation("digits-large"), folder.evaluation("letters")
        own, other = (found and rooms.image_scores.image_scores(folder, found) for found in (digits, letters))
        if not (digits and letters and letters.ood and own and own.outcomes and other):
            raise CalgpError(f"{folder.path} has no predictions of digits and letters; run the demo again.")
        scores: dict[str, Values] = {
            score: (getattr(digits.own.scores, score), *getattr(digits.own.intervals, score))
            for score in ("err", "mnll", "ece")
        }
        auroc = letters.ood["entropy"].auroc
        scores["auroc"] = (auroc.value, *auroc.interval)
        return Result(name, digits.samples, own.outcomes, (own.entropy, other.entropy), scores)


def paired(first: Result, second: Result) -> dict[str, rooms.metrics.Difference]:
    """The scores of the first method less those of the second, on the same digits and letters."""
    inside = rooms.metrics.paired_scores(first.outcomes, second.outcomes, seed=0)
    return inside | rooms.metrics.paired_ood(first.entropy, second.entropy, seed=0)


def demo_table(first: Result, second: Result, differences: Mapping[str, rooms.metrics.Difference]) -> Table:
    """A line for each score: both methods with their intervals, the difference with its own, and what that says."""
    heads = [f"{result.name}\n{result.passes} pass{'es' * (result.passes > 1)}" for result in (first, second)]
    table = Table(
        f"{len(first.entropy[0]):,} digits\n{len(first.entropy[1]):,} letters",
        *(Column(head, justify="right", no_wrap=True) for head in (*heads, "difference\n± 95 %")),
        Column(f"{first.name}\nis", no_wrap=True), box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    colours = {"better": "bold green", "worse": "bold red", "not clear": "dim"}
    for score, meaning in SCORES.items():
        cells = [
            f"{shown(score, value)}\n{shown(score, low)}–{shown(score, high)}"
            for value, low, high in (first.scores[score], second.scores[score])
        ]
        found, says = differences[score], verdict(score, differences[score])
        cells.append(f"{'−' if found.value < 0 else '+'}{shown(score, abs(found.value))}\n± {shown(score, found.half)}")
        table.add_row(styled((score.upper(), "bold"), f"\n{meaning}"), *cells, styled((says, colours[says])))
    for place, images in enumerate(("digits", "letters")):
        means = (result.entropy[place].mean().item() for result in (first, second))
        table.add_row(f"entropy, {images}", *(f"{mean:.2f}" for mean in means))
    return table


def shown(score: str, value: float) -> str:
    """A score with the digits that its interval allows; ERR in percent.

    >>> shown("err", 0.0125), shown("ece", 0.00312)
    ('1.25', '0.0031')
    """
    return f"{100 * value:.2f}" if score == "err" else f"{value:.3f}" if score == "auroc" else f"{value:.4f}"


def verdict(score: str, difference: rooms.metrics.Difference) -> Verdict:
    """Whether the first of two methods is better by a score; not clear where the interval contains 0.

    >>> from calgp.metrics import Difference
    >>> verdict("ece", Difference(-0.004, half=0.001)), verdict("auroc", Difference(0.01, half=0.02))
    ('better', 'not clear')
    """
    if not difference.is_clear:
        return "not clear"
    return "better" if (difference.value > 0) == (score == "auroc") else "worse"  # of all others less is better


def conclusion(first: str, second: str, differences: Mapping[str, rooms.metrics.Difference]) -> str:
    """In one sentence, what the differences show and what they do not.

    >>> from calgp.metrics import Difference
    >>> found = {"err": Difference(0.1, 0.2), "mnll": Difference(-2.0, 0.1), "ece": Difference(-1.0, 0.1)}
    >>> conclusion("A", "B", found | {"auroc": Difference(-0.3, 0.1)})
    'Against B, A is better in MNLL and ECE, worse in AUROC, and not clearly better or worse in ERR.'
    """
    groups: dict[str, list[str]] = {"better": [], "worse": [], "not clearly better or worse": []}
    for score in SCORES:
        groups[verdict(score, differences[score]).replace("not clear", "not clearly better or worse")].append(score)
    parts = [f"{word} in {_listed(map(str.upper, scores))}" for word, scores in groups.items() if scores]
    return f"Against {second}, {first} is {_listed(parts)}."


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    comma = "," * (len(most) > 1)
    return f"{', '.join(most)}{comma} and {last}" if most else last
