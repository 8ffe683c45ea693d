"""All that a second run needs to give the same numbers: commands, options, versions, checksums."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from calgp.gp import Passes
from calgp.json_values import Json
from calgp.runs.card import Card
from calgp.runs.description import flat, to_json
from calgp.runs.folder import RunFolder, shipped_run
from calgp.runs.results import Calibration, Evaluation, FittedDecisions


@dataclass(frozen=True)
class Rerun:
    """What the section "Reproduce it" shows beside the run's card."""

    commands: list[str]
    described: str
    options: list[tuple[str, str]]
    json: str


def _path(folder: RunFolder) -> str:
    return "shipped" if folder.path == shipped_run().path else str(folder.path)


def rerun(folder: RunFolder, card: Card, found: Sequence[Evaluation]) -> Rerun:
    options = to_json(card.run)
    described = "The first member's training" if card.members else "The whole description of the training"
    if card.upgraded is not None:
        options, described = {"network": card.upgraded, "source": card.run.source}, "What was upgraded"
    if card.vectors is not None:
        options = {"embeddings": card.vectors.train, "test": card.vectors.test, "holdout": card.vectors.holdout}
        described = "What it was fitted on"
    calibration, decisions = found[0].calibration, found[0].decisions
    calibrated, command = folder.calibration() is not None, card.environment.command or ()
    return Rerun(
        commands=[
            shlex.join(command) if len(command) > 1 else "# trained from Python: the run as JSON is below",
            *([] if calibration is None else [_calibration_command(folder, calibration)]),
            *([] if decisions is None else [_decision_command(folder, decisions.made, calibrated)]),
            *(_evaluation_command(folder, each, card, calibrated) for each in found),
        ],
        described=described,
        options=[("members", ", ".join(member.path for member in card.members))] * bool(card.members)
        + [(name, _option(value)) for name, value in flat(options).items()],
        json=json.dumps(options, indent=1, ensure_ascii=False),
    )


def _passes(how: Passes) -> list[str]:
    return ["--passes", str(how.count), "--engine", how.engine]


def _calibration_command(folder: RunFolder, by: Calibration) -> str:
    share = [] if by.share == 1 else ["--share", str(by.share)]
    options = ["--calibrator", by.calibrator, *share, *_passes(by.passes), "--seed", str(by.seed)]
    return shlex.join(["calgp", "calibrate", _path(folder), *options])


def _decision_command(folder: RunFolder, made: FittedDecisions, calibrated: bool) -> str:
    options: list[str] = []
    if (selection := made.selection) is not None:
        sure = selection.confidence
        options += ["--error", str(selection.error)]
        options += ["--empirical"] if sure is None else ["--confidence", str(sure)]
        options += ["--score", selection.score]
    if (sets := made.sets) is not None:
        options += ["--coverage", str(sets.coverage), "--sets", sets.kind]
        options += ["--by-class"] * sets.by_class + ["--empty"] * sets.empty
    if made.calibration is None and calibrated:
        options.append("--uncalibrated")
    options += [*_passes(made.passes), "--seed", str(made.seed)]
    return shlex.join(["calgp", "decide", _path(folder), *options])


def _evaluation_command(folder: RunFolder, found: Evaluation, card: Card, calibrated: bool) -> str:
    source = [] if found.source == card.run.source else ["--source", found.source]
    options = [*source, *_passes(found.passes), "--seed", str(found.seed)]
    if found.calibrator is None and calibrated:
        options.append("--uncalibrated")
    return shlex.join(["calgp", "evaluate", _path(folder), *options])


def _option(value: Json) -> str:
    if value is None:
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
