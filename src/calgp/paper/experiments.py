"""The paper's experiments as data: claims, cells, published numbers, verdicts and drawings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from calgp.errors import name_error

from . import cells, verdicts
from .cells import BASE, DIFFERENCES, GPDNN_PRIOR
from .published import (
    FIGURE1,
    LEARNED,
    TABLE_GPDNN_MCD,
    TABLE_LEARNED,
    TABLE_RF,
    TABLE_SORF,
    Published,
    after_temperature,
    of_the_paper,
)
from .rows import DETECTION, PAPER, Cell
from .scales import (
    CAL,
    CGP,
    CIFAR10,
    CIFAR100_DEEP,
    DEEP,
    EXISTING,
    GPDNN,
    GPDNN_MCD,
    MCD,
    MNIST,
    MNIST_DEEP,
    OURS,
    RF,
    RF_INTEGRATED,
    SHALLOW,
    SORF,
    SORF_INTEGRATED,
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
        lambda scale: cells.each_largest(scale, EXISTING, CIFAR100_DEEP),
        (
            *(
                verdicts.above(f"{method} is miscalibrated (ECE above {CALIBRATED})", (method,), "ece", CALIBRATED)
                for method in EXISTING
            ),
            verdicts.below("GPDNN is under-confident", (GPDNN,), "gap", 0.0),
            verdicts.above("CGP is over-confident", (CGP,), "gap", 0.0),
            verdicts.above("SVDKL is over-confident", (SVDKL,), "gap", 0.0),
        ),
        "reliability", FIGURE1, metrics=(*PAPER, "gap"),
        notes=(_BOUND, "Each method is judged at its own largest number of training images."),
    ),
    Experiment(
        "fig2", "Errors, likelihood and calibration against the number of training images",
        "CNN+GP(RF) and CNN+GP(SORF) improve on GPDNN, CGP and SVDKL in all four metrics, match CNN+MCD, and beat "
        "CNN+CAL but sometimes in ECE and BRIER.",
        cells.sizes,
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
        cells.depths,
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
        cells.outside,
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
        lambda scale: cells.largest(scale, (RF, MCD), (CIFAR10, *DEEP)),
        (verdicts.below(f"ECE of CNN+GP(RF) and CNN+MCD is below {CALIBRATED}", (RF, MCD), "ece", CALIBRATED),),
        "reliability", tuple(row for row in TABLE_RF if row.panel != MNIST), metrics=(*PAPER, "gap"),
        notes=(_BOUND,),
    ),
    Experiment(
        "tab2", "CNN+GP(SORF): θ fixed against learned",
        "Learning the covariance parameters θ changes little.",
        cells.thetas,
        (verdicts.alike("θ learned is comparable with θ fixed", LEARNED, SORF),),
        "dots", (*TABLE_SORF, *TABLE_LEARNED),
    ),
    Experiment(
        "tab3", "GPDNN with masked filters",
        "Inferring the filters by masks rescues GPDNN on shallow networks; CNN+GP(RF) stays better on deep ones.",
        cells.masked_filters,
        (
            verdicts.lower("Masked filters improve GPDNN in ECE", (GPDNN_MCD,), (GPDNN_PRIOR,), ("ece",)),
            verdicts.lower("Masked filters improve GPDNN in ERR", (GPDNN_MCD,), (GPDNN_PRIOR,), ("err",)),
            verdicts.on(SHALLOW, verdicts.alike(
                "CNN+GP(RF) is comparable with GPDNN+MCD on shallow networks", RF, GPDNN_MCD)),
            verdicts.on(DEEP, verdicts.lower(
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
        cells.ablation,
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
    Experiment(
        "settings", "The paper's settings, and tuned ones",
        "Batches of 1,000, a constant rate of 10⁻³ and masks that keep half cost likelihood, whatever the method.",
        cells.settings,
        tuple(
            verdicts.lower(
                f"Tuned settings of {method} have a lower MNLL", (method,), (of_the_paper(method),), ("mnll",)
            )
            for method in (RF, SORF, MCD)
        ),
        "dots", tuple(row for row in (*TABLE_RF, *TABLE_SORF) if row.panel in SHALLOW),
        notes=(
            "The paper names neither steps nor epochs: runs with its settings see twice as many images as tuned ones.",
        ),
    ),
    Experiment(
        "beyond", "Beyond the paper: a temperature for every method, and masks that are integrated",
        "CNN+GP with a temperature is better than CNN+CAL, and integrated masks are better than sampled ones.",
        cells.beyond,
        (
            verdicts.lower("CNN+GP with a temperature is better than CNN+CAL in ERR, MNLL and ECE",
                           tuple(map(after_temperature, OURS)), (CAL,), ("err", "mnll", "ece")),
            verdicts.lower("CNN+GP(SORF), integrated, with a temperature is better than CNN+CAL in ERR, MNLL and ECE",
                           (after_temperature(SORF_INTEGRATED),), (CAL,), ("err", "mnll", "ece")),
            verdicts.lower("Integrated masks of CNN+GP(SORF) have a lower MNLL than sampled ones",
                           (SORF_INTEGRATED,), (SORF,), ("mnll",)),
            verdicts.lower("Integrated masks of CNN+GP(RF) have a lower MNLL than sampled ones",
                           (RF_INTEGRATED,), (RF,), ("mnll",)),
            *(
                verdicts.lower(
                    f"A temperature lowers the ECE of {method}", (after_temperature(method),), (method,), ("ece",)
                )
                for method in (RF, SORF, MCD, GPDNN, SVDKL)
            ),
        ),
        "dots", (*TABLE_RF, *TABLE_SORF, *TABLE_GPDNN_MCD), metrics=(*PAPER, "gap"),
        notes=("“+T”: with a temperature from the hold-out of the run. Integrated masks predict in one pass.",),
    ),
    Experiment(
        "shift", "Beyond the paper: calibration under shift",
        "On corrupted test images, methods that infer their filters stay better calibrated than CNN+CAL.",
        cells.shift,
        (
            verdicts.where(
                lambda row: row.x != 0,
                verdicts.lower("CNN+GP has a lower ECE than CNN+CAL on corrupted images", OURS, (CAL,), ("ece",)),
            ),
            verdicts.trend("Corruption raises MNLL", "mnll", 1),
        ),
        "curves", metrics=("err", "mnll", "ece", "brier", "prediction_ms"), axis="severity", frontier=True,
    ),
)  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _EVERY}


def chosen(name: str) -> list[Experiment]:
    """An experiment by its name, or all of them.

    >>> [each.name for each in chosen("fig2")]
    ['fig2']
    """
    if name == "all":
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise name_error("There is no experiment", name, [*EXPERIMENTS, "all"])
    return [EXPERIMENTS[name]]
