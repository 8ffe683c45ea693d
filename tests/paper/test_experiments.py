"""The experiments and scales as data: facts that need no training."""

import dataclasses
import math

import pytest

from calgp.data import SOURCES
from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.nets import BACKBONES, ResNet
from calgp.paper import EXPERIMENTS, SCALES, chosen, find_scale, jobs_of
from calgp.paper.cells import GPDNN_PRIOR
from calgp.paper.rows import PAPER, Row
from calgp.paper.scales import (
    ALL,
    CAL,
    CGP,
    CIFAR10,
    CIFAR10_DEEP,
    CIFAR100_DEEP,
    GPDNN,
    MCD,
    MNIST,
    RF,
    SORF,
    SVDKL,
    at_paper_scale,
    faithful,
)
from calgp.paper.tables import comparable_number, described, numbers_table, published_for, table_of
from calgp.run import train_command
from calgp.runs import Run, from_json, to_json
from calgp.search.jobs import key

PAIRS = [(scale, experiment) for scale in SCALES.values() for experiment in EXPERIMENTS.values()]
IDS = [f"{scale.name}-{experiment.name}" for scale, experiment in PAIRS]


def test_names_are_the_papers():
    assert {"fig1", "fig2", "fig3", "fig4", "fig5", "tab2", "tab3", "ablation"} <= set(EXPERIMENTS)


@pytest.mark.parametrize(("scale", "experiment"), PAIRS, ids=IDS)
def test_cells_are_distinct_and_their_runs_can_be_described(scale, experiment):
    cells = experiment.planned(scale)
    places = [(cell.method, cell.panel, cell.x, cell.test) for cell in cells]
    assert len(set(places)) == len(places)
    for run in {run for cell in cells for run in cell.runs}:
        assert from_json(to_json(run)) == run
        assert run.source in SOURCES
        assert run.train_size is None or run.train_size % (SOURCES[run.source].classes or 1) == 0


@pytest.mark.parametrize(("scale", "experiment"), PAIRS, ids=IDS)
def test_judges_say_not_run_where_nothing_was(scale, experiment):
    rows = [Row(cell.method, cell.panel, cell.x, runs=cell.runs) for cell in experiment.planned(scale)]
    for judge in experiment.verdicts:
        assert judge(rows).summary == "not run"


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_a_run_has_one_number_of_samples(scale):
    jobs = jobs_of(cell for experiment in EXPERIMENTS.values() for cell in experiment.planned(scale))
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys)  # else its evaluations would replace one another for ever


def test_every_judge_finds_its_methods_in_the_cells():
    for experiment in EXPERIMENTS.values():
        cells = experiment.planned(SCALES["paper"]) or experiment.planned(SCALES["desk"])
        outside = ("auroc", "fpr95", "entropy_inside", "entropy_outside", "low_entropy_outside")
        made_up = {name: (0.5, 0.6) for name in (*PAPER, "gap", *outside)}
        rows = [Row(cell.method, cell.panel, cell.x, made_up) for cell in cells]
        for judge in experiment.verdicts:
            assert judge(rows).parts, judge(rows).claim


def test_published_numbers_are_the_papers_and_stand_in_cells():
    rf = {p.panel: p.values for p in EXPERIMENTS["tab3"].published if p.method == RF}
    assert rf[CIFAR100_DEEP] == {"err": 0.351, "mnll": 1.255, "ece": 0.05, "brier": 0.466}
    assert {p.method: p.values["ece"] for p in EXPERIMENTS["fig1"].published} == {
        "GPDNN": 0.294, "CGP": 0.481, "SVDKL": 0.356,
    }  # fmt: skip
    for experiment in EXPERIMENTS.values():
        planned = experiment.planned(SCALES["paper"]) or experiment.planned(SCALES["desk"])
        places = {(cell.method, cell.panel) for cell in planned}
        assert {(p.method, p.panel) for p in experiment.published} <= places


def test_published_numbers_stand_beside_the_full_training_set():
    rows = [Row(RF, MNIST, x) for x in (1000.0, 60000.0)]
    assert published_for(EXPERIMENTS["fig2"], rows[0], rows) is None
    assert published_for(EXPERIMENTS["fig2"], rows[1], rows).values["err"] == 0.005  # type: ignore[union-attr]


def planned_rows(experiment: str, scale: str) -> list[Row]:
    return [Row(c.method, c.panel, c.x, runs=c.runs) for c in EXPERIMENTS[experiment].planned(SCALES[scale])]


def test_published_numbers_name_the_papers_network_and_training_images():
    found = {(p.panel, p.network, p.images) for p in EXPERIMENTS["tab3"].published}
    assert found == {
        (MNIST, "lenet", 60_000), (CIFAR10, "lenet-cifar", 50_000), (CIFAR10_DEEP, "resnet n=5", 50_000),
        (CIFAR100_DEEP, "resnet n=25", 50_000),
    }  # fmt: skip
    assert {p.method: p.network for p in EXPERIMENTS["fig1"].published}[CGP] == "none"


def test_published_numbers_stand_beside_ours_only_at_the_papers_network_and_training_set():
    """At laptop scale MNIST's LeNet sees all images; the ResNets are smaller than the paper's."""
    experiment = EXPERIMENTS["tab3"]
    for row in (rows := planned_rows("tab3", "laptop")):
        number = comparable_number(experiment, row, rows, "err")
        assert (number is not None) == (row.panel == MNIST and row.method not in (GPDNN, GPDNN_PRIOR)), row.label
    found = {(row["panel"], row["method"]): row for row in table_of(experiment, rows)}
    assert (found[MNIST, RF]["err, paper"], found[MNIST, RF]["err, paper, other scale"]) == (0.005, None)
    assert (found[CIFAR100_DEEP, RF]["err, paper"], found[CIFAR100_DEEP, RF]["err, paper, other scale"]) == (
        None,
        0.351,
    )
    assert "ERR, paper, other scale" in numbers_table(experiment, CIFAR100_DEEP, rows).columns
    assert "ERR, paper" not in numbers_table(experiment, CIFAR100_DEEP, rows).columns


def test_a_hold_out_counts_as_all_images_and_patches_need_no_network():
    laptop = SCALES["laptop"]
    assert at_paper_scale(MNIST, laptop.runs(CAL, MNIST, None))
    assert not at_paper_scale(MNIST, laptop.runs(CAL, MNIST, 10_000))
    assert not at_paper_scale(MNIST, ())
    assert at_paper_scale(CIFAR100_DEEP, SCALES["paper"].runs(CGP, CIFAR100_DEEP, None))
    assert at_paper_scale(CIFAR100_DEEP, tuple(map(faithful, SCALES["paper"].runs(RF, CIFAR100_DEEP, None))))
    assert not at_paper_scale(CIFAR100_DEEP, laptop.runs(RF, CIFAR100_DEEP, 30_000))
    smoke = SCALES["smoke"]
    assert not any(at_paper_scale(c.panel, c.runs) for e in EXPERIMENTS.values() for c in e.planned(smoke))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_of_every_table_names_network_images_steps_and_seeds(name):
    rows = planned_rows(name, "laptop")
    for row, plain in zip(rows, table_of(EXPERIMENTS[name], rows), strict=True):
        assert {"network", "training images", "steps", "seeds"} <= set(plain)
        assert all(plain[part] != "–" for part in ("network", "training images", "steps")) == bool(row.runs)
    for panel in dict.fromkeys(row.panel for row in rows):
        table = numbers_table(EXPERIMENTS[name], panel, rows)
        assert list(table.names[-4:]) == ["network", "training images", "steps", "seeds"]
        assert all(len(names) == len(table.names) for names, _ in table.rows)


def test_a_row_is_described_by_its_runs():
    row = Row(RF, CIFAR100_DEEP, None, runs=SCALES["laptop"].runs(RF, CIFAR100_DEEP, 30_000))
    assert described(row) == {"network": "resnet n=1", "training images": "30,000", "steps": "4,000"}


def test_figure_1_judges_each_method_at_its_own_largest_size():
    sizes = {c.method: c.runs[0].train_size for c in EXPERIMENTS["fig1"].planned(SCALES["laptop"])}
    assert sizes == {GPDNN: 30_000, CGP: 5000, SVDKL: 30_000}


def test_figure_1_judges_the_papers_word_beside_the_sign():
    """Over-confident by little is not miscalibrated; the paper's own .051 is well calibrated."""
    made_up = {GPDNN: (0.29, -0.29), CGP: (0.051, 0.04), SVDKL: (0.36, 0.36)}
    rows = [
        Row(m, CIFAR100_DEEP, None, {"ece": (e, e), "gap": (g, g)}, {"ece": 0.005, "gap": 0.005})
        for m, (e, g) in made_up.items()
    ]
    states = {verdict.claim: verdict.state for verdict in EXPERIMENTS["fig1"].judged(rows)}
    assert states == {
        "GPDNN is miscalibrated (ECE above 0.06)": "held", "CGP is miscalibrated (ECE above 0.06)": "not held",
        "SVDKL is miscalibrated (ECE above 0.06)": "held", "GPDNN is under-confident": "held",
        "CGP is over-confident": "held", "SVDKL is over-confident": "held",
    }  # fmt: skip


def test_figure_4_judges_the_deep_gpdnn():
    """The paper: with the deeper architecture it yields a large fraction of predictions with low entropy."""
    claims = [
        v.claim for v in EXPERIMENTS["fig4"].judged(planned_rows("fig4", "laptop")) if "Deep GPDNN has more" in v.claim
    ]
    assert len(claims) == 2


def test_paper_scale_has_the_papers_networks():
    networks = {name: setting.backbone for name, setting in SCALES["paper"].settings.items()}
    assert networks[CIFAR100_DEEP] == ResNet(n=25)
    assert networks[MNIST] == BACKBONES["lenet"]
    assert all(setting.largest is None and setting.samples == 50 for setting in SCALES["paper"].settings.values())


def test_smoke_needs_embedded_images_only():
    jobs = jobs_of(cell for experiment in EXPERIMENTS.values() for cell in experiment.planned(SCALES["smoke"]))
    assert {source for job in jobs for source in job.sources} == {"digits", "letters"}


def test_laptop_has_three_seeds_outside_and_full_cifar_for_the_masked():
    fig4 = EXPERIMENTS["fig4"].planned(SCALES["laptop"])
    assert min(len(cell.runs) for cell in fig4) >= 3
    full = {
        c.method: c.runs for c in EXPERIMENTS["fig2"].planned(SCALES["laptop"]) if c.x == 50_000 and "10," in c.panel
    }
    assert {method for method, runs in full.items() if runs} == {"CNN+GP(RF)", "CNN+GP(SORF)", "CNN+MCD"}
    assert set(full) == set(ALL)  # the others stand there as not run
    for run in (run for runs in full.values() for run in runs):
        assert run.total_steps(50_000) * run.batch_size / 50_000 >= 25


def test_a_run_of_patches_is_shared_by_the_panels_of_all_networks():
    scale = SCALES["laptop"]
    assert scale.run(CGP, CIFAR10, 5000, 0) == scale.run(CGP, CIFAR10_DEEP, 5000, 0)


def test_a_panel_may_ask_for_other_options_than_its_scale():
    scale = SCALES["laptop"]
    assert scale.run(SORF, CIFAR10, 5000, 0).label == "cnn-gp-sorf-paper ratio=4 sigma=0.15 keep_filters=0.8"
    assert scale.run(SORF, MNIST, 1000, 0).label == "cnn-gp-sorf-paper"


def test_tables_compare_at_the_largest_size_that_all_their_methods_have():
    sizes = {cell.panel: cell.runs[0].train_size for cell in EXPERIMENTS["tab3"].planned(SCALES["laptop"])}
    assert (sizes[MNIST], sizes[CIFAR10]) == (None, 10_000)
    full = {cell.panel: cell.runs[0].train_size for cell in EXPERIMENTS["fig5"].planned(SCALES["laptop"])}
    assert full[CIFAR10] is None


def test_faithful_follows_the_authors_code():
    run = Run(METHODS["cnn-gp-rf"], ResNet(), batch_size=1000, learning_rate=6e-3, schedule="one-cycle")
    found = faithful(run)
    assert found.method.sigma == pytest.approx(math.sqrt(0.5))  # type: ignore[attr-defined]
    assert (found.method.keep_omega, found.method.lengthscale, found.method.ratio) == (1.0, 1.0, 4)  # type: ignore[attr-defined]
    assert found.backbone == ResNet(batch_moments=True)
    assert (found.batch_size, found.learning_rate, found.schedule) == (100, 1e-3, "constant")
    assert faithful(found) == found
    masked = SCALES["laptop"].run(MCD, CIFAR10, 1000, 0)
    assert (masked.method.keep_filters, faithful(masked).method.keep_filters) == (0.8, 0.5)  # type: ignore[attr-defined]
    plain = Run(METHODS["cnn"], BACKBONES["lenet"], learning_rate=1e-3, schedule="constant")
    assert faithful(plain) == plain


def test_the_papers_settings_are_its_texts():
    """Batches of 1,000, Adam at 10⁻³, masks that keep half, σ = ℓ = 1; one seed, twice as many images."""
    cells = {(cell.method, cell.panel): cell for cell in EXPERIMENTS["settings"].planned(SCALES["desk"])}
    assert len(cells) == 12
    for method in (RF, SORF, MCD):
        tuned, own = (cells[name, MNIST].runs[0] for name in (method, f"{method}, the paper's settings"))
        changed = {
            name for (part, name), value in options(own).items() if not part and value != options(tuned)["", name]
        }
        assert changed == {"batch_size", "learning_rate", "schedule", "steps"}
        assert (own.batch_size, own.learning_rate, own.schedule, own.optimiser) == (1000, 1e-3, "constant", "adam")
        assert own.steps * own.batch_size == 2 * tuned.steps * tuned.batch_size
        assert {name: value for (_, name), value in options(own).items() if name.startswith("keep")} == {
            "keep": 0.5, "keep_filters": 0.5, **({} if method == MCD else {"keep_omega": 0.5}),
        }  # fmt: skip
        assert method == MCD or (own.method.sigma, own.method.lengthscale, own.method.n_rf) == (1.0, 1.0, None)
        assert len(cells[f"{method}, the paper's settings", CIFAR10].runs) == 1


def test_every_method_but_cnn_cal_stands_with_a_temperature_beside_itself():
    scales = [scale for scale in SCALES.values() if EXPERIMENTS["beyond"].planned(scale)]
    assert [scale.name for scale in scales] == ["smoke", "desk"]
    for scale in scales:
        cells = EXPERIMENTS["beyond"].planned(scale)
        for cell in cells:
            pair = [other for other in cells if other.panel == cell.panel and other.method == f"{cell.method}+T"]
            if cell.temperature or cell.method == CAL:
                assert not pair
            else:  # the same training
                assert len(pair) == 1 and pair[0].runs == cell.runs and pair[0].temperature
            assert all(run.holdout for run in cell.runs)


@pytest.mark.parametrize("scale", [scale for scale in SCALES.values() if "ablation" not in scale.leaves_out],
                         ids=lambda scale: scale.name)  # fmt: skip
def test_ablation_changes_one_thing_at_a_time(scale):
    cells = [cell for cell in EXPERIMENTS["ablation"].planned(scale) if cell.panel == MNIST][:-1]
    base = options(cells[0].runs[0])
    for cell in cells[1:]:
        changed = {name for name, value in options(cell.runs[0]).items() if value != base[name]}
        if ("", "batch_size") in changed and scale.name == "laptop":  # then the steps follow: as many images are seen
            assert cell.runs[0].steps * cell.runs[0].batch_size == base["", "steps"] * base["", "batch_size"]
        changed -= {("", "steps")} if ("", "batch_size") in changed else set()
        assert len(changed) + len(cell.instead) == 1, (cell.method, changed)


def test_faithful_changes_runs_and_ece_but_not_what_is_priced():
    scale = SCALES["smoke"]
    for cell in EXPERIMENTS["fig1"].planned(scale, authors=True):
        assert cell.instead == (("ece", "ece_authors"),)
        assert all(run == faithful(run) for run in cell.runs)
    assert EXPERIMENTS["ablation"].planned(scale, authors=True) == EXPERIMENTS["ablation"].planned(scale)


def options(run: Run) -> dict[tuple[str, str], object]:
    data = to_json(run)
    nested = {(part, name): value for part in ("method", "backbone") for name, value in data.pop(part).items()}
    return nested | {("", name): value for name, value in data.items()}


def test_key_is_of_the_whole_description():
    run = Run(METHODS["cnn"], BACKBONES["lenet"])
    assert key(run) == key(from_json(to_json(run)))
    changes = {"seed": 1, "steps": 3, "method": METHODS["cnn-mcd"], "backbone": ResNet(), "kl_weight": 0.5}
    changed = [dataclasses.replace(run, **{name: value}) for name, value in changes.items()]
    assert len({key(each) for each in (run, *changed)}) == 6


def test_laptop_runs_are_those_of_the_comparison_on_mnist():
    """tools/mnist_methods.py makes them by `calgp train`; its results count here, being equal as data."""
    given = {"source": "mnist", "method": {"name": "cnn-gp-rf-paper", "n_rf": 1024, "keep_omega": 0.9}}
    given |= {"backbone": "lenet", "steps": 2000, "seed": 1, "learning_rate": 6e-3, "schedule": "one-cycle"}
    given |= {
        "holdout": 0.0,
        "epochs": 10.0,
        "augment": [],
        "crop": 4,
        "calibration": False,
    }  # what was the default then
    assert key(from_json(given | {"train_size": 10_000})) == key(SCALES["laptop"].run(RF, MNIST, 10_000, 1))


def test_train_command_names_every_option():
    run = dataclasses.replace(SCALES["smoke"].run(RF, MNIST, 200, 1), kl_weight=0.5, batch_size=7)
    words = train_command(run)
    for part in ("--method cnn-gp-rf-paper", "method.n_rf=64", "backbone.channels=4,8", "--train-size 200",
                 "--seed 1", "--batch-size 7", "--kl-weight 0.5", "--learning-rate 0.01"):  # fmt: skip
        assert part in words


def test_unknown_names_are_reported_with_the_known():
    with pytest.raises(CalgpError, match=r"no experiment 'fig9'; did you mean 'fig5'\? Known: fig1, "):
        chosen("fig9")
    with pytest.raises(CalgpError, match="no scale 'huge'; known: smoke, laptop, tuned, desk, paper"):
        find_scale("huge")
