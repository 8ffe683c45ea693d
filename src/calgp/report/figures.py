"""Figures: pure functions from plain data to an SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from calgp.runs.results import LogRecord, Reliability

from . import words
from .svg import INK, PALETTE, SMALL, WIDTH, drawing, hide_axis, plain, rendered, set_css_class

OVER, UNDER = PALETTE[5], PALETTE[4]  # more confident than right; less confident than right
RIGHT, WRONG = PALETTE[0], PALETTE[5]
INSIDE, OUTSIDE = PALETTE[0], PALETTE[1]
Limits = tuple[float, float]
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g} %")


@dataclass(frozen=True)
class Dot:
    """A run's value of a metric, with its interval if it is known."""

    label: str
    value: float
    interval: Limits | None
    colour: str


def wilson(share: float, n: int, z: float = 1.96) -> Limits:
    """Wilson's 95 % interval of a share: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n).

    >>> low, high = wilson(1.0, 10)
    >>> round(low, 3), high
    (0.722, 1.0)
    """
    centre, scale = share + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def reliability(bins: Reliability, *, ece: float, mce: float, colour: str = PALETTE[0]) -> str:
    """Accuracy against confidence (1), with 95 % intervals, and how many images each bin holds."""
    with drawing(WIDTH, 500) as figure:
        axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
        draw_reliability(axes, bins, colour)
        axes.set_ylabel("share that is right")
        lines = (f"ECE {ece:.4f}", f"MCE {mce:.4f}", f"n = {sum(bins.count):,}")
        axes.text(0.025, 0.985, "\n".join(lines), transform=axes.transAxes, va="top", linespacing=1.45)
        _legend(axes, "lower right")
        _draw_counts(counts, bins, colour)
        counts.set(xlabel="confidence", ylabel="images")
        title = f"Reliability diagram of {sum(bins.count):,} predictions: expected calibration error {ece:.4f}."
        return rendered(figure, title)


def reliability_small(bins: Reliability, *, label: str, ece: float, colour: str = PALETTE[0]) -> str:
    """A reliability diagram to be set beside others."""
    with drawing(SMALL, 245) as figure:
        axes = figure.subplots()
        draw_reliability(axes, bins, colour)
        axes.set(xlabel="confidence", ylabel="share that is right", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        axes.set_title(f"ECE {ece:.4f}", loc="left", size=12)
        return rendered(figure, f"Reliability diagram of {label}: expected calibration error {ece:.4f}.")


def confidence_histogram(confidence: Sequence[float], correct: Sequence[bool], *, bins: int = 25) -> str:
    """How sure the model is where it is right, and where it is wrong: each with its own scale of counts."""
    right, wrong = ([p for p, hit in zip(confidence, correct, strict=True) if hit == kind] for kind in (True, False))
    with drawing(WIDTH, 400) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        edges = [k / bins for k in range(bins + 1)]
        for axes, values, name, colour in ((upper, right, "right", RIGHT), (lower, wrong, "wrong", WRONG)):
            if values:
                axes.hist(values, edges, color=colour, alpha=0.75)
                axes.axvline(fmean(values), color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
            mean = f", {100 * fmean(values):.1f} % sure on average" if values else ""
            axes.set_title(f"{name}: {words.count(len(values), 'image')}{mean}", loc="left", size=12)
            axes.set(xlim=(0, 1), ylabel="images")
            axes.set_ylim(0, axes.get_ylim()[1] if values else 1)
            axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.grid(visible=False, axis="x")
        lower.set_xlabel("confidence")
        lower.xaxis.set_major_formatter(PERCENT)
        return rendered(figure, f"Confidence of {len(right):,} right and {len(wrong):,} wrong predictions.")


def entropies(
    inside: Sequence[float],
    outside: Sequence[float],
    *,
    classes: int,
    names: tuple[str, str],
    auroc: tuple[float, Limits] | None,
    bins: int = 30,
) -> str:
    """Entropy of predictions inside and outside of what the model knows, as shares of images per bin of [0, log Q]."""
    most = math.log(classes)
    edges = [k * most / bins for k in range(bins + 1)]
    with drawing(WIDTH, 320) as figure:
        axes = figure.subplots()
        top = 0.0
        for values, name, colour in ((inside, names[0], INSIDE), (outside, names[1], OUTSIDE)):
            values = [min(max(value, 0.0), most) for value in values]
            mean = fmean(values)
            label = f"{plain(name, 30)}: {words.count(len(values), 'image')}, mean {mean:.2f}"
            weights = [1 / len(values)] * len(values)
            shares, _, _ = axes.hist(values, edges, weights=weights, color=colour, alpha=0.35)
            axes.hist(values, edges, weights=weights, histtype="step", color=colour, linewidth=1.8, label=label)
            set_css_class(axes.axvline(mean, color=colour, linestyle=(0, (4, 2)), linewidth=1.6), "mean")
            top = max(top, float(max(shares)))
        _root_scale(axes, top)
        heading = None if auroc is None else f"AUROC {auroc[0]:.3f} ({auroc[1][0]:.3f} – {auroc[1][1]:.3f})"
        bold = {"weight": "bold", "size": 12}
        figure.legend(loc="outside upper left", title=heading, alignment="left", title_fontproperties=bold)
        axes.set(xlim=(0, most), xlabel=f"entropy in nats, at most log {classes} = {most:.2f}")
        return rendered(figure, f"Entropy of predictions on {names[0]} (inside) and {names[1]} (outside).")


@dataclass(frozen=True)
class Curve:
    """The error of the least uncertain predictions against their share, and the area below it."""

    name: str
    coverage: Sequence[float]
    risk: Sequence[float]
    aurc: float


def risk_coverage(
    curves: Sequence[Curve], *, best: Curve, target: float | None = None, chosen: tuple[float, float] | None = None
) -> str:
    """Error where answered against the share of images that is answered, by each uncertainty score, and at best.

    `target` is the error that was asked for, `chosen` the (share, error) of the threshold on these images.
    """
    with drawing(WIDTH, 430) as figure:
        axes = figure.subplots()
        highest = max(max(curve.risk[len(curve.risk) // 20 :]) for curve in curves)  # the first few are chance
        axes.plot(
            best.coverage, best.risk, color=INK, alpha=0.55, linewidth=1.2, linestyle=(0, (1, 1.5)),
            label=f"best possible: AURC {best.aurc:.3g}",
        )  # fmt: skip
        styles = ((PALETTE[0], "-"), (PALETTE[2], (0, (6, 2))), (PALETTE[3], (0, (2, 1.5))))
        for curve, (colour, dash) in zip(curves, styles, strict=False):
            label = f"{curve.name}: AURC {curve.aurc:.3g}"
            (line,) = axes.plot(curve.coverage, curve.risk, color=colour, linewidth=1.9, linestyle=dash, label=label)
            set_css_class(line, "curve")
        if target is not None:
            label = f"target {100 * target:.3g} %"
            line = axes.axhline(target, color=WRONG, linewidth=1.3, linestyle=(0, (4, 2)), label=label)
            set_css_class(line, "target")
        if chosen is not None:
            (dot,) = axes.plot(
                *chosen, "o", color=WRONG, markersize=8, markeredgecolor=INK, mew=0.8, zorder=4,
                label="the run's threshold",
            )  # fmt: skip
            set_css_class(dot, "chosen")
        top = max(highest, target or 0.0, chosen[1] if chosen else 0.0, 1e-3)
        axes.set(xlim=(0, 1.02), xlabel="share of images answered, least uncertain first")
        axes.set(ylim=(0, 1.08 * top), ylabel="share of answers that is wrong")
        axes.xaxis.set_major_formatter(PERCENT)
        axes.yaxis.set_major_formatter(PERCENT)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        figure.legend(loc="outside upper left", alignment="left")
        return rendered(figure, f"Risk and coverage: {', '.join(f'{c.name} AURC {c.aurc:.3g}' for c in curves)}.")


def set_coverage(
    names: Sequence[str], covered: Sequence[float], n: Sequence[int], size: Sequence[float], *, target: float
) -> str:
    """How often prediction sets hold the true class, and how large they are, by class."""
    with drawing(WIDTH, 95 + 27 * len(names)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
        places = range(len(names))
        for place, share, count in zip(places, covered, n, strict=True):
            left.hlines(place, *wilson(share, count), color=PALETTE[0], linewidth=2)
            (dot,) = left.plot(share, place, "o", color=PALETTE[0], markersize=6.5, clip_on=False)
            set_css_class(dot, "covered")
        set_css_class(left.axvline(target, color=WRONG, linewidth=1.3, linestyle=(0, (4, 2))), "target")
        lowest = min([target, *(wilson(share, count)[0] for share, count in zip(covered, n, strict=True))])
        left.set(
            xlim=(max(0.0, lowest - 0.03), 1.0), xlabel="covered", yticks=list(places), ylim=(len(names) - 0.5, -0.5)
        )
        left.set_yticklabels([plain(name, 14) for name in names])
        left.xaxis.set_major_formatter(PERCENT)
        left.xaxis.set_major_locator(MaxNLocator(4))
        for place, value in zip(places, size, strict=True):
            (bar,) = right.barh(place, value, height=0.6, color=PALETTE[2], alpha=0.6, linewidth=0)
            set_css_class(bar, "size")
        right.set(xlabel="classes in a set", xlim=(0, 1.1 * max(*size, 1)))
        right.xaxis.set_major_locator(MaxNLocator(3, prune="lower"))  # 0 would touch the 100 % beside it
        for axes in (left, right):
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        return rendered(
            figure, f"Coverage and mean size of prediction sets by class; {100 * target:.3g} % were asked for."
        )


def training(log: Sequence[LogRecord]) -> str:
    """Both parts of the bound against the step, each on its own axis; hold-out and learning rate where they are known.

    The KL is known up to constants, so that it may be below 0.
    """
    steps = [record for record in log if record.kind == "train"]
    held = [record for record in log if record.kind == "holdout"]
    kl = any(record.kl for record in steps)  # a plain network has none
    heights = [2.2, *([1.3] if kl else []), *([1.3] if held else []), 0.7]
    with drawing(WIDTH, 95 + 62 * sum(heights)) as figure:
        panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
        _curve(panels[0], steps, "nll", PALETTE[0], "nats per image", label="training −log p(y)")
        if kl:
            _curve(panels[1], steps, "kl", PALETTE[2], "KL / n")
        if held:
            _curve(panels[0], held, "mnll", PALETTE[5], "nats per image", label="hold-out MNLL", marker="o")
            _curve(panels[-2], held, "err", PALETTE[5], "hold-out ERR", marker="o")
            panels[-2].yaxis.set_major_formatter(PERCENT)
            panels[-2].set_ylim(bottom=0)
        _curve(panels[-1], steps, "rate", INK, "learning\nrate", alpha=0.45)
        panels[-1].set_ylim(bottom=0)
        panels[-1].yaxis.set_major_locator(MaxNLocator(1))
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        figure.align_ylabels(panels)
        _legend(panels[0], "upper right")
        return rendered(figure, "Training: negative log-likelihood, KL and learning rate by step.")


def dots(metric: str, rows: Sequence[Dot], *, unit: Literal["", "%"] = "") -> str:
    """A metric of several runs with its intervals: less is better, and the best is a filled dot."""
    best = min(row.value for row in rows)
    with drawing(WIDTH, 70 + 40 * len(rows)) as figure:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            if row.interval is not None and all(map(math.isfinite, row.interval)):
                axes.hlines(place, *row.interval, color=row.colour, linewidth=2.2)
            face = row.colour if row.value == best else "none"
            (dot,) = axes.plot(row.value, place, "o", color=row.colour, markerfacecolor=face, markersize=8, mew=2)
            set_css_class(dot, "dot")
            label = plain(row.label, 58) if math.isfinite(row.value) else f"{plain(row.label, 50)} ({row.value})"
            axes.annotate(
                label, (0, place), xytext=(4, 9), textcoords="offset points",
                xycoords=("axes fraction", "data"), va="bottom", size=11,
            )  # fmt: skip
        axes.set(ylim=(len(rows) - 0.6, -0.7), xlabel=f"{metric} (less is better)", yticks=range(len(rows)))
        axes.set_yticklabels([])
        hide_axis(axes, "y")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        if unit == "%":
            axes.xaxis.set_major_formatter(PERCENT)
        axes.margins(x=0.08)
        return rendered(figure, f"{metric} of {len(rows)} runs, with 95 % intervals.")


def draw_reliability(axes: Axes, bins: Reliability, colour: str) -> None:
    """Bars of accuracy, the gap from each to the mean confidence, dots with Wilson's intervals, the diagonal."""
    axes.plot([0, 1], [0, 1], color=INK, linestyle=(0, (5, 3)), linewidth=1, alpha=0.7)
    for left, right, count, accuracy, confidence in bins.filled():
        width = right - left
        (bar,) = axes.bar(left, accuracy, width, align="edge", color=colour, alpha=0.22, linewidth=0)
        set_css_class(bar, "accuracy")
        over = confidence > accuracy
        (gap,) = axes.bar(
            left, abs(confidence - accuracy), width, min(confidence, accuracy), align="edge", alpha=0.5, linewidth=0,
            color=OVER if over else UNDER, label="over-confident" if over else "under-confident",
        )  # fmt: skip
        set_css_class(gap, "gap")
        axes.vlines(confidence, *wilson(accuracy, count), color=INK, linewidth=1.1, alpha=0.75)
    placed = [(confidence, accuracy) for *_, accuracy, confidence in bins.filled()]
    (points,) = axes.plot(
        *zip(*placed, strict=True), "o", color=colour, markersize=4.5, markeredgecolor=INK, mew=0.6, clip_on=False,
        zorder=3,
    )  # fmt: skip
    set_css_class(points, "points")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)


def _draw_counts(axes: Axes, bins: Reliability, colour: str) -> None:
    """How many images each bin holds; on a logarithmic scale if small bins could not be seen otherwise."""
    filled = bins.filled()
    counts = [count for _, _, count, _, _ in filled]
    logarithmic = max(counts) > 100 * min(counts)
    if logarithmic:
        axes.set_yscale("log")
    for left, right, count, _, _ in filled:
        floor = 0.5 if logarithmic else 0.0  # a single image is a bar, too
        (bar,) = axes.bar(left, count - floor, right - left, floor, align="edge", color=colour, alpha=0.75, linewidth=0)
        set_css_class(bar, "count")
    axes.set_ylim(0.5 if logarithmic else 0, max(counts) * (1.6 if logarithmic else 1.08))
    axes.yaxis.set_major_locator(LogLocator(numticks=4) if logarithmic else MaxNLocator(3, integer=True))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()


def _curve(
    axes: Axes, records: Sequence[LogRecord], key: str, colour: str, name: str, *, label: str | None = None,
    marker: str | None = None, alpha: float = 1.0,
) -> None:  # fmt: skip
    steps, values = [record.step for record in records], [getattr(record, key) for record in records]
    style = {"marker": "o" if len(records) == 1 else marker, "markersize": 4.5}  # a line of one point cannot be seen
    (line,) = axes.plot(steps, values, color=colour, linewidth=1.8, label=label, alpha=alpha, **style)
    set_css_class(line, f"curve-{key}")
    axes.set_ylabel(name)
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _root_scale(axes: Axes, top: float) -> None:
    """Shares of images; by their square root if one bin is so full that the others would vanish."""
    if top > 0.5:
        axes.set_yscale("function", functions=(lambda y: abs(y) ** 0.5, lambda y: y**2))
        axes.set_yticks([share for share in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0) if share <= top * 1.1])
    axes.set_ylim(0, top * 1.08)
    axes.set_ylabel("share of images" + (" (root scale)" if top > 0.5 else ""))
    axes.yaxis.set_major_formatter(PERCENT)


def _legend(axes: Axes, loc: Literal["lower right", "upper right"]) -> None:
    """A legend with each label once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if unique:
        axes.legend(list(unique.values()), list(unique), loc=loc)
