"""Commands on trained runs: evaluate, calibrate, decide, ensemble, verify, compare."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.predict import warn_of_decisions
from calgp.cli.shared import check_run, check_source, is_rank_zero, open_fabric, open_folder, out, say, writable
from calgp.errors import CalgpError, path_error


def evaluate(
    run: parameters.Run,
    *,
    source: Annotated[str | None, Option(help="Test images of this set.", show_default="the run's own")] = None,
    convert: Annotated[bool, Option("--convert", help="Resize and recolour images as the model needs them.")] = False,
    skip_unreadable: Annotated[bool, Option("--skip-unreadable", help="Leave damaged images of --source out.")] = False,
    corrupt: Annotated[
        str | None,
        Option(
            metavar="KIND[:SEVERITY]",
            help="Corrupt the images first: noise:3, or noise for all five severities.",
            show_default="none",
        ),
    ] = None,
    corrupt_seed: Annotated[int, Option(help="Seed of the corruption.")] = 0,
    by_class: Annotated[bool, Option("--by-class", help="Show the scores of every class.")] = False,
    uncalibrated: parameters.Uncalibrated = False,
    sampling: parameters.Sampling,
    data: parameters.Data = None,
    compute: parameters.Compute,
    devices: parameters.Devices = 1,
    as_json: parameters.AsJson = False,
) -> None:
    """Score a run on test images: its own, or another set. Images of other classes count as out of distribution.

    A calibrated run (see `calgp calibrate`) is scored with calibrated probabilities, unless you pass --uncalibrated.
    Reports and comparisons show both. A run with decisions (see `calgp decide`) also shows whether they hold.

    --corrupt makes the images worse first: noise, blur, contrast, rotation, occlusion or jpeg, with a severity from 1
    to 5 (noise:3), or all five (noise). --corrupt-seed sets the random part. Reports and comparisons leave these
    scores out.

    Example: calgp evaluate runs/mnist && calgp evaluate runs/mnist --source notmnist
    """
    check_run(run)
    check_source(source or "")
    corruptions = [None] if corrupt is None else rooms.data.Corruption.parse(corrupt, seed=corrupt_seed)
    fabric = compute.open(devices)
    folder = rooms.runs.on_first(fabric, lambda: writable(open_folder(run)))
    classifier = rooms.runs.Classifier.load(folder, fabric=fabric, calibrated=not uncalibrated)
    found = []
    for corruption in corruptions:
        under = "" if corruption is None else f" under {corruption.label}"
        with rooms.bars.bar(f"Predicting{under}") if is_rank_zero() else nullcontext(lambda more, total: None) as watch:
            found.append(classifier.evaluate(
                source, directory=data, convert=convert, skip_unreadable=skip_unreadable, corruption=corruption,
                watch=watch, **vars(sampling),
            ))  # fmt: skip
    if not is_rank_zero():
        return
    warn_of_decisions(classifier, found[0].passes)
    if as_json:
        plain = [rooms.folders.evaluation_data(each) for each in found]
        return print(json.dumps(plain if len(plain) > 1 else plain[0]))
    _print_evaluations(found, classifier.card, run, by_class=by_class)


def _print_evaluations(
    evaluations: "list[rooms.runs.Evaluation]", card: "rooms.runs.Card", run: str, *, by_class: bool
) -> None:
    """Several as a table; of one the scores, how each class fares, and in words what is wrong and what to do."""
    if len(evaluations) > 1:
        return out.print(rooms.tables.shift_table(evaluations))
    found = evaluations[0]
    out.print(rooms.tables.evaluation_table(found))
    if found.outside:
        return out.print("\n" + "\n".join(rooms.advice.outside_words(found, run)), highlight=False)
    if by_class or len(card.classes) <= rooms.tables.MOST_CLASSES:
        out.print(rooms.tables.class_table(found, card.classes))
    if (matrix := rooms.tables.confusion_table(found, card.classes, out.width)) is not None:
        out.print(matrix)
    summary = rooms.words.summary(found.own.scores, None).replace(rooms.words.THIN, " ")
    out.print("\n" + "\n".join([summary, *rooms.advice.advice(found, card, run)]), highlight=False)


def calibrate(
    run: parameters.Run,
    *,
    calibrator: Annotated[str, Option(help="temperature, vector, platt or isotonic.")] = "temperature",
    share: Annotated[
        float, Option(help="Part of the hold-out to use, chosen by --seed; 0.5 leaves half for `calgp decide`.")
    ] = 1.0,
    sampling: parameters.Sampling,
    data: parameters.Data = None,
    compute: parameters.Compute,
    as_json: parameters.AsJson = False,
) -> None:
    """Calibrate a finished run on the images that it held out (`calgp train --holdout 0.1`).

    The calibrator is written to calibration.json; `evaluate` and `predict` use it from then on. It changes
    probabilities and entropy. Mutual information and expected entropy stay those before calibration.

    Example: calgp calibrate runs/mnist && calgp evaluate runs/mnist
    """
    folder, fabric = writable(open_folder(run)), compute.open()
    # without calibrator and decisions, which may be damaged
    classifier = rooms.runs.Classifier.load(folder, fabric=fabric, calibrated=False, decided=False)
    found = classifier.calibrate(calibrator, share=share, directory=data, **vars(sampling))
    if as_json:
        return print(json.dumps(rooms.record.to_json(found)))
    out.print(rooms.tables.calibration_table(found))
    say(f"Next: calgp evaluate {folder.path}")


def decide(
    run: parameters.Run,
    *,
    error: Annotated[
        float | None,
        Option(help="Answer only where no more than this share is wrong: 0.01.", show_default="always answer"),
    ] = None,
    confidence: Annotated[float, Option(help="Probability that --error holds on new images.")] = 0.95,
    empirical: Annotated[
        bool, Option("--empirical", help="Apply --error to the hold-out itself: no guarantee.")
    ] = False,
    score: Annotated[
        str, Option(help="The uncertainty score: confidence, entropy or mutual-information.")
    ] = "confidence",
    coverage: Annotated[
        float | None, Option(help="Make sets that hold the true class this often: 0.9.", show_default="no sets")
    ] = None,
    sets: Annotated[str, Option(help="How sets are made: aps, aps-plain or lac.")] = "aps",
    by_class: Annotated[bool, Option("--by-class", help="Reach --coverage for each class by itself.")] = False,
    empty: Annotated[bool, Option("--empty", help="Leave empty sets empty, instead of adding the top class.")] = False,
    false_alarm: Annotated[
        float | None,
        Option(help="Call outliers, and at most this share of ordinary inputs: 0.05.", show_default="no outliers"),
    ] = None,
    uncalibrated: parameters.Uncalibrated = False,
    sampling: parameters.Sampling,
    data: parameters.Data = None,
    compute: parameters.Compute,
    as_json: parameters.AsJson = False,
) -> None:
    """Fit when to abstain, and prediction sets, on the images that a run held out (--holdout 0.1).

    --error finds a threshold of uncertainty beyond which the run abstains, so that at most this share of its answers is
    wrong, with --confidence. --coverage makes conformal prediction sets, which hold the true class at least this often.
    --false-alarm finds a threshold of the outlier score, where the run has one, that such a share of ordinary inputs
    exceeds. All guarantees are for images like those held out. They are written to decisions.json; `evaluate`,
    `predict` and `report` use them from then on.

    Held-out images that the run was calibrated on are left out. If those are all, the run is calibrated again on half
    of them, and the other half decides.

    Example: calgp decide runs/mnist --error 0.005 --coverage 0.99 && calgp evaluate runs/mnist
    """
    folder, fabric = writable(open_folder(run)), compute.open()
    classifier = rooms.runs.Classifier.load(folder, fabric=fabric, calibrated=not uncalibrated, decided=False)
    found = classifier.decide(
        error=error, confidence=None if empirical else confidence, score=score, coverage=coverage, sets=sets,
        by_class=by_class, empty=empty, false_alarm=false_alarm, directory=data, **vars(sampling),
    )  # fmt: skip
    if as_json:
        return print(json.dumps(rooms.record.to_json(found)))
    out.print(rooms.tables.decisions_table(found, classifier.classes))
    say(f"Next: calgp evaluate {folder.path}")


def ensemble(
    run: Annotated[list[str], Argument(metavar="RUN...", help="Finished runs, of the same classes and images.")],
    folder: Annotated[Path, Option("--out", help="The folder of the ensemble.")],
) -> None:
    """Average the predictions of several finished runs: a deep ensemble.

    The folder lists the runs by their relative paths and copies nothing: evaluate, calibrate, compare and
    report work on it as on any run. To calibrate it, its runs must hold out the same images: train them with
    --holdout 0.1 --split-seed 0.

    Example: calgp ensemble runs/cnn-seed0 runs/cnn-seed1 runs/cnn-seed2 --out runs/ensemble
    """
    card = rooms.runs.ensemble([open_folder(name) for name in run], target := rooms.runs.RunFolder(folder))
    say(f"Made {card.label} in {target.path}.\nNext: calgp evaluate {target.path}")


def verify(
    run: parameters.Run,
    data: parameters.Data = None,
    device: parameters.Device = "auto",
    threads: Annotated[int | None, Option(help="CPU threads.", show_default="as the evaluations")] = None,
    as_json: parameters.AsJson = False,
) -> None:
    """Repeat the evaluations of a run and compare them with those in its folder; status 1 if they differ.

    The same versions, threads and processor must give the same bits; others must agree within a stated tolerance
    (docs/reliability.md). The training images are compared by their checksum. What is not here is not checked.

    Example: calgp verify shipped
    """
    folder = open_folder(run)
    places = [*(found.environment for found in folder.evaluations()), folder.card().environment]
    fabric = open_fabric(device, "32-true", threads or next((each.threads for each in places if each.threads), None))
    with rooms.bars.steps_shown() as watch:
        checks = rooms.runs.Classifier.load(folder, fabric=fabric).verify(directory=data, watch=watch)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        out.print(rooms.tables.verification_table(checks))
    if any(check.state == "differs" for check in checks):
        raise CalgpError(f"{folder.path} does not agree with what was found now.")


def compare(
    run: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders, or folders of run folders.")],
    *,
    table: parameters.Csv,
    as_json: parameters.AsJson = False,
) -> None:
    """Several runs side by side: mean ± standard error over seeds of the same setting.

    A run that was evaluated calibrated and as it was trained has a row for each.

    Example: calgp compare runs/
    """
    rows = rooms.runs.compare([folder for path in run for folder in _run_folders(path)])
    table.write(map(rooms.tables.flat_row, rows))
    if as_json:
        return print(json.dumps([dataclasses.asdict(row) for row in rows]))
    out.print(rooms.tables.comparison_table(rows))


def _run_folders(path: Path) -> list[Any]:
    if (path / "run.json").is_file():
        return [rooms.runs.RunFolder(path)]
    found = [rooms.runs.RunFolder(file.parent) for file in sorted(path.glob("*/run.json"))]
    if not path.exists():
        raise path_error("run folder", path)
    if not found:
        raise CalgpError(f"Invalid RUN {path}: it is no run folder and holds none.")
    return found
