"""How large an experiment is run: the same cells as seconds, hours or the paper's settings. Pure data and functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from calgp.errors import name_error
from calgp.json_values import Json
from calgp.methods import METHODS, Method
from calgp.nets import BACKBONES, Backbone, LeNet, ResNet
from calgp.runs import Run
from calgp.search.duration import IMAGES
from calgp.search.halving import Budget

# data and network, in the paper's words
MNIST, CIFAR10 = "MNIST, LeNet", "CIFAR-10, LeNet"
CIFAR10_DEEP, CIFAR100_DEEP = "CIFAR-10, ResNet", "CIFAR-100, ResNet"
MNIST_DEEP, CIFAR10_DEPTH = "MNIST, ResNet", "CIFAR-10, LeNet-3"
SHALLOW, DEEP = (MNIST, CIFAR10), (CIFAR10_DEEP, CIFAR100_DEEP)
PANELS = SHALLOW + DEEP

RF, SORF, MCD, CAL = "CNN+GP(RF)", "CNN+GP(SORF)", "CNN+MCD", "CNN+CAL"
GPDNN, GPDNN_MCD, CGP, SVDKL = "GPDNN", "GPDNN+MCD", "CGP", "SVDKL"
SORF_INTEGRATED, RF_INTEGRATED = "CNN+GP(SORF), integrated", "CNN+GP(RF), integrated"  # beyond the paper: one pass
OURS, EXISTING, INTEGRATED = (RF, SORF), (GPDNN, CGP, SVDKL), (SORF_INTEGRATED, RF_INTEGRATED)
ALL = (RF, SORF, MCD, CAL, GPDNN, CGP, SVDKL)  # figure 2's

RESNET_RATIO = 4  # N_RF is four times the 64 features of a ResNet (the authors' ratio), whatever a LeNet has


@dataclass(frozen=True)
class Setting:
    """A panel at a scale: data, network, and for each training size how long, with which seeds, and by whom.

    steps: optimiser steps by training size (None: all images); epochs instead, where there are no steps.
    seeds: by training size. only: the methods that are run at a size; all of them unless it is named here.
    options, rates: of a method, where the panel asks for others than the scale.
    method_seeds: of a method that has others. learned_theta: whether θ is learned here, too (table 2).
    tuned_at: the scale whose search on this panel gives the options; this scale's own, unless it is named.
    """

    source: str
    backbone: Backbone
    steps: Mapping[int | None, int | None]
    seeds: Mapping[int | None, tuple[int, ...]]
    only: Mapping[int | None, tuple[str, ...]] = field(default_factory=dict)
    outside: str | None = None
    samples: int = 50
    options: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    method_seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    learned_theta: bool = True
    tuned_at: str | None = None

    @property
    def largest(self) -> int | None:
        return list(self.steps)[-1]

    def largest_of(self, methods: tuple[str, ...]) -> int | None:
        """The largest training size at which all of these methods are run; the largest of all, if there is none."""
        sizes = [size for size in self.steps if set(methods) <= set(self.only.get(size, methods))]
        return sizes[-1] if sizes else self.largest

    def size(self, train_size: int | None) -> int:
        """The number of training images."""
        return IMAGES[self.source] if train_size is None else train_size


@dataclass(frozen=True)
class Scale:
    """All panels at a scale, the methods with their options and learning rates, and what they share."""

    name: str
    says: str
    settings: Mapping[str, Setting]
    methods: Mapping[str, tuple[Method, float]]
    batch_size: int
    schedule: str
    # where a setting has no steps; else a run's own default, so that keys are those of `calgp train`
    epochs: float = 10.0
    depths: tuple[int, ...] = (1, 2, 3)
    width: int | None = None  # of a hidden layer of the deep GP; None: as many as features, as the authors have it
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    corrupted: int | None = None  # test images that are corrupted, a balanced part; None: all
    warning: str | None = None  # what readers of its pages must know first
    precision: str = "32-true"
    holdout: float | None = None  # of every run, for its temperature; None: a tenth, of methods with a calibrator
    tuning: Mapping[str, Budget] = field(default_factory=dict)  # by panel: see paper/queue.py
    leaves_out: tuple[str, ...] = ()  # experiments that are not planned

    def run(self, method: str, panel: str, train_size: int | None, seed: int) -> Run:
        """One training."""
        setting = self.settings[panel]
        described, rate = self.methods[method]
        described = _changed(described, **setting.options.get(method, {}))
        # patches need no network: one run serves the panels of all networks
        backbone = setting.backbone if described.uses_network else BACKBONES["lenet"]
        if backbone.few_features:
            described = described.with_ratio(RESNET_RATIO)
        return Run(
            described, backbone, source=setting.source, train_size=train_size,
            holdout=(0.1 if described.calibrator else 0.0) if self.holdout is None else self.holdout,
            augment=(), crop=4, calibration=False,
            seed=seed, steps=setting.steps[train_size], epochs=self.epochs, batch_size=self.batch_size,
            learning_rate=setting.rates.get(method, rate), schedule=self.schedule,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    def runs(self, method: str, panel: str, train_size: int | None) -> tuple[Run, ...]:
        """A training for each seed; none where the scale leaves the cell out."""
        setting = self.settings[panel]
        if method not in setting.only.get(train_size, (method,)):
            return ()
        seeds = setting.method_seeds.get(method, setting.seeds[train_size])
        return tuple(self.run(method, panel, train_size, seed) for seed in seeds)


def network_of(run: Run) -> str:
    """The network's name; CGP is a Gaussian process on patches and has none."""
    if not run.method.uses_network:
        return "none"
    label = run.backbone_label
    named = label.startswith("resnet") and " n=" not in label  # the default depth, too, is named
    return label.replace("resnet", f"resnet n={ResNet().n}", 1) if named else label


def at_paper_scale(panel: str, runs: Sequence[Run]) -> bool:
    """Whether runs have the paper's data and network, and train on all images (a hold-out counts as trained on).

    Budgets are not compared: the paper names neither steps nor epochs.
    """
    setting = SCALES["paper"].settings.get(panel)
    if not runs or setting is None or any(run.source != setting.source or run.train_size is not None for run in runs):
        return False
    network = setting.backbone.as_authors()  # `--faithful` changes how a network predicts, not the network
    return all(run.backbone.as_authors() == network for run in runs if run.method.uses_network)


def faithful(run: Run) -> Run:
    """The run as the authors' code has it where that differs from the paper (docs/reproduce.md lists it).

    Φ without √2, Ω unmasked and N_RF as large as d, ℓ = 1, a mask for every element that keeps half of them, batch
    moments in prediction, batches of 100, Adam at a constant 10⁻³.
    """
    method, backbone = run.method.as_authors(), run.backbone.as_authors()
    if backbone.few_features:
        method = method.with_ratio(RESNET_RATIO)
    batch = min(100, run.batch_size) if run.steps is not None else 100
    return replace(
        run, method=method, backbone=backbone, batch_size=batch, learning_rate=1e-3, schedule="constant",
        optimiser="adam",
    )  # fmt: skip


def with_the_papers_settings(run: Run, method: str) -> Run:
    """The run as the paper trains: batches of 1,000, Adam at a constant 10⁻³, σ = ℓ = 1, all masks keeping half.

    It sees twice as many images: in batches of 1,000 it learns slowly, and the paper's budget is hours of a GPU.
    """
    steps = run.steps and max(2 * run.steps * run.batch_size // 1000, 1)
    return replace(
        run, method=METHODS[PRESETS[method]], batch_size=1000, learning_rate=1e-3, schedule="constant", steps=steps
    )


def _changed(method: Method, **options: object) -> Method:
    return replace(method, **options)  # pyright: ignore[reportArgumentType]


PRESETS = {
    RF: "cnn-gp-rf-paper", SORF: "cnn-gp-sorf-paper", MCD: "cnn-mcd", CAL: "cnn-cal", GPDNN: "gpdnn",
    GPDNN_MCD: "gpdnn-mcd", CGP: "cgp", SVDKL: "svdkl", SORF_INTEGRATED: "cnn-gp-sorf-paper",
    RF_INTEGRATED: "cnn-gp-rf-paper",
}  # fmt: skip


def _methods(
    rate: float, options: Mapping[str, Mapping[str, Json]], rates: Mapping[str, float] = MappingProxyType({})
) -> dict[str, tuple[Method, float]]:
    """Presets in their order of value, each with its own options, and its learning rate where it is another one."""
    return {
        name: (
            _changed(METHODS[PRESETS[name]], **({"integrate": True} if name in INTEGRATED else {}), **own),
            rates.get(name, rate),
        )
        for name, own in options.items()
    }


def _small() -> Scale:
    lenet, lenet3 = LeNet(channels=(4, 8), hidden=(16,)), LeNet(channels=(4, 8, 8), hidden=(16,))
    resnet = ResNet(n=1, widths=(2, 4, 8))
    sizes: dict[int | None, int | None] = {100: 4, 200: 6}

    def setting(backbone: Backbone, *seeds: int) -> Setting:
        return Setting("digits", backbone, sizes, dict.fromkeys(sizes, seeds), outside="letters", samples=2)

    shallow, deep = replace(setting(lenet, 0, 1), method_seeds={CGP: (0,)}), setting(resnet, 0)
    return Scale(
        "smoke", "seconds, on the embedded digits with tiny networks: it proves the machinery, not the paper",
        {MNIST: shallow, CIFAR10: shallow, CIFAR10_DEEP: deep, CIFAR100_DEEP: deep, MNIST_DEEP: deep,
         CIFAR10_DEPTH: setting(lenet3, 0, 1)},
        _methods(1e-2, {
            RF: {"n_rf": 64, "keep_omega": 0.9}, SORF: {}, MCD: {}, CAL: {}, GPDNN: {"inducing": 20},
            GPDNN_MCD: {"inducing": 20}, CGP: {"inducing": 20}, SVDKL: {"reduced": 8, "grid": 16},
            SORF_INTEGRATED: {}, RF_INTEGRATED: {"n_rf": 64, "keep_omega": 0.9},
        }),
        batch_size=32, schedule="one-cycle", depths=(1, 2), width=8, severities=(3,), corrupted=200, holdout=0.1,
        warning="Smoke scale: tiny networks, a few steps, embedded digits. It shows that everything runs; its numbers "
        "say nothing about the paper, and panels only stand for the data and networks that they are named after.",
    )  # fmt: skip


_RF_1024 = {"n_rf": 1024, "keep_omega": 0.9}
# learning rates: chosen on a hold-out of MNIST's training images (tools/mnist_methods.py choose)
_LAPTOP = _methods(
    6e-3,
    {RF: _RF_1024, SORF: {}, MCD: {}, CAL: {}, GPDNN: {}, GPDNN_MCD: {}, CGP: {}, SVDKL: {}},
    {CAL: 3e-3, GPDNN: 3e-3, CGP: 1e-2, SVDKL: 3e-3},
)
# SORF's and RF's from pilots on a hold-out of CIFAR-10; the filters' 0.8 of the others follows them (results/notes)
_LAPTOP_CIFAR = {
    RF: {"sigma": 0.3, "keep_filters": 0.8}, SORF: {"sigma": 0.15, "ratio": 4, "keep_filters": 0.8},
    MCD: {"keep_filters": 0.8}, GPDNN_MCD: {"keep_filters": 0.8},
}  # fmt: skip
# a ResNet(1) of 16 to 64 filters: RF's from pilots on a hold-out of MNIST, where 0.5 left it unfitted (results/notes)
_LAPTOP_DEEP = {method: {"keep_filters": 0.9} for method in (RF, SORF, MCD, GPDNN_MCD)}
_THREE, _TWO, _ONE = (0, 1, 2), (0, 1), (0,)


def _laptop() -> Scale:
    resnet = ResNet(n=1)
    masked, without_patches = (RF, SORF, MCD), (*(method for method in ALL if method != CGP), GPDNN_MCD)
    sizes: dict[int | None, int | None] = {1000: 500, 5000: 1000, 10_000: 2000}
    seeds: dict[int | None, tuple[int, ...]] = dict.fromkeys((1000, 5000, 10_000), _ONE)
    return Scale(
        "laptop", "about ten hours on two cores: real data, sizes and networks that they manage",
        {
            MNIST: Setting(
                "mnist", BACKBONES["lenet"], {1000: 1000, 10_000: 2000, None: 5000},
                {1000: _THREE, 10_000: _THREE, None: _ONE}, {None: without_patches}, "notmnist",
            ),
            CIFAR10: Setting(
                "cifar10", BACKBONES["lenet-cifar"], {**sizes, None: 12_500}, {**seeds, None: _ONE},
                {10_000: without_patches, None: masked}, samples=20, options=_LAPTOP_CIFAR,
                rates={MCD: 1.5e-3, CAL: 1.5e-3},  # with 6e-3 the likelihood of CNN+MCD stops falling
            ),
            CIFAR10_DEEP: Setting(
                "cifar10", resnet, sizes, seeds, {10_000: without_patches}, samples=20, options=_LAPTOP_DEEP
            ),
            CIFAR100_DEEP: Setting(
                "cifar100", resnet, {5000: 1000, 30_000: 4000}, {5000: _ONE, 30_000: _ONE},
                {30_000: without_patches}, samples=20, options=_LAPTOP_DEEP,
            ),
            MNIST_DEEP: Setting(
                "mnist", resnet, {10_000: 1000}, {10_000: _THREE}, outside="notmnist", samples=20, options=_LAPTOP_DEEP
            ),
            CIFAR10_DEPTH: Setting("cifar10", BACKBONES["lenet-3"], {10_000: 1500}, {10_000: _TWO}, samples=20),
        },
        _LAPTOP, batch_size=100, schedule="one-cycle", width=64, corrupted=1000, leaves_out=("settings", "beyond"),
        warning="Laptop scale: smaller training sets, shorter budgets, smaller ResNets than the paper's; stated below.",
    )  # fmt: skip


# every method begins its tuning with the same learning rate, and with its own defaults
_DESK = _methods(2e-3, {
    SORF_INTEGRATED: {}, SORF: {}, MCD: {}, CAL: {}, RF: {"keep_omega": 0.9}, GPDNN: {}, GPDNN_MCD: {}, SVDKL: {},
    CGP: {}, RF_INTEGRATED: {"keep_omega": 0.9},
}, {CGP: 8e-3})  # fmt: skip
_TUNED_BUDGET = Budget(8, 1080, samples=6, images=(1000, 3000, 10_000))
_DESK_TUNING = {
    MNIST: _TUNED_BUDGET,
    **dict.fromkeys((CIFAR10, CIFAR10_DEPTH), Budget(8, 1800, samples=6, images=(3000, 6000, 12_000))),
    CIFAR10_DEEP: Budget(8, 1080, samples=6, images=(2000, 4000, 8000)),
    CIFAR100_DEEP: Budget(8, 1080, samples=6, images=(4000, 8000, 16_000)),
    MNIST_DEEP: Budget(8, 1080, samples=6, images=(1000, 3000, 10_000)),
}


def _desk() -> Scale:
    without_patches = (SORF_INTEGRATED, SORF, MCD, CAL, RF, GPDNN, GPDNN_MCD, SVDKL, RF_INTEGRATED)
    all_images: dict[int | None, int | None] = {None: 15_000}
    once: dict[int | None, tuple[int, ...]] = {None: _ONE}
    return Scale(
        "desk", "about 100 hours of one core: the paper's networks on all images, options by equal tuning",
        {
            MNIST: Setting(
                "mnist", BACKBONES["lenet"], {None: 9000}, {None: _TWO}, {None: without_patches}, outside="notmnist",
                options={RF: _RF_1024, RF_INTEGRATED: _RF_1024}, tuned_at="tuned",
            ),  # first: the cheapest
            CIFAR10: Setting(
                "cifar10", BACKBONES["lenet-cifar"], all_images, once, {None: without_patches},
                method_seeds=dict.fromkeys((SORF_INTEGRATED, RF, SORF, MCD, CAL), _THREE),
            ),
            CIFAR10_DEEP: Setting(
                "cifar10", ResNet(n=5), all_images, once, {None: without_patches},
                method_seeds=dict.fromkeys((SORF_INTEGRATED, SORF, CAL), _TWO), learned_theta=False,
            ),
            CIFAR100_DEEP: Setting(
                "cifar100", ResNet(n=5), all_images, once, {None: (SORF_INTEGRATED, SORF, MCD, CAL, GPDNN, SVDKL)},
                learned_theta=False,
            ),
            CIFAR10_DEPTH: Setting("cifar10", BACKBONES["lenet-3"], all_images, once, {None: (RF,)}),
            MNIST_DEEP: Setting(
                "mnist", ResNet(n=5), {10_000: 3000}, {10_000: _ONE},
                {10_000: (SORF_INTEGRATED, SORF, RF, MCD, CAL, GPDNN)}, "notmnist",
            ),
        },
        _DESK, batch_size=100, schedule="one-cycle", precision="bf16-mixed", holdout=0.05, tuning=_DESK_TUNING,
        leaves_out=("ablation", "shift"),
        warning="Desk scale: the paper's networks (but ResNet(5) on CIFAR-100, too) on all images, of which every run "
        "holds a twentieth out for a temperature; 15,000 steps of 100 images (MNIST: 9,000), options by equal tuning.",
    )  # fmt: skip


def _tuned() -> Scale:
    """Every method with options of its own: one search on at most 10,000 training images a panel."""
    methods = (SORF_INTEGRATED, SORF, CAL, MCD, RF_INTEGRATED, RF, GPDNN, SVDKL)
    small: dict[int | None, int | None] = {10_000: 2000}
    three: dict[int | None, tuple[int, ...]] = {10_000: _THREE}
    return Scale(
        "tuned", "about 12 hours of one core: 1,000 and 10,000 training images, options by equal tuning, three seeds",
        {
            MNIST: Setting(
                "mnist", BACKBONES["lenet"], {1000: 1000, **small}, {1000: _THREE, **three},
                dict.fromkeys((1000, 10_000), methods), "notmnist",
            ),
            CIFAR10_DEEP: Setting("cifar10", ResNet(n=1), small, three, {10_000: methods}),
            CIFAR10: Setting("cifar10", BACKBONES["lenet-cifar"], small, three, {10_000: methods}),
        },
        _methods(2e-3, {
            SORF_INTEGRATED: {}, SORF: {}, CAL: {}, MCD: {}, GPDNN: {}, SVDKL: {}, RF_INTEGRATED: _RF_1024,
            RF: _RF_1024, GPDNN_MCD: {},  # the last only for desk scale, which takes its options
        }),
        batch_size=100, schedule="one-cycle", precision="bf16-mixed",
        tuning=dict.fromkeys((MNIST, CIFAR10_DEEP, CIFAR10), _TUNED_BUDGET),
        leaves_out=("fig1", "fig3", "fig5", "tab2", "tab3", "ablation", "shift", "settings", "beyond"),
        warning="Tuned scale: at most 10,000 training images and short budgets; a method's options come from one "
        "search a panel, the same for all of its sizes.",
    )  # fmt: skip


def _paper() -> Scale:
    mnist, cifar = (7500, 15_000, 30_000, None), (6200, 12_500, 25_000, None)  # 1/8, 1/4, 1/2, all

    def setting(source: str, backbone: Backbone, sizes: tuple[int | None, ...], outside: str | None = None) -> Setting:
        return Setting(source, backbone, dict.fromkeys(sizes), dict.fromkeys(sizes, _THREE), outside=outside)

    return Scale(
        "paper", "the paper's full settings; meant for a GPU",
        {
            MNIST: setting("mnist", BACKBONES["lenet"], mnist, "notmnist"),
            CIFAR10: setting("cifar10", BACKBONES["lenet-cifar"], cifar),
            CIFAR10_DEEP: setting("cifar10", ResNet(n=5), cifar),
            CIFAR100_DEEP: setting("cifar100", ResNet(n=25), cifar),
            MNIST_DEEP: setting("mnist", ResNet(n=5), (None,), "notmnist"),
            CIFAR10_DEPTH: setting("cifar10", BACKBONES["lenet-3"], (None,)),
        },
        _methods(1e-3, {
            RF: {}, SORF: {}, MCD: {}, CAL: {}, GPDNN: {}, SORF_INTEGRATED: {}, RF_INTEGRATED: {}, GPDNN_MCD: {},
            CGP: {}, SVDKL: {},
        }),
        batch_size=1000, schedule="constant", epochs=200.0, depths=(1, 2, 3, 4, 5), leaves_out=("beyond",),
    )  # fmt: skip


SCALES: dict[str, Scale] = {scale.name: scale for scale in (_small(), _laptop(), _tuned(), _desk(), _paper())}


def find_scale(name: str) -> Scale:
    if name not in SCALES:
        raise name_error("There is no scale", name, SCALES)
    return SCALES[name]
