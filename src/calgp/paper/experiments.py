"""The paper's experiments as data: claims, cells, published numbers, verdicts and drawings."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from calgp.data.corruptions import CORRUPTIONS
from calgp.errors import CalgpError
from calgp.runs import Run
from calgp.runs.jobs import Shift

from . import verdicts
from .published import FIGURE1, LEARNED, TABLE_GPDNN_MCD, TABLE_LEARNED, TABLE_RF, TABLE_SORF, Published
from .rows import DETECTION, PAPER, Cell
from .scales import (
    ALL,
    CAL,
    CGP,
    CIFAR10,
    CIFAR10_DEEP,
    CIFAR10_DEPTH,
    CIFAR100_DEEP,
    EXISTING,
    GPDNN,
    GPDNN_MCD,
    INTEGRATED,
    MCD,
    MNIST,
    MNIST_DEEP,
    OURS,
    RF,
    SORF,
    SVDKL,
    Scale,
    faithful,
)
from .verdicts import Rows, Verdict

Drawing = Literal["reliability", "curves", "densities", "dots"]


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper, or one beyond it.

    claim: in a sentence. cells: what is run, by the scale. metrics: the columns of its table. axis: what x is.
    log: x on a logarithmic scale. intervals: in the table, instead of standard errors.
    frontier: also draw calibration against the cost of a prediction.
    priced: its cells themselves set the paper against the code, so `--faithful` changes none of them.
    notes: what readers must know.
    """

    name: str
    title: str
    claim: str
    cells: Callable[[Scale], tuple[Cell, ...]]
    verdicts: tuple[verdicts.Judge, ...]
    drawing: Drawing
    published: tuple[Published, ...] = ()
    metrics: tuple[str, ...] = PAPER
    axis: str = ""
    log: bool = False
    intervals: bool = False
    frontier: bool = False
    priced: bool = False
    notes: tuple[str, ...] = ()

    def judged(self, rows: Rows) -> list[Verdict]:
        """Its claims, by what was found."""
        return [judge(rows) for judge in self.verdicts]

    def planned(self, scale: Scale, *, authors: bool = False) -> tuple[Cell, ...]:
        """The cells at a scale; `authors`: as the authors' code has it where that differs from the paper."""
        cells = () if self.name in scale.leaves_out else self.cells(scale)
        if not authors or self.priced:
            return cells
        as_coded = (("ece", "ece_authors"),)
        return tuple(
            replace(cell, runs=tuple(map(faithful, cell.runs)), instead=cell.instead or as_coded) for cell in cells
        )


def _largest(
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


def _each_largest(scale: Scale, methods: tuple[str, ...], panel: str) -> tuple[Cell, ...]:
    """Methods on a panel, each at the largest training size at which it is run itself."""
    setting = scale.settings[panel]
    return tuple(
        Cell(method, panel, None, scale.runs(method, panel, setting.largest_of((method,))), setting.samples)
        for method in methods
    )


def _sizes(scale: Scale) -> tuple[Cell, ...]:
    return tuple(
        Cell(method, panel, float(setting.size(size)), scale.runs(method, panel, size), setting.samples)
        for panel in (MNIST, CIFAR10, CIFAR10_DEEP, CIFAR100_DEEP)
        if panel in scale.settings
        for setting in [scale.settings[panel]]
        for method in (*ALL, *INTEGRATED)
        if method in scale.methods
        for size in setting.steps
    )


def _with_options(runs: tuple[Run, ...], **options: object) -> tuple[Run, ...]:
    """The runs with other options of their method."""
    return tuple(replace(run, method=replace(run.method, **options)) for run in runs)  # pyright: ignore[reportArgumentType]


def _depths(scale: Scale) -> tuple[Cell, ...]:
    setting = scale.settings[CIFAR10_DEPTH]
    runs = scale.runs(RF, CIFAR10_DEPTH, setting.largest)
    return tuple(
        Cell(
            RF, CIFAR10_DEPTH, float(depth),
            _with_options(runs, depth=depth, width=scale.width if depth > 1 else None),
            setting.samples,
        )
        for depth in scale.depths
    )  # fmt: skip


def _outside(scale: Scale) -> tuple[Cell, ...]:
    """Trained on MNIST, at the largest size that has as many seeds as any (intervals want three)."""
    cells = []
    for panel in (MNIST, MNIST_DEEP):
        if panel not in scale.settings:
            continue
        setting = scale.settings[panel]
        most = max(len(seeds) for seeds in setting.seeds.values())
        size = [size for size, seeds in setting.seeds.items() if len(seeds) == most][-1]
        for method in (RF, SORF, MCD, CAL, GPDNN, *INTEGRATED):
            if method not in scale.methods:
                continue
            runs = scale.runs(method, panel, size)
            cells.append(Cell(method, panel, None, runs, setting.samples, outside=setting.outside))
    return tuple(cells)


def _thetas(scale: Scale) -> tuple[Cell, ...]:
    fixed = _largest(scale, (SORF,), (MNIST, CIFAR10, CIFAR10_DEEP, CIFAR100_DEEP), beside=ALL)
    learned = [
        replace(
            cell,
            method=LEARNED,
            runs=_with_options(cell.runs, learn_theta=True) if scale.settings[cell.panel].learned_theta else (),
        )
        for cell in fixed
    ]
    return tuple(cell for pair in zip(fixed, learned, strict=True) for cell in pair)


GPDNN_PRIOR = "GPDNN, prior on filters"


def _masked_filters(scale: Scale) -> tuple[Cell, ...]:
    """GPDNN+MCD, and what it is without its masks alone: the same rate, the same prior on the filters."""
    cells = _largest(scale, (RF, GPDNN_MCD, GPDNN), (MNIST, CIFAR10, CIFAR10_DEEP, CIFAR100_DEEP))
    without_masks = [
        replace(cell, method=GPDNN_PRIOR, runs=_with_options(cell.runs, keep_filters=1.0, filter_prior=True))
        for cell in cells
        if cell.method == GPDNN_MCD
    ]
    return (*cells, *without_masks)


@dataclass(frozen=True)
class Difference:
    """Something in which the paper and its authors' code differ: how the base is changed to price it."""

    says: str
    method: dict[str, object] | None = None
    backbone: dict[str, object] | None = None
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
    MNIST_DEEP: (
        Difference(BASE),
        Difference("batch moments in prediction (code)", backbone={"batch_moments": True}),
    ),
}


def _ablation(scale: Scale) -> tuple[Cell, ...]:
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
    whole = tuple(map(faithful, next(cell for cell in cells if cell.panel == MNIST).runs))
    cells.append(
        Cell("all that the code has (--faithful)", MNIST, None, whole, scale.settings[MNIST].samples,
             instead=(("ece", "ece_authors"),))
    )  # fmt: skip
    return tuple(cells)


def _shift(scale: Scale) -> tuple[Cell, ...]:
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


CALIBRATED = 0.06
_BOUND = (
    f"An ECE below {CALIBRATED} counts as well calibrated, above it as miscalibrated: the paper calls its own ECE of "
    ".012 to .051 well calibrated, and .294 to .481 miscalibrated."
)
_FULL_ONLY = "The paper prints numbers for full training sets only; its other curves have no published values."
_EVERY = (
    Experiment(
        "fig1", "Reliability of existing combinations of CNNs and GPs on CIFAR-100",
        "Existing combinations of CNNs and GPs are miscalibrated: GPDNN is under-confident, CGP and SVDKL are "
        "over-confident.",
        lambda scale: _each_largest(scale, EXISTING, CIFAR100_DEEP),
        (
            *(
                verdicts.above(f"{method} is miscalibrated (ECE above {CALIBRATED})", (method,), "ece", CALIBRATED)
                for method in EXISTING
            ),
            verdicts.signed("GPDNN is under-confident", GPDNN, "gap", -1),
            verdicts.signed("CGP is over-confident", CGP, "gap", 1),
            verdicts.signed("SVDKL is over-confident", SVDKL, "gap", 1),
        ),
        "reliability", FIGURE1, metrics=(*PAPER, "gap"),
        notes=(_BOUND, "Each method is judged at its own largest number of training images."),
    ),
    Experiment(
        "fig2", "Errors, likelihood and calibration against the number of training images",
        "CNN+GP(RF) and CNN+GP(SORF) improve on GPDNN, CGP and SVDKL in all four metrics, match CNN+MCD, and beat "
        "CNN+CAL but sometimes in ECE and BRIER.",
        _sizes,
        (
            verdicts.lower("CNN+GP improves on GPDNN, CGP and SVDKL in ERR, MNLL, ECE and BRIER", OURS, EXISTING),
            verdicts.alike("SORF is comparable with RF", SORF, RF),
            verdicts.alike("CNN+GP(RF) is comparable with CNN+MCD", RF, MCD),
            verdicts.alike("CNN+GP(SORF) is comparable with CNN+MCD", SORF, MCD),
            verdicts.lower("CNN+GP is better than CNN+CAL in ERR and MNLL", OURS, (CAL,), ("err", "mnll")),
        ),
        "curves", (*TABLE_RF, *TABLE_SORF), axis="training images", log=True, frontier=True,
        notes=(_FULL_ONLY,),
    ),
    Experiment(
        "fig3", "The depth of the deep Gaussian process",
        "Deeper GPs lower the error, and raise the calibration error, which stays around 3 %.",
        _depths,
        (
            verdicts.trend("Depth lowers ERR", "err", -1),
            verdicts.trend("Depth lowers MNLL", "mnll", -1),
            verdicts.trend("Depth raises ECE", "ece", 1),
            verdicts.below("ECE stays around 3 % (below 0.04)", (RF,), "ece", 0.04),
        ),
        "curves", axis="layers of the GP",
        notes=(
            "The text says the shallow network, the caption ResNet, the authors' README LeNet-3; LeNet-3 is run.",
            "The paper prints no numbers for this figure.",
        ),
    ),
    Experiment(
        "fig4", "Uncertainty about unknown classes: MNIST against notMNIST",
        "Trained on MNIST, the proposed models are sure about MNIST and uncertain about notMNIST, as CNN+MCD is and "
        "CNN+CAL is not, also with a deep network. GPDNN is uncertain too, but not with a deep network.",
        _outside,
        (
            verdicts.exceeds(
                "CNN+GP has a higher entropy on notMNIST than on MNIST", OURS, "entropy_outside", "entropy_inside"),
            verdicts.lower(
                "CNN+GP separates notMNIST from MNIST better than CNN+CAL (FPR95)", OURS, (CAL,), ("fpr95",)),
            verdicts.alike("CNN+GP(RF) is comparable with CNN+MCD (AUROC within 2 %)", RF, MCD, ("auroc",), share=0.02),
            verdicts.between_panels(
                "Deep GPDNN has more predictions of low entropy on notMNIST than shallow GPDNN",
                GPDNN, "low_entropy_outside", less=MNIST, more=MNIST_DEEP),
            verdicts.on((MNIST_DEEP,), verdicts.lower(
                "Deep GPDNN has more predictions of low entropy on notMNIST than deep CNN+GP", OURS, (GPDNN,),
                ("low_entropy_outside",))),
        ),
        "densities", metrics=("err", "entropy_inside", "entropy_outside", "low_entropy_outside", *DETECTION),
        intervals=True,
        notes=(
            "The paper shows densities and prints no numbers; the table is calgp's own.",
            "Low entropy: below a tenth of log 10, the largest entropy of ten classes. The paper says that "
            "GPDNN “assigns large uncertainty to predictions on notMNIST, although with the deeper convolutional "
            "architecture it yields a large fraction of predictions with low entropy”.",
        ),
    ),
    Experiment(
        "fig5", "Reliability of CNN+GP(RF) and CNN+MCD",
        "CNN+GP(RF) and Bayesian CNNs (CNN+MCD) are well calibrated.",
        lambda scale: _largest(scale, (RF, MCD), (CIFAR10, CIFAR10_DEEP, CIFAR100_DEEP)),
        (verdicts.below(f"ECE of CNN+GP(RF) and CNN+MCD is below {CALIBRATED}", (RF, MCD), "ece", CALIBRATED),),
        "reliability", tuple(row for row in TABLE_RF if row.panel != MNIST), metrics=(*PAPER, "gap"),
        notes=(_BOUND,),
    ),
    Experiment(
        "tab2", "CNN+GP(SORF): θ fixed against learned",
        "Learning the covariance parameters θ changes little.",
        _thetas,
        (verdicts.alike("θ learned is comparable with θ fixed", LEARNED, SORF),),
        "dots", (*TABLE_SORF, *TABLE_LEARNED),
    ),
    Experiment(
        "tab3", "GPDNN with masked filters",
        "Inferring the filters by masks rescues GPDNN on shallow networks; CNN+GP(RF) stays better on deep ones.",
        _masked_filters,
        (
            verdicts.lower("Masked filters improve GPDNN in ECE", (GPDNN_MCD,), (GPDNN_PRIOR,), ("ece",)),
            verdicts.lower("Masked filters improve GPDNN in ERR", (GPDNN_MCD,), (GPDNN_PRIOR,), ("err",)),
            verdicts.on((MNIST, CIFAR10), verdicts.alike(
                "CNN+GP(RF) is comparable with GPDNN+MCD on shallow networks", RF, GPDNN_MCD)),
            verdicts.on((CIFAR10_DEEP, CIFAR100_DEEP), verdicts.lower(
                "CNN+GP(RF) is better than GPDNN+MCD on deep networks", (RF,), (GPDNN_MCD,), ("err", "mnll", "brier"))),
        ),
        "dots", (*TABLE_RF, *TABLE_GPDNN_MCD),
        notes=(
            "The caption says SORF where header and values are RF's.",
            f"“{GPDNN_PRIOR}” is GPDNN+MCD without its masks: the same learning rate, the same prior on the filters.",
        ),
    ),
    Experiment(
        "ablation", "What each difference between the paper and its authors' code costs",
        "The published numbers were made by code that differs from the text; each difference is priced by itself.",
        _ablation,
        tuple(
            verdicts.alike(f"“{each.says}” changes little", each.says, BASE, ("err", "mnll", "ece"))
            for differences in DIFFERENCES.values() for each in differences if each.says != BASE and not each.instead
        ),
        "dots", priced=True,
        notes=(
            "Not priced: the authors' subset (the first images of a file; calgp draws it by seed), their budget by the "
            "clock, and the constant term of the KL.",
        ),
    ),
)  # fmt: skip
_SHIFT = Experiment(
    "shift", "Beyond the paper: calibration under shift",
    "On corrupted test images, methods that infer their filters stay better calibrated than CNN+CAL.",
    _shift,
    (
        verdicts.where(
            lambda row: row.x != 0,
            verdicts.lower("CNN+GP has a lower ECE than CNN+CAL on corrupted images", OURS, (CAL,), ("ece",)),
        ),
        verdicts.trend("Corruption raises MNLL", "mnll", 1),
    ),
    "curves", metrics=("err", "mnll", "ece", "brier", "prediction_ms"), axis="severity", frontier=True,
)  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in (*_EVERY, _SHIFT)}


def chosen(name: str) -> list[Experiment]:
    """An experiment by its name, or all of them.

    >>> [each.name for each in chosen("fig2")]
    ['fig2']
    """
    if name == "all":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise CalgpError(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}, and all.")
    return [EXPERIMENTS[name]]
