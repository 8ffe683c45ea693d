"""The cells of each experiment: which methods are trained on which panels, at which sizes, with which options."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from calgp.data.corruptions import CORRUPTIONS
from calgp.json_values import Json
from calgp.runs import Run
from calgp.search.jobs import Shift

from .published import LEARNED, after_temperature, of_the_paper
from .rows import Cell
from .scales import (
    ALL,
    CAL,
    CGP,
    CIFAR10_DEPTH,
    GPDNN,
    GPDNN_MCD,
    INTEGRATED,
    MCD,
    MNIST,
    MNIST_DEEP,
    PANELS,
    RF,
    SHALLOW,
    SORF,
    Scale,
    faithful,
    with_the_papers_settings,
)


def largest(
    scale: Scale, methods: tuple[str, ...], panels: tuple[str, ...], beside: tuple[str, ...] = ()
) -> tuple[Cell, ...]:
    """Methods on panels, each panel at the largest training size at which all of them are run, or all `beside`."""
    cells = []
    for panel in panels:
        setting = scale.settings[panel]
        for method in methods:
            runs = scale.runs(method, panel, setting.largest_of(beside or methods))
            cells.append(Cell(method, panel, None, runs, setting.samples))
    return tuple(cells)


def each_largest(scale: Scale, methods: tuple[str, ...], panel: str) -> tuple[Cell, ...]:
    """Methods on a panel, each at the largest training size at which it is run itself."""
    return tuple(cell for method in methods for cell in largest(scale, (method,), (panel,)))


def sizes(scale: Scale) -> tuple[Cell, ...]:
    return tuple(
        Cell(method, panel, float(setting.size(size)), scale.runs(method, panel, size), setting.samples)
        for panel in PANELS
        if panel in scale.settings
        for setting in [scale.settings[panel]]
        for method in (*ALL, *INTEGRATED)
        if method in scale.methods
        for size in setting.steps
    )


def _with_options(runs: tuple[Run, ...], **options: object) -> tuple[Run, ...]:
    """The runs with other options of their method."""
    return tuple(replace(run, method=replace(run.method, **options)) for run in runs)  # pyright: ignore[reportArgumentType]


def depths(scale: Scale) -> tuple[Cell, ...]:
    setting = scale.settings[CIFAR10_DEPTH]
    runs = scale.runs(RF, CIFAR10_DEPTH, setting.largest)
    cells = []
    for depth in scale.depths:
        changed = _with_options(runs, depth=depth, width=scale.width if depth > 1 else None)
        cells.append(Cell(RF, CIFAR10_DEPTH, float(depth), changed, setting.samples))
    return tuple(cells)


def outside(scale: Scale) -> tuple[Cell, ...]:
    """Trained on MNIST, at the largest size that has as many seeds as any (intervals want three)."""
    cells = []
    for panel in filter(scale.settings.__contains__, (MNIST, MNIST_DEEP)):
        setting = scale.settings[panel]
        most = max(len(seeds) for seeds in setting.seeds.values())
        size = [size for size, seeds in setting.seeds.items() if len(seeds) == most][-1]
        for method in filter(scale.methods.__contains__, (RF, SORF, MCD, CAL, GPDNN, *INTEGRATED)):
            runs = scale.runs(method, panel, size)
            cells.append(Cell(method, panel, None, runs, setting.samples, outside=setting.outside))
    return tuple(cells)


def thetas(scale: Scale) -> tuple[Cell, ...]:
    fixed = largest(scale, (SORF,), PANELS, beside=ALL)
    pairs = []
    for cell in fixed:
        runs = _with_options(cell.runs, learn_theta=True) if scale.settings[cell.panel].learned_theta else ()
        pairs += [cell, replace(cell, method=LEARNED, runs=runs)]
    return tuple(pairs)


GPDNN_PRIOR = "GPDNN, prior on filters"


def masked_filters(scale: Scale) -> tuple[Cell, ...]:
    """GPDNN+MCD, and what it is without its masks alone: the same rate, the same prior on the filters."""
    cells = largest(scale, (RF, GPDNN_MCD, GPDNN), PANELS)
    masked = (cell for cell in cells if cell.method == GPDNN_MCD)
    unmasked = ((cell, _with_options(cell.runs, keep_filters=1.0, filter_prior=True)) for cell in masked)
    return (*cells, *(replace(cell, method=GPDNN_PRIOR, runs=runs) for cell, runs in unmasked))


@dataclass(frozen=True)
class Difference:
    """Something in which the paper and its authors' code differ: how the base is changed to price it."""

    says: str
    method: Mapping[str, Json] | None = None
    backbone: Mapping[str, Json] | None = None
    other_batch: bool = False
    instead: tuple[tuple[str, str], ...] = ()

    def changed(self, run: Run) -> Run:
        batch = (100 if run.batch_size == 1000 else 1000) if self.other_batch else run.batch_size
        steps = run.steps and max(run.steps * run.batch_size // batch, 1)  # as many images are seen
        method = replace(run.method, **self.method or {})  # pyright: ignore[reportArgumentType]
        backbone = replace(run.backbone, **self.backbone or {})  # pyright: ignore[reportArgumentType]
        return replace(run, method=method, backbone=backbone, batch_size=batch, steps=steps)


BASE = "as docs/paper.md"
DIFFERENCES = {
    MNIST: (
        Difference(BASE),
        Difference("Φ without √2 (code)", {"sigma": math.sqrt(0.5)}),
        Difference("Ω without masks (code)", {"keep_omega": 1.0}),
        Difference("ℓ = √d instead of 1", {"lengthscale": None}),
        Difference("one mask for the batch (text)", {"granularity": "shared"}),
        Difference("a mask for each channel", {"granularity": "channel"}),
        Difference("the image masked too (text)", backbone={"mask_first": True}),
        Difference("the other batch size (100 or 1000)", other_batch=True),
        Difference("ECE by midpoints (text)", instead=(("ece", "ece_paper"),)),
        Difference("ECE losing p = 1 (code)", instead=(("ece", "ece_authors"),)),
        Difference("BRIER divided by Q (text)", instead=(("brier", "brier_mean"),)),
    ),
    MNIST_DEEP: (Difference(BASE), Difference("batch moments in prediction (code)", backbone={"batch_moments": True})),
}


def ablation(scale: Scale) -> tuple[Cell, ...]:
    """CNN+GP(RF) at the smallest training size of MNIST, and on a ResNet, changed in one thing at a time."""
    cells = []
    for panel, differences in DIFFERENCES.items():
        setting = scale.settings[panel]
        base = scale.runs(RF, panel, next(iter(setting.steps)))
        if panel == MNIST:  # the text masks half of Ω; scales may keep more
            base = _with_options(base, keep_omega=0.5)
        for each in differences:
            runs = tuple(map(each.changed, base))
            cells.append(Cell(each.says, panel, None, runs, setting.samples, instead=each.instead))
    base = next(cell for cell in cells if cell.panel == MNIST)
    whole, as_coded = tuple(map(faithful, base.runs)), (("ece", "ece_authors"),)
    return *cells, replace(base, method="all that the code has (--faithful)", runs=whole, instead=as_coded)


def settings(scale: Scale) -> tuple[Cell, ...]:
    """The masked methods on LeNets, with the options of the scale and with the paper's own; one seed of these."""
    cells = []
    for cell in largest(scale, (RF, SORF, MCD), SHALLOW):
        own = tuple(with_the_papers_settings(run, cell.method) for run in cell.runs[:1])
        cells += [cell, replace(cell, method=of_the_paper(cell.method), runs=own)]
    return tuple(cells)


def beyond(scale: Scale) -> tuple[Cell, ...]:
    """Every method with a network at its panel's largest size: as trained, and with a temperature from its hold-out.

    For scales that hold images out in every run.
    """
    cells = []
    for panel in PANELS:
        methods = tuple(method for method in scale.methods if method != CGP)
        for cell in each_largest(scale, methods, panel):
            cells.append(cell)
            if cell.method != CAL:  # which has its temperature
                cells.append(replace(cell, method=after_temperature(cell.method), temperature=True))
    return tuple(cells)


def shift(scale: Scale) -> tuple[Cell, ...]:
    """Every method, one seed, on corrupted test images; severity 0 is all of them as they are."""
    setting = scale.settings[MNIST]
    size = setting.largest_of(ALL)
    return tuple(
        Cell(method, kind, float(severity), scale.runs(method, MNIST, size)[:1], setting.samples,
             test=Shift(kind, severity, scale.corrupted) if severity else None)
        for kind in CORRUPTIONS
        for method in (*ALL, *INTEGRATED)
        if method in scale.methods
        for severity in (0, *scale.severities)
    )  # fmt: skip
