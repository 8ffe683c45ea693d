"""What is found out about a run: records come back from their files as they were, and files stay as they were written.

The keys of files are those that calgp wrote before results were records, so that folders of all versions are read.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calgp.data import CORRUPTIONS, SEVERITIES
from calgp.errors import CalgpError
from calgp.gp import Passes
from calgp.metrics import Scores
from calgp.nets import Task
from calgp.posthoc import calibration as calibrators
from calgp.posthoc.decisions import KINDS, SCORES, PredictionSets, Selection
from calgp.posthoc.outliers import Threshold
from calgp.runs import Calibration, Card, Evaluation, FittedDecisions, RunFolder, from_json, shipped_run
from calgp.runs.card import Member
from calgp.runs.environment import Environment
from calgp.runs.folder import evaluation_data
from calgp.runs.outlier_metrics import Flagged, Number, OutOfDistribution
from calgp.runs.record import parse, to_json
from calgp.runs.results import (
    Checkpoint,
    Corrupted,
    DecisionMetrics,
    HeldOutScores,
    Histogram,
    HoldoutRecord,
    Intervals,
    NoteRecord,
    Reliability,
    SelectionMetrics,
    Selective,
    SetMetrics,
    SetsByClass,
    StoppingState,
    TrainRecord,
)
from folders import calibrate, decide, evaluate, metadata

ROOT = Path(__file__).parents[2]
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# strategies ----------------------------------------------------------------------------------------------------------

reals = st.floats(allow_nan=False)  # NaN is not equal to itself; test_record has it
finite = st.floats(-1e30, 1e30)
shares = st.floats(0, 1)
open_shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
wholes = st.integers(0, 2**63 - 1)
counts = st.integers(1, 2**40 - 1)
texts = st.text(max_size=12)
engines = st.sampled_from(["moments", "samples"])
intervals = st.tuples(reals, reals)


def maybe(strategy):
    return st.none() | strategy


@st.composite
def histograms(draw) -> Histogram:
    edges = draw(st.lists(finite, min_size=2, max_size=8, unique_by=lambda x: x + 0.0).map(sorted))
    some = draw(st.lists(st.floats(0, 1e14), min_size=len(edges) - 1, max_size=len(edges) - 1))
    return Histogram(tuple(edges), (some[0] + 1.0, *some[1:]))


@st.composite
def reliabilities(draw) -> Reliability:
    edges = draw(st.lists(shares, min_size=2, max_size=8, unique_by=lambda x: x + 0.0).map(sorted))
    count = [1, *draw(st.lists(st.integers(0, 2**30), min_size=len(edges) - 2, max_size=len(edges) - 2))]
    columns = [tuple(draw(shares) if n else None for n in count) for _ in range(2)]
    return Reliability(tuple(edges), tuple(count), *columns)


def parameters(kind: type[calibrators.Calibrator]) -> dict[str, Any]:
    """Those of a calibrator, fitted to a few numbers."""
    log_probs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    found = calibrators.to_json(kind.fit(log_probs, torch.arange(20) % 3))
    return {name: value for name, value in found.items() if name != "calibrator"}


PARAMETERS = {name: parameters(kind) for name, kind in calibrators.CALIBRATORS.items()}


@st.composite
def calibrations(draw) -> Calibration:
    name = draw(st.sampled_from(list(PARAMETERS)))
    scored = st.builds(HeldOutScores, reals, maybe(reals), maybe(reals), maybe(reals))
    return Calibration(
        name, PARAMETERS[name], draw(counts), draw(scored), draw(scored), draw(wholes), draw(maybe(texts)),
        draw(shares), draw(counts), draw(engines), draw(maybe(texts)),
    )  # fmt: skip


selections = st.builds(
    Selection, st.sampled_from(list(SCORES)), open_shares, maybe(open_shares), maybe(st.floats(0, 1e300)), wholes,
    wholes, wholes, maybe(texts),
)  # fmt: skip


@st.composite
def prediction_sets(draw) -> PredictionSets:
    by_class, classes = draw(st.booleans()), draw(st.integers(1, 5))
    thresholds = tuple(draw(finite) for _ in range(classes if by_class else 1))
    kind = draw(st.sampled_from(list(KINDS)))
    return PredictionSets(kind, draw(open_shares), by_class, draw(st.booleans()), thresholds, draw(wholes), classes)


fitted = st.builds(
    FittedDecisions, maybe(selections), maybe(prediction_sets()),
    maybe(calibrations().map(lambda found: found.probabilities)), wholes, counts, engines, wholes, maybe(texts),
    maybe(st.builds(Threshold, open_shares, reals, wholes)),
)  # fmt: skip
by_class = st.lists(st.tuples(wholes, maybe(reals), maybe(reals)), min_size=1, max_size=4).map(
    lambda rows: SetsByClass(*zip(*rows, strict=True))
)
decision_metrics = st.builds(
    DecisionMetrics, fitted,
    maybe(st.builds(SelectionMetrics, wholes, reals, maybe(wholes), maybe(reals), maybe(intervals))),
    maybe(
        st.builds(
            SetMetrics, reals, st.lists(wholes, max_size=4).map(tuple), maybe(reals), maybe(intervals), maybe(by_class)
        )
    ),
)  # fmt: skip
environments = st.builds(
    Environment, calgp=maybe(texts), torch=maybe(texts), transform=maybe(texts), threads=maybe(st.integers(1, 1024)),
    machine=maybe(texts), processor=maybe(texts), device=maybe(texts), precision=maybe(texts), ranks=maybe(counts),
    accumulate=maybe(counts), python=maybe(texts), platform=maybe(texts),
    command=maybe(st.lists(texts, min_size=1, max_size=3).map(tuple)), started=maybe(texts),
)  # fmt: skip
resumed = st.builds(
    lambda one, others: Environment(**vars(one) | {"resumed": tuple(others)}), environments, st.lists(environments)
)
corruptions = st.builds(Corrupted, texts, st.sampled_from(list(CORRUPTIONS)), st.sampled_from(list(SEVERITIES)), wholes)
detections = st.builds(OutOfDistribution, *[st.builds(Number, reals, intervals)] * 4)


@st.composite
def evaluations(draw, outside: bool) -> Evaluation:
    common: dict[str, Any] = {
        "source": draw(texts), "outside": outside, "n": draw(counts), "samples": draw(counts), "seed": draw(wholes),
        "checksum": draw(texts), "mean_entropy": draw(reals), "mean_mutual_information": draw(reals),
        "engine": draw(engines), "calibration": draw(maybe(calibrations())), "convert": draw(st.booleans()),
        "skip_unreadable": draw(st.booleans()),
        "corruption": draw(maybe(corruptions)), "environment": draw(environments),
        "prediction_seconds": draw(maybe(finite)), "entropy_histogram": draw(maybe(histograms())),
        "decisions": draw(maybe(decision_metrics)),
        "flagged": draw(maybe(st.builds(Flagged, texts, shares, shares, intervals))),
    }  # fmt: skip
    common["calibrator"] = common["calibration"] and common["calibration"].calibrator
    if outside:
        names = ("entropy", "mutual_information")
        return Evaluation(**common, ood=draw(maybe(st.fixed_dictionaries(dict.fromkeys(names, detections)))))
    variants = {"paper": draw(reals), "authors": draw(reals)} | draw(st.dictionaries(texts, reals, max_size=2))
    return Evaluation(
        **common, scores=draw(st.builds(Scores, wholes, *[reals] * 7)),
        intervals=draw(st.builds(Intervals, *[intervals] * 4)), ece_variants=variants,
        reliability=draw(reliabilities()),
        selective=draw(st.dictionaries(texts, st.builds(Selective, reals, reals), max_size=3)),
    )  # fmt: skip


RECORDS = {
    "Histogram": histograms(),
    "Reliability": reliabilities(),
    "Calibration": calibrations(),
    "FittedDecisions": fitted,
    "DecisionMetrics": decision_metrics,
    "Environment": resumed,
    "Corrupted": corruptions,
    "Evaluation, inside": evaluations(False),
    "Evaluation, outside": evaluations(True),
    "TrainRecord": st.builds(TrainRecord, st.just("train"), counts, reals, reals, reals, finite),
    "HoldoutRecord": st.builds(
        HoldoutRecord, st.just("holdout"), counts, reals, reals, maybe(wholes), *[maybe(reals)] * 5
    ),
    "NoteRecord": st.builds(
        NoteRecord, st.sampled_from(["skipped", "unscored", "kept"]), wholes, maybe(texts), maybe(reals)
    ),
    "Checkpoint": st.builds(
        Checkpoint, counts, wholes, st.tuples(reals, reals, reals),
        maybe(st.builds(StoppingState, reals, wholes, wholes)),
    ),
    "Member": st.builds(Member, st.from_regex(r"[^/\x00][^\x00]{0,20}", fullmatch=True), texts, texts, wholes),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
@MANY
@given(st.data())
def test_every_record_comes_back_as_it_was(name, data):
    record = data.draw(RECORDS[name])
    text = json.dumps(to_json(record))
    assert parse(type(record), json.loads(text)) == record


# through files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


@MANY
@given(st.data())
def test_what_a_folder_writes_it_reads(folder, data):
    calibration, decisions = data.draw(calibrations()), data.draw(fitted)
    folder.write_calibration(calibration)
    folder.write_decisions(decisions)
    assert (folder.calibration(), folder.decisions()) == (calibration, decisions)


@MANY
@given(st.one_of(evaluations(False), evaluations(True)))
def test_an_evaluation_is_found_under_its_name(folder, found):
    for path in folder.path.glob("scores-*"):
        path.unlink()
    folder.write_evaluation(found)
    (there,) = [*folder.evaluations(), *folder.shifted()]
    assert there == found and bool(folder.shifted()) == (found.corruption is not None)
    if found.corruption is None:
        assert folder.evaluation(found.source, found.calibrator) == found


@MANY
@given(st.lists(st.one_of(RECORDS["TrainRecord"], RECORDS["HoldoutRecord"], RECORDS["NoteRecord"]), max_size=6))
def test_lines_of_the_log_come_back_in_the_order_of_steps(folder, records):
    folder.remove("log.jsonl")
    for record in records:
        folder.append_log(record)
    later = {(record.kind, record.step): record for record in records}  # of two of a step the later counts
    assert sorted(folder.log(), key=key) == sorted(later.values(), key=key)
    assert [record.step for record in folder.log()] == sorted(record.step for record in later.values())


def key(record):
    return record.step, record.kind


@MANY
@given(resumed, st.lists(RECORDS["Member"], max_size=2).map(tuple), maybe(st.lists(finite, max_size=3).map(tuple)))
def test_a_card_comes_back_with_its_run(folder, environment, members, weights):
    run = from_json({"method": {"name": "cnn-cal"}, "backbone": {"name": "lenet", "hidden": [8]}, "augment": ["flip"]})
    card = Card(run, Task(1, 9, 8, 2), ("a", "b"), 7, "sum", (3, 1), environment, members, weights)
    folder.create(card)
    assert folder.card() == card


# the keys of files ---------------------------------------------------------------------------------------------------

SHARED = {
    "predictions",
    "source", "outside", "n", "samples", "engine", "seed", "calibrator", "calibration", "convert", "skip_unreadable",
    "checksum",
    "corruption", "environment", "prediction_seconds", "entropy_histogram", "mean_entropy", "mean_mutual_information",
    "decisions", "flagged",
}  # fmt: skip
FILES = {
    "run.json": {
        "format", "run", "task", "classes", "train_images", "checksum", "holdout_rows", "environment", "members",
        "class_weights", "upgraded", "vectors",
    },
    "calibration.json": {
        "calibrator", "parameters", "n", "of", "share", "samples", "engine", "seed", "before", "after", "crossed",
        "warning",
    },
    "decisions.json": {
        "selection", "sets", "calibration", "n", "samples", "engine", "seed", "warning", "outliers", "power",
    },
    "scores-digits.temperature.json": SHARED
    | {"scores", "intervals", "ece_variants", "reliability", "confusion", "selective"},
    "scores-letters.temperature.json": SHARED | {"ood", "inside"},
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(trained, tmp_path_factory, fabric) -> RunFolder:
    """The run with a calibrator and decisions, evaluated inside and outside. Read only."""
    import shutil

    folder = RunFolder(shutil.copytree(trained.path, tmp_path_factory.mktemp("results") / "run"))
    calibrate(folder, fabric, share=0.5)
    decide(folder, fabric, error=0.4, confidence=0.8, coverage=0.8)
    for source in ("digits", "letters"):
        evaluate(folder, fabric, source=source)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_files_have_the_keys_that_they_had(evaluated, name):
    assert json.loads((evaluated.path / name).read_text()).keys() == FILES[name]


def test_nested_tables_have_the_keys_that_they_had(evaluated):
    inside, outside, card = (
        json.loads((evaluated.path / name).read_text())
        for name in ("scores-digits.temperature.json", "scores-letters.temperature.json", "run.json")
    )
    assert card["task"] == {"channels": 1, "height": 28, "width": 28, "classes": 10}
    known = {"calgp", "torch", "transform", "threads", "machine", "processor", "device", "precision"}
    assert known - {"transform"} <= inside["environment"].keys() <= known  # what is not known is not written
    started = {"python", "platform", "command", "started"}
    assert card["environment"].keys() - {"transform"} == known - {"transform"} | started
    assert inside["scores"].keys() == {"n", "err", "mnll", "ece", "mce", "brier", "confidence", "entropy"}
    assert inside["intervals"].keys() == {"err", "mnll", "ece", "brier"}
    assert inside["reliability"].keys() == {"edges", "count", "accuracy", "confidence"}
    assert inside["entropy_histogram"].keys() == {"edges", "count"}
    assert inside["selective"]["mutual-information"].keys() == {"aurc", "excess"}
    assert inside["calibration"] == json.loads((evaluated.path / "calibration.json").read_text())
    assert inside["calibration"]["before"].keys() == {"err", "mnll", "ece", "brier"}
    assert inside["decisions"].keys() == {"made", "selection", "sets"}
    assert inside["decisions"]["made"] == json.loads((evaluated.path / "decisions.json").read_text())
    assert inside["decisions"]["selection"].keys() == {"answered", "share", "wrong", "error", "interval"}
    assert inside["decisions"]["sets"].keys() == {"mean_size", "sizes", "covered", "interval", "by_class"}
    assert inside["decisions"]["sets"]["by_class"].keys() == {"n", "covered", "size"}
    assert inside["decisions"]["made"]["calibration"].keys() == {"calibrator", "parameters"}
    selection = {"score", "error", "confidence", "threshold", "n", "answered", "wrong", "warning"}
    assert inside["decisions"]["made"]["selection"].keys() == selection
    sets = {"kind", "coverage", "by_class", "empty", "thresholds", "n", "classes"}
    assert inside["decisions"]["made"]["sets"].keys() == sets
    scores = {"entropy", "mutual_information", "confidence", "combined", "density", "direction", "neighbours"}
    assert outside["inside"] == "digits" and outside["ood"].keys() == scores
    assert inside["flagged"].keys() == {"score", "false_alarm", "share", "interval"}
    assert outside["ood"]["entropy"].keys() == {"auroc", "aupr_out", "aupr_in", "fpr95"}
    assert outside["ood"]["entropy"]["auroc"].keys() == {"value", "interval"}


def test_lines_of_the_log_have_the_keys_that_they_had(evaluated):
    lines = [json.loads(line) for line in (evaluated.path / "log.jsonl").read_text().splitlines()]
    train = {"kind", "step", "nll", "kl", "rate", "seconds"}
    holdout = {"kind", "step", "n", "err", "mnll", "ece", "mce", "brier", "confidence", "entropy"}
    assert {line["kind"] for line in lines} == {"train", "holdout"}
    assert all(line.keys() == {"train": train, "holdout": holdout}[line["kind"]] for line in lines)


def test_predictions_name_what_they_are_of(evaluated):
    found = metadata(evaluated, evaluated.predictions_name("digits", "temperature"))
    assert found == {
        "source": "digits", "samples": 1, "engine": "moments", "seed": 0, "calibrator": "temperature",
        "classes": list("0123456789"), "names": None,
    }  # fmt: skip


# files of all versions -----------------------------------------------------------------------------------------------


def lost(before: Any, after: Any, place: str = "") -> list[str]:
    """What a file said and its record does not; nulls may come and go."""
    if isinstance(before, dict) and isinstance(after, dict):
        gone = [f"{place}.{name}" for name, value in before.items() if value is not None and name not in after]
        return gone + [
            each for name in before.keys() & after.keys() for each in lost(before[name], after[name], f"{place}.{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for i, pair in enumerate(zip(before, after, strict=True)) for each in lost(*pair, f"{place}[{i}]")]
    same = before == after or (before != before and after != after)
    return [] if same and type(before) is type(after) else [f"{place}: {before!r} became {after!r}"]


KEPT = {"golden": ROOT / "tests" / "golden", "shipped": shipped_run().path, "results": ROOT / "results"}


@pytest.mark.parametrize("where", KEPT)
def test_files_that_were_kept_are_read_and_nothing_of_them_is_lost(where):
    kinds = {"run.json": Card, "calibration.json": Calibration, "decisions.json": FittedDecisions}
    files = [
        file for file in sorted(KEPT[where].rglob("*.json")) if file.name in kinds or file.name.startswith("scores-")
    ]
    assert files
    for file in files:
        data = json.loads(file.read_text())
        assert lost(data, to_json(parse(kinds.get(file.name, Evaluation), data))) == [], file
    for file in sorted(KEPT[where].rglob("log.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found = [to_json(record) for record in RunFolder(file.parent).log()]
        assert lost(lines, found) == [], file


# what is refused, and what is derived --------------------------------------------------------------------------------


def changed(folder: RunFolder, name: str, change: Any) -> dict[str, Any]:
    data = json.loads((folder.path / name).read_text())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("scores"), "scores is missing"),
        (lambda data: data.pop("reliability"), "reliability is missing"),
        (lambda data: data["ece_variants"].pop("authors"), "authors is missing"),
        (lambda data: data["reliability"]["edges"].reverse(), "no increasing edges"),
        (lambda data: data["reliability"]["count"].append(1), "columns differ in length"),
        (lambda data: data["reliability"].update(accuracy=[None] * 20), "lacks accuracy or confidence"),
        (lambda data: data["entropy_histogram"].update(count=[0.0] * 40), "no increasing edges around its counts"),
        (lambda data: data.update(ood={"entropy": None}), "ood.entropy"),
        (lambda data: data["calibration"]["parameters"].update(temperature=-1), "calibration: .*damaged"),
        (lambda data: data.update(calibrator="../escaped"), "calibrator"),
        (lambda data: data.update(corruption={"of": "x", "kind": "mist", "severity": 1}), "corruption: .*mist"),
        (lambda data: data.update(corruption={"of": "x", "kind": "blur", "severity": 9}), "corruption: "),
        (lambda data: data.update(outside="no"), "outside"),
        (lambda data: data["decisions"]["made"]["sets"].update(thresholds=[]), "0 thresholds"),
    ],
)
def test_evaluations_that_do_not_fit_together_are_refused(evaluated, change, says):
    data = changed(evaluated, "scores-digits.temperature.json", change)
    with pytest.raises(CalgpError, match=says):
        parse(Evaluation, data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["classes"].pop(), "9 classes are named, 10 are counted"),
        (lambda data: data["task"].update(height=10**9), "height"),
        (lambda data: data["run"].update(method="magic"), "magic"),
        (lambda data: data["run"].update(new=1), "no option 'new'"),
        (lambda data: data.update(holdout_rows=[-1]), "holdout_rows.0"),
        (lambda data: data.update(members=[{"path": "/etc", "label": "", "network": "", "seed": 0}]), "members.0.path"),
        (lambda data: data.update(format=2), "format"),
        (lambda data: data["environment"].update(threads=0), "environment.threads"),
    ],
)
def test_cards_that_do_not_fit_together_are_refused(evaluated, change, says):
    with pytest.raises(CalgpError, match=re.escape(says) if "." in says else says):
        parse(Card, changed(evaluated, "run.json", change))


def test_scores_are_there_for_the_run_s_own_classes_only(evaluated):
    inside, outside = (evaluated.evaluation(source, "temperature") for source in ("digits", "letters"))
    assert inside.own.scores is inside.scores and inside.own.reliability is inside.reliability
    with pytest.raises(CalgpError, match="letters has images of other classes than the run"):
        _ = outside.own
    assert inside.passes == Passes(1, "moments")


def test_rows_of_a_diagram_are_its_bins_that_hold_something():
    table = Reliability((0.0, 0.5, 0.75, 1.0), (2, 0, 5), (0.5, None, 1.0), (0.4, None, 0.9))
    assert table.filled() == [(0.0, 0.5, 2, 0.5, 0.4), (0.75, 1.0, 5, 1.0, 0.9)]


def test_a_calibration_gives_its_calibrator(evaluated):
    found = evaluated.calibration()
    assert calibrators.to_json(found.fitted) == {"calibrator": found.calibrator} | found.parameters
    assert asdict(found.probabilities) == {"calibrator": found.calibrator, "parameters": found.parameters}


def test_what_a_command_prints_is_what_the_file_holds(evaluated):
    for found in evaluated.evaluations():
        assert evaluation_data(found) == json.loads((evaluated.path / evaluated.scores_name(*found.named)).read_text())
