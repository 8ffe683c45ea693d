"""Figures of many runs, as the paper draws them: pure functions from plain data to a Drawn (SVG and PNG)."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, ScalarFormatter

from calgp.runs.results import Reliability

from .figures import draw_reliability
from .svg import INK, PALETTE, drawing, hide_axis, plain, rendered, set_css_class

WIDE = 860  # of the page's whole column
BARS = "bars are standard errors over seeds, or the 95 % interval over test images of a single one"
# colour and mark of a method, the same in all figures; marks tell what colours may not
STYLES = tuple(
    zip((*PALETTE, INK, *PALETTE), ("o", "s", "v", "^", "X", "P", "*", "D", "<", ">", "h", "p", "d"), strict=True)
)

DENSITY_STYLES = ((PALETTE[0], "-"), (PALETTE[1], (0, (4, 1.5))))  # inside, outside


@dataclass(frozen=True)
class Drawn:
    """A figure for a page and for a paper."""

    svg: str
    png: bytes
    says: str


@dataclass(frozen=True)
class Line:
    """A method's points (x, value, standard error or half an interval)."""

    label: str
    points: Sequence[tuple[float, float, float | None]]


@dataclass(frozen=True)
class Density:
    """Histograms of entropy of a method on a network: inside and outside of what it knows."""

    label: str
    inside: tuple[Sequence[float], Sequence[float]]  # edges, counts
    outside: tuple[Sequence[float], Sequence[float]]
    heading: str


def styles(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and mark of each label, by its place."""
    return {label: STYLES[place % len(STYLES)] for place, label in enumerate(dict.fromkeys(labels))}


def curves(
    panels: Mapping[str, Mapping[str, Sequence[Line]]], *, axis: str, log: bool, styled: Mapping[str, tuple[str, str]]
) -> Drawn:
    """A row of axes for each panel, a column for each metric."""
    metrics = list(next(iter(panels.values())))
    with drawing(WIDE, 60 + 190 * len(panels)) as figure:
        grid = figure.subplots(len(panels), len(metrics), squeeze=False)
        for number, (row, (panel, columns)) in enumerate(zip(grid, panels.items(), strict=True), 1):
            for place, (axes, (metric, lines)) in enumerate(zip(row, columns.items(), strict=True)):
                for line in lines:
                    _draw_line(axes, line, *styled[line.label])
                if not any(line.points for line in lines):
                    _not_run(axes, xticks=(), yticks=())
                _dress(axes, [point for line in lines for point in line.points], log)
                if number == 1:
                    axes.set_title(metric, size=13)
                if number == len(panels):
                    axes.set_xlabel(axis)
                if place == 0:
                    axes.set_ylabel(plain(panel, 26))
        figure.align_ylabels()
        _shared_legend(
            figure, {line.label for columns in panels.values() for ls in columns.values() for line in ls}, styled
        )
        return _drawn(figure, f"{', '.join(metrics)} against {axis}; {BARS}.")


def frontiers(
    panels: Mapping[str, Sequence[tuple[str, float, float, float | None]]], *, styled: Mapping[str, tuple[str, str]]
) -> Drawn:
    """ECE against the milliseconds of a prediction, an axis for each panel: (label, milliseconds, ECE, its error).

    The steps join what no other method beats in both.
    """
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    with drawing(WIDE, 60 + 245 * lines) as figure:
        grid = figure.subplots(lines, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.set_axis_off()
        for place, (axes, (panel, points)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            best = undominated([(x, y) for _, x, y, _ in points])
            axes.plot(*zip(*best, strict=True), color=INK, alpha=0.35, drawstyle="steps-post", linewidth=1.2)
            for label, x, y, spread in points:
                _draw_line(axes, Line(label, [(x, y, spread)]), *styled[label])
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.set(xlabel="ms of a core, a prediction", ylabel="ECE" if place % columns == 0 else "")
            axes.set_ylim(0, 1.2 * max(y for _, _, y, _ in points) or 1)
            axes.set_title("\n".join(plain(line, 26) for line in panel.splitlines()), size=12, loc="left")
            axes.margins(x=0.15)
        _shared_legend(figure, {label for points in panels.values() for label, *_ in points}, styled)
        caption = "Calibration against the cost of a prediction, of all methods measured in turns on one core"
        return _drawn(figure, f"{caption}; {BARS}. Down and left is better.")


def undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points (cost, error) those that no other beats in both, the cheapest first.

    >>> undominated([(1, 5), (2, 6), (3, 2), (2.5, 5)])
    [(1, 5), (3, 2)]
    """
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def reliabilities(panels: Sequence[tuple[str, Sequence[tuple[str, Reliability | None, str]]]]) -> Drawn:
    """Reliability diagrams, a row for each panel, a column for each method: (label, bins, what stands above)."""
    columns = max(len(shown) for _, shown in panels)
    with drawing(WIDE if columns > 1 else WIDE / 2, 20 + (WIDE / max(columns, 2) * 0.92) * len(panels)) as figure:
        grid = figure.subplots(len(panels), columns, squeeze=False)
        for row, (panel, shown) in zip(grid, panels, strict=True):
            for axes in row[len(shown) :]:
                axes.set_axis_off()
            for place, (axes, (label, bins, heading)) in enumerate(zip(row, shown, strict=False)):
                if bins is None:
                    _not_run(axes, xlim=(0, 1), ylim=(0, 1))
                else:
                    draw_reliability(axes, bins, PALETTE[0])
                axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), xlabel="confidence", box_aspect=1)
                axes.set_ylabel(f"{plain(panel, 26)}\naccuracy" if place == 0 else "")
                axes.set_title(f"{plain(label, 30)}\n{heading}", size=12, loc="left")
        return _drawn(figure, "Reliability diagrams: accuracy against confidence.")


def _over_a_panel(label: str) -> str:
    """A label as it fits over a narrow panel, its variant on a line of its own."""
    return "\n".join(plain(part, 18) for part in label.split(", "))


def densities(panels: Sequence[tuple[str, Sequence[Density | str]]], *, names: tuple[str, str]) -> Drawn:
    """Densities of entropy inside and outside, a row a network, a column a method; a name alone was not run."""
    columns = max(len(shown) for _, shown in panels)
    with drawing(WIDE, 60 + 190 * len(panels)) as figure:
        grid = figure.subplots(len(panels), columns, squeeze=False)
        for number, (row, (panel, shown)) in enumerate(zip(grid, panels, strict=True), 1):
            for place, (axes, each) in enumerate(zip(row, shown, strict=False)):
                if isinstance(each, str):
                    axes.set_title(_over_a_panel(each), size=12)
                    _not_run(axes, xticks=(), yticks=())
                else:
                    axes.set_title(f"{_over_a_panel(each.label)}\n{each.heading}", size=12)
                    for part, style in zip((each.inside, each.outside), DENSITY_STYLES, strict=True):
                        _draw_density(axes, *part, *style)
                    axes.set_ylim(bottom=0)
                    axes.xaxis.set_major_locator(MaxNLocator(3))
                    axes.yaxis.set_major_locator(MaxNLocator(3))
                if number == len(panels):
                    axes.set_xlabel("entropy, nats")
                axes.set_ylabel(f"{plain(panel, 26)}\ndensity" if place == 0 else "")
        lines = [figure.axes[0].plot([], [], color=c, linestyle=s, linewidth=2)[0] for c, s in DENSITY_STYLES]
        figure.legend(lines, [plain(name, 30) for name in names], loc="outside upper left", ncols=2)
        return _drawn(figure, f"Densities of predictive entropy on {names[0]} and {names[1]}.")


def ladders(
    panels: Mapping[str, Mapping[str, Sequence[tuple[str, float | None, float | None, float | None]]]],
    *,
    styled: Mapping[str, tuple[str, str]],
) -> Drawn:
    """Rows of a table as dots: (label, measured, its error, published); a diamond is the published number.

    One number that is far beyond the others is written at the edge instead.
    """
    metrics = list(next(iter(panels.values())))
    rows = [max(len(column) for column in columns.values()) for columns in panels.values()]
    with drawing(WIDE, 60 + sum(55 + 30 * n for n in rows)) as figure:
        grid = figure.subplots(len(panels), len(metrics), squeeze=False, height_ratios=[55 + 30 * n for n in rows])
        for line, (panel, columns) in zip(grid, panels.items(), strict=True):
            for place, (axes, (metric, points)) in enumerate(zip(line, columns.items(), strict=True)):
                _draw_ladder(axes, points, styled)
                axes.set_yticks(range(len(points)), [plain(label, 36) for label, *_ in points] if place == 0 else [])
                axes.set_title(f"{panel}\n{metric}" if place == 0 else metric, size=12, loc="left")
        return _drawn(figure, f"{', '.join(metrics)} of each row; {BARS}; diamonds are published numbers.")


def _not_run(axes: Axes, **empty: Sequence[float]) -> None:
    axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center", alpha=0.6)
    axes.set(**empty)


def _draw_line(axes: Axes, line: Line, colour: str, mark: str) -> None:
    if not line.points:
        return
    xs, ys, halves = zip(*sorted(line.points), strict=True)
    (drawn,) = axes.plot(xs, ys, color=colour, marker=mark, markersize=5.5, linewidth=1.6, markeredgewidth=0.5)
    set_css_class(drawn, "line")
    for x, y, half in zip(xs, ys, halves, strict=True):
        if half is not None and math.isfinite(half):
            axes.vlines(x, max(y - half, 0.0), y + half, color=colour, linewidth=1, alpha=0.55)


def _dress(axes: Axes, points: Sequence[tuple[float, float, float | None]], log: bool) -> None:
    """Ticks at what was run; bars may leave the panel, so that the values can be distinguished."""
    if not points:
        return
    ticks = sorted({x for x, _, _ in points})
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
    axes.set_xticks(ticks if len(ticks) < 7 else ticks[:: len(ticks) // 3])
    axes.margins(x=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_ylim(0, 1.2 * max(y for _, y, _ in points) or 1)


def _draw_density(axes: Axes, edges: Sequence[float], counts: Sequence[float], colour: str, dashes: object) -> None:
    whole = sum(counts) * (edges[1] - edges[0])
    heights = [count / whole for count in counts]
    axes.stairs(heights, edges, color=colour, fill=True, alpha=0.22)
    set_css_class(axes.stairs(heights, edges, color=colour, linewidth=1.6, linestyle=dashes), "density")  # pyright: ignore


def _far(values: Sequence[float]) -> float | None:
    """The largest of several, if it is four times the next: on one axis with it, the others would be a heap."""
    *others, largest = sorted(values) if values else [0.0]
    return largest if len(others) > 1 and largest > 4 * others[-1] else None


def _write(axes: Axes, text: str, place: int, side: Literal["center", "right"], **style: Any) -> Annotation:
    where = (0.5 if side == "center" else 0.98, place)
    return axes.annotate(text, where, xycoords=("axes fraction", "data"), ha=side, va="center", size=11, **style)


def _draw_ladder(
    axes: Axes,
    points: Sequence[tuple[str, float | None, float | None, float | None]],
    styled: Mapping[str, tuple[str, str]],
) -> None:
    far = _far([number for _, value, _, published in points for number in (value, published) if number is not None])
    for place, (label, value, half, published) in enumerate(points):
        colour, mark = styled[label]
        if value is None:
            _write(axes, "not run", place, "center", alpha=0.6)
        elif value == far:
            set_css_class(_write(axes, f"{value:.3g} \N{RIGHTWARDS ARROW}", place, "right", color=colour), "far")
        else:
            if half is not None and math.isfinite(half):
                axes.hlines(place, max(value - half, 0.0), value + half, color=colour, linewidth=2)
            set_css_class(axes.plot(value, place, mark, color=colour, markersize=7)[0], "dot")
        if published is not None:
            (dot,) = axes.plot(published, place, "D", color=INK, markerfacecolor="none", markersize=8, mew=1.2)
            set_css_class(dot, "published")
    axes.set_ylim(len(points) - 0.4, -0.6)
    hide_axis(axes, "y")
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    axes.margins(x=0.12)


def _shared_legend(figure: Figure, labels: set[str], styled: Mapping[str, tuple[str, str]]) -> None:
    shown = [label for label in styled if label in labels]
    if len(shown) < 2:
        return
    handles = [
        figure.axes[0].plot([], [], color=styled[label][0], marker=styled[label][1], markersize=6, linewidth=1.6)[0]
        for label in shown
    ]
    figure.legend(handles, [plain(label, 30) for label in shown], loc="outside upper left", ncols=min(len(shown), 7))


def _drawn(figure: Figure, says: str) -> Drawn:
    svg, file = rendered(figure, says), io.BytesIO()
    figure.set_layout_engine(None)  # everything has its place by now: finding it is half of the work
    figure.savefig(file, format="png", dpi=144, facecolor="white", metadata={"Software": None})
    return Drawn(svg, file.getvalue(), says)
