"""What the command line shows: tables and CSV files."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

from calgp.cli.terminal import styled
from calgp.json_values import Json
from calgp.metrics import Difference
from calgp.runs.comparison import Row
from calgp.runs.evaluation import METRICS
from calgp.runs.export import Exported
from calgp.runs.prediction import Prediction
from calgp.runs.predictions_file import Judgement
from calgp.runs.results import Calibration, DecisionMetrics, Evaluation, FittedDecisions, OwnClasses
from calgp.runs.verification import Check
from calgp.runs.writing import wrap_os_errors, write_whole

SHORT = ("err", "mnll", "ece", "mce", "brier")  # scores that are known by their initials
SEPARATION = ("auroc", "aupr_out", "aupr_in", "fpr95")
SHORTEST = 6  # letters of a class name above a column of a confusion matrix
MOST_CLASSES = 20  # of which each is shown without being asked for


def make_table(
    heads: Iterable[Column | str], rows: Iterable[Iterable[str | Text]], title: str, caption: str | None = None
) -> Table:
    """A table with its title above, at the left."""
    table = Table(*heads, title=title, title_justify="left", caption=caption, caption_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def evaluation_table(found: Evaluation) -> Table:
    """The scores of an evaluation with their intervals; for outside images, how well uncertainty separates them."""
    kind = "outside the run's classes" if found.outside else "the run's own classes"
    title = f"{found.source}: {found.n:,} test images, {kind}, {found.computed_by}{_calibrated(found.calibrator)}"
    alone = "Evaluate the run's own test images first to see how well uncertainty separates the two."
    rows = _outside_rows(found) if found.outside else _inside_rows(found)
    return make_table(("", "value", "95 % interval"), rows, title, alone if found.outside and not found.ood else None)


def _calibrated(calibrator: str | None) -> str:
    return "" if calibrator is None else f", calibrated ({calibrator})"


def _score_rows(own: OwnClasses) -> Iterator[tuple[str, str, str]]:
    for name, value in vars(own.scores).items():
        if name != "n":
            label = name.upper() if name in SHORT else f"mean {name}"
            yield label, f"{value:.4f}", _ends(getattr(own.intervals, name, None))


def _inside_rows(found: Evaluation) -> Iterator[tuple[str, str, str]]:
    yield from _score_rows(found.own)
    for name, areas in found.selective.items():
        if found.is_random or name != "mutual-information":
            yield f"AURC by {name.replace('-', ' ')}", f"{areas.aurc:#.3g}", ""
    yield from _decision_rows(found.decisions)
    yield from _flagged_rows(found)


def _outside_rows(found: Evaluation) -> Iterator[tuple[str, str, str]]:
    yield "mean entropy", f"{found.mean_entropy:.4f}", ""
    yield from _decision_rows(found.decisions)
    yield from _flagged_rows(found)
    for name, numbers in (found.ood or {}).items():
        keys = SEPARATION if name in ("entropy", "mutual_information") else SEPARATION[:1]
        for key in keys if found.is_random or name != "mutual_information" else ():
            number = getattr(numbers, key)
            yield f"{key.upper()} by {name.replace('_', ' ')}", f"{number.value:.4f}", _ends(number.interval)


def _flagged_rows(found: Evaluation) -> Iterator[tuple[str, str, str]]:
    if (flagged := found.flagged) is not None:
        target = "" if found.outside else f" (target at most {flagged.false_alarm:g})"
        yield f"called outliers by {flagged.score}{target}", f"{flagged.share:.4f}", _ends(flagged.interval)


def _ends(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.4f} … {interval[1]:.4f}"


def class_table(found: Evaluation, classes: tuple[str, ...]) -> Table:
    """How each class fares, the worst first."""
    from calgp.report.advice import worst_classes

    numbers = (Column(name, justify="right") for name in ("images", "labelled right", "label is right"))
    heads = Column("class", overflow="fold"), *numbers, Column("most often taken for", overflow="fold")
    rows = (
        (name, f"{n:,}", *("–" if share is None else f"{100 * share:.1f} %" for share in shares), wrong)
        for name, n, *shares, wrong in worst_classes(found, classes)
    )
    return make_table(heads, rows, "By class, the worst first")


def confusion_table(found: Evaluation, classes: tuple[str, ...], width: int) -> Table | None:
    """Images by true class and label; None where there is none, or where it is wider than the terminal."""
    if found.confusion is None:
        return None
    matrix, names = found.confusion.matrix(), classes
    longest = max(len(name) for name in names)
    room = width - longest - 2 * (len(names) + 1)

    def widths(most: int) -> list[int]:
        return [max([len(name[:most]), *(len(str(row[q])) for row in matrix)]) for q, name in enumerate(names)]

    most = next((most for most in range(longest, min(SHORTEST, longest) - 1, -1) if sum(widths(most)) <= room), None)
    if len(names) > MOST_CLASSES or most is None:
        return None
    table = Table(
        "", *(Column(name[:most], justify="right", no_wrap=True) for name in names), box=None, pad_edge=False,
        padding=(0, 2, 0, 0), title="True class (row), label (column)", title_justify="left",
    )  # fmt: skip
    for q, (name, row) in enumerate(zip(names, matrix, strict=True)):
        cells = (styled((str(n), "bold")) if q == label else str(n) if n else "·" for label, n in enumerate(row))
        table.add_row(name, *cells)
    return table


def judgement_table(found: Judgement) -> Table:
    """The scores of predictions that were made elsewhere, with their intervals."""
    title = f"{found.name}: {found.n:,} rows, {found.classes} classes"
    rows = *_score_rows(found.own), ("AURC by confidence", f"{found.aurc:#.3g}", "")
    return make_table(("", "value", "95 % interval"), rows, title, " ".join(found.notes) or None)


def paired_table(first: str, second: str, differences: Mapping[str, Difference]) -> Table:
    """The scores of the first less those of the second, on the same rows."""
    rows = []
    for name, each in differences.items():
        verdict = f"{first if each.value < 0 else second} is better" if each.is_clear else "undecided"
        rows.append((name.upper(), f"{each.value:+.4f}", f"{each.half:.4f}", verdict))
    title = f"{first} less {second}, on the same rows: below zero favours {first}"
    return make_table(("", "difference", "± half of its 95 % interval", ""), rows, title)


def shift_table(found: list[Evaluation]) -> Table:
    """The scores against the severity of a corruption; of outside images, only their entropy."""
    first = found[0]
    names = () if first.outside else METRICS
    shift = first.corruption
    title = f"{shift and shift.of} under {shift and shift.kind}: {first.n:,} test images"
    rows = []
    for each in found:
        numbers = [*(getattr(each.own.scores, name) for name in names), each.mean_entropy]
        severity = "" if each.corruption is None else str(each.corruption.severity)
        rows.append((severity, *(f"{value:.4f}" for value in numbers)))
    return make_table(("severity", *map(str.upper, names), "mean entropy"), rows, title + _calibrated(first.calibrator))


def calibration_table(found: Calibration) -> Table:
    """What a calibrator does to the hold-out that it was fitted on."""
    numbers = {name: value for name, value in found.parameters.items() if isinstance(value, float)}
    described = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    title = f"{found.calibrator}, fitted on {found.n:,} held-out images" + (f": {described}" if described else "")
    columns = {"before": found.before, "after": found.after}
    columns |= {} if found.crossed is None else {"cross-validated": found.crossed}
    rows = []
    for name in METRICS:
        values = (getattr(scores, name) for scores in columns.values())
        rows.append((name.upper(), *("" if value is None else f"{value:.4f}" for value in values)))
    return make_table(("on the hold-out", *columns), rows, title, found.warning)


def _decision_rows(decisions: DecisionMetrics | None) -> Iterator[tuple[str, str, str]]:
    """What decisions did on the images, beside what they promised."""
    if decisions is None:
        return
    made = decisions.made
    if (found := decisions.selection) is not None and made.selection is not None:
        yield "answered", f"{found.share:.4f}", ""
        if found.error is not None:
            target = f"error where answered (target {made.selection.error:g})"
            yield target, f"{found.error:.4f}", _ends(found.interval)
    if (sets := decisions.sets) is not None and made.sets is not None:
        if sets.covered is not None:
            target = f"coverage of the sets (target {made.sets.coverage:g})"
            yield target, f"{sets.covered:.4f}", _ends(sets.interval)
        yield "mean size of the sets", f"{sets.mean_size:.4f}", ""


def decisions_table(found: FittedDecisions, classes: tuple[str, ...]) -> Table:
    """What was decided on the hold-out."""
    calibrated = _calibrated(found.calibration and found.calibration.calibrator)
    title = f"Decisions, fitted on {found.n:,} held-out images with {found.passes}{calibrated}"
    return make_table(("", ""), _fitted_rows(found, classes), title, found.warning)


def _fitted_rows(found: FittedDecisions, classes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if (selection := found.selection) is not None:
        sure = "on the hold-out alone (no promise)"
        if selection.confidence is not None:
            sure = f"with confidence {selection.confidence:g}"
        yield "error where it answers", f"at most {selection.error:g}, {sure}"
        yield "it answers", selection.rule
        if selection.answered:
            answered = f"{selection.answered:,} of {selection.n:,} answered"
            yield "on the hold-out", f"{answered}, {selection.wrong:,} wrong"
    if (sets := found.sets) is not None:
        promise = f"at least {sets.coverage:g} {'of each class' if sets.by_class else 'of all images'}"
        yield "sets hold the true class of", promise
        names = classes if sets.by_class else ("all classes",)
        bounds = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, sets.thresholds, strict=True))
        yield f"{sets.kind} threshold", bounds
        yield "empty sets", "stay empty" if sets.empty else "get the most probable class"
    if (outliers := found.outliers) is not None:
        called = f"those with a score above {outliers.threshold:.4g}"
        yield "outliers", f"{called}: at most {outliers.false_alarm:g} of ordinary inputs"


@dataclass(frozen=True)
class PredictionRow:
    """What is said of an image; None is what the run has not: an outlier score, decisions."""

    file: str
    label: str
    probability: float
    entropy: float
    mutual_information: float
    monte_carlo_error: float
    probabilities: dict[str, float]
    outlier_score: float | None = None
    outlier: bool | None = None
    abstains: bool | None = None
    set: list[str] | None = None

    def plain(self) -> dict[str, Json]:
        """For JSON."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def flat(self) -> dict[str, Json]:
        """For CSV: probabilities become one column a class, the classes of a set one text."""
        plain = self.plain() | ({} if self.set is None else {"set": "; ".join(self.set)})
        del plain["probabilities"]
        return plain | {f"p({name})": p for name, p in self.probabilities.items()}


def prediction_rows(found: Prediction) -> list[PredictionRow]:
    """What is said of each image."""
    predicted = found.predictive
    names = found.names or tuple(f"image {place}" for place in range(len(found)))
    nothing = [None] * len(found)
    errors = predicted.monte_carlo_error.amax(-1)
    columns = (predicted.labels, found.probs, found.entropy, found.mutual_information, errors)
    decided = (found.outlier_score, found.outliers, found.abstains)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    flags = (nothing if each is None else each.tolist() for each in decided)
    more = zip(*flags, found.class_sets or nothing, strict=True)
    return [
        PredictionRow(
            name, label, probs[index], entropy, information, error, dict(zip(found.classes, probs, strict=True)), *rest
        )
        for name, label, (index, probs, entropy, information, error), rest in zip(
            names, found.labels, numbers, more, strict=True
        )
    ]


def prediction_table(rows: list[PredictionRow], *, sampled: bool, width: int = 80) -> Table:
    """One line an image, not wider than `width`. What a model without anything random cannot have is left out.

    `sampled`: not in one pass.
    """
    more = [name for name in ("abstains", "set") if rows and getattr(rows[0], name) is not None]
    drawn = sampled and any(row.monte_carlo_error >= 5e-4 for row in rows)
    fixed = [Column(name, justify="right", no_wrap=True) for name in ("probability", "entropy")]
    scored = bool(rows) and rows[0].outlier_score is not None
    random = any(row.mutual_information > 1e-7 for row in rows) and not scored  # a line has 80 columns
    fixed += [Column("mutual\ninformation", justify="right", no_wrap=True)] * random
    fixed += [Column("outlier\nscore", justify="right", no_wrap=True)] * scored
    others = more or ["next best"]  # a line has 80 columns, and a prediction set says more
    texts = {name: Column(name, overflow="fold", no_wrap=name == "abstains") for name in ("file", "label", *others)}
    table = Table(texts["file"], texts["label"], *fixed, *(texts[name] for name in others))
    legend = {"! outlier: unlike the training images": any(row.outlier for row in rows),
              "± standard error of the mean over samples": drawn}  # fmt: skip
    table.caption = "\n".join(text for text, shown in legend.items() if shown) or None
    files = [row.file for row in rows]
    if place := _common_folder(files):  # said once: a line has 80 columns
        table.title, files = f"Files in {place}", [os.path.relpath(file, place) for file in files]
    for file, row in zip(files, rows, strict=True):
        ranked = sorted(row.probabilities.items(), key=lambda item: -item[1])
        second = f"{ranked[1][0]} {ranked[1][1]:.3f}" if len(ranked) > 1 else ""
        error = f"{row.probability:.3f}" + (f" ± {row.monte_carlo_error:.3f}" if drawn else "")
        numbers = [error, f"{row.entropy:.3f}"] + [f"{row.mutual_information:.3f}"] * random
        numbers += [] if row.outlier_score is None else [f"{row.outlier_score:.1f}" + " !" * bool(row.outlier)]
        said = {"abstains": "yes" if row.abstains else "no", "set": "; ".join(row.set or []) or "none"}
        said["next best"] = second
        table.add_row(file, row.label, *numbers, *(said[name] for name in others))
    _fit_columns(table, [column for column in texts.values() if not column.no_wrap], width)
    return table


def _fit_columns(table: Table, texts: list[Column], width: int) -> None:
    """Limit these columns so that all fit. The first gets half of what the rest leave, the others equal parts.

    Rich narrows numbers too, and cuts a table that is too wide all the same.
    """
    widest = {id(column): max(map(_cell_width, (column.header, *column.cells))) for column in table.columns}
    wanted = [widest.pop(id(column)) for column in texts]
    room = width - sum(widest.values()) - 3 * len(table.columns) - 1
    texts[0].max_width = min(wanted[0], max(room // 2, room - sum(wanted[1:])))
    room -= texts[0].max_width
    others = sorted(zip(wanted[1:], texts[1:], strict=True), key=lambda each: each[0])
    for left, (most, column) in zip(range(len(others), 0, -1), others, strict=True):
        column.max_width = min(most, max(room // left, 1))
        room -= column.max_width


def _cell_width(cell: object) -> int:
    return max(cell_len(line) for line in str(cell).split("\n"))


def _common_folder(files: Sequence[str]) -> str:
    """The folder that several files are all in or below; empty if they share none."""
    folders = [os.path.dirname(file) for file in files]
    return os.path.commonpath(folders) if len(files) > 1 and len(set(map(os.path.isabs, folders))) == 1 else ""


def export_row(done: Exported) -> dict[str, Json]:
    """An exported file, for programs."""
    program = None if done.program is None else str(done.program)
    return {
        "path": str(done.path), "program": program, "bytes": done.size, "images_compared": done.images,
        "worst_difference": done.worst, "metadata": done.metadata,
    }  # fmt: skip


def export_lines(done: Exported) -> str:
    """An exported file, and how far it is from torch."""
    drawn = f"{done.passes}, seed {done.seed}"
    worst = ", ".join(f"{name.replace('_', ' ')} {value:.0e}" for name, value in done.worst.items())
    lines = [
        f"Exported {done.path} ({done.size / 1e6:.2f} MB, {drawn}).",
        f"Largest difference to torch over {done.images} images: {worst}.",
    ]
    if done.program is not None:
        lines.append(f"Without calgp: python {done.program} {done.path} image.png")
    return "\n".join(lines)


def comparison_table(rows: list[Row]) -> Table:
    """One line a setting: mean ± standard error over its seeds."""
    outside = sorted({source for row in rows for source in row.auroc})
    table = Table(Column("run", overflow="fold"), show_lines=True)
    for name in (*(name.upper() for name in METRICS), *(f"AUROC {source}" for source in outside)):
        table.add_column(name, no_wrap="AUROC" not in name, min_width=6)  # a number is never cut, whatever the width
    for row in rows:
        numbers = [row.metrics[name] for name in METRICS] + [row.auroc.get(source) for source in outside]
        seeds = f"{len(row.seeds)} seed{'s' * (len(row.seeds) > 1)}"
        setting = f"{row.backbone}, {row.train_images:,} {row.source}, {row.steps:,} steps, {seeds}"
        table.add_row(
            styled((row.method, "bold"), f"\n{setting}"),
            *("" if value is None else number(*value) for value in numbers),
        )
    return table


def number(value: float, error: float | None) -> str:
    """A mean, with its standard error below if there is one."""
    return f"{value:.4f}" + ("" if error is None else f"\n±{error:.4f}")


def flat_row(row: Row) -> dict[str, Json]:
    """A row of a comparison for a CSV file."""
    flat: dict[str, Json] = {"method": row.method, "network": row.backbone, "source": row.source}
    flat |= {"train_images": row.train_images, "steps": row.steps, "seeds": " ".join(map(str, row.seeds))}
    for name, (value, error) in (row.metrics | {f"auroc_{k}": v for k, v in row.auroc.items()}).items():
        flat |= {name: value, f"{name}_se": error}
    return flat


def verification_table(checks: Iterable[Check]) -> Table:
    """What was verified, a line each."""
    table = Table("what", "state", Column("Δ probability", justify="right"), Column("Δ score", justify="right"), "")
    for check in checks:
        differences = ("" if value is None else f"{value:.1g}" for value in (check.probability, check.score))
        table.add_row(check.what, check.state, *differences, check.detail)
    return table


def write_csv(path: Path, rows: Sequence[Mapping[str, Json]], *, escape: bool = True) -> None:
    """Rows of plain data."""
    from calgp.report.csv_text import csv_text

    with wrap_os_errors(path.parent):
        write_whole(path, csv_text(rows, escape=escape).encode("utf-8", "replace"))
