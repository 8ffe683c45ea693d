"""The numbers that the paper prints, with the network and the training images behind them."""

from dataclasses import dataclass

from calgp.search.duration import IMAGES

from .rows import PAPER
from .scales import CGP, CIFAR100_DEEP, GPDNN, GPDNN_MCD, PANELS, RF, SCALES, SORF, SVDKL, network_of


@dataclass(frozen=True)
class Published:
    """Numbers of the paper for a method, and where they stand in it. They are of the panel's full training set."""

    method: str
    panel: str
    values: dict[str, float]
    source: str

    @property
    def network(self) -> str:
        """The paper's network for the panel; CGP has none."""
        return network_of(SCALES["paper"].run(CGP if self.method == CGP else RF, self.panel, None, 0))

    @property
    def images(self) -> int:
        """The number of training images."""
        return IMAGES[SCALES["paper"].settings[self.panel].source]


def _published(method: str, source: str, **panels: str) -> tuple[Published, ...]:
    names: dict[str, str] = dict(zip(("mnist", "cifar10", "deep10", "deep100"), PANELS, strict=True))
    return tuple(
        Published(method, names[key], dict(zip(PAPER, map(float, text.split("/")), strict=True)), source)
        for key, text in panels.items()
    )


_TABLE2, _TABLE3 = "supplement, table of θ (tab2)", "supplement, table of GPDNN with MCD (tab3)"
LEARNED = f"{SORF}, θ learned"


def after_temperature(method: str) -> str:
    """What a method with a temperature is called."""
    return f"{method}+T"


def of_the_paper(method: str) -> str:
    """What a method with the paper's settings is called."""
    return f"{method}, the paper's settings"


TABLE_RF = _published(
    RF, _TABLE3, mnist=".005/.014/.004/.0071", cifar10=".172/.535/.012/.245", deep10=".111/.344/.051/.168",
    deep100=".351/1.255/.050/.466",
)  # fmt: skip
TABLE_SORF = _published(
    SORF, _TABLE2, mnist=".006/.018/.002/.009", cifar10=".203/.610/.015/.288", deep10=".113/.348/.051/.170",
    deep100=".352/1.264/.050/.466",
)  # fmt: skip
TABLE_LEARNED = _published(
    LEARNED, _TABLE2, mnist=".005/.018/.003/.008", cifar10=".192/.584/.010/.271", deep10=".115/.355/.054/.173",
    deep100=".359/1.287/.054/.478",
)  # fmt: skip
TABLE_GPDNN_MCD = _published(
    GPDNN_MCD, _TABLE3, mnist=".005/.019/.005/.008", cifar10=".172/.531/.012/.244", deep10=".190/.675/.036/.278",
    deep100=".820/8.606/.527/1.268",
)  # fmt: skip
FIGURE1 = tuple(
    Published(method, CIFAR100_DEEP, {"ece": ece, "brier": brier}, "figure 1")
    for method, ece, brier in ((GPDNN, 0.294, 0.895), (CGP, 0.481, 1.165), (SVDKL, 0.356, 1.159))
)
