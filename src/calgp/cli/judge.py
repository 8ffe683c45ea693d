"""The command for predictions that were made elsewhere: judge."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from calgp.cli.shared import JsonOption, check_sampling, err, out
from calgp.errors import CalgpError
from calgp.json_values import Json

if TYPE_CHECKING:
    from calgp.metrics import Difference
    from calgp.runs.predictions_file import Judgement

FilesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="One or two files: .npz or .csv with probabilities or logits, and labels."),
]
KindOption = Annotated[
    Literal["probs", "log_probs", "logits"] | None,
    typer.Option(help="What the numbers are.", show_default="by the names of arrays or columns"),
]
CalibrateOption = Annotated[
    str | None,
    typer.Option(
        help="Fit temperature, vector, platt or isotonic on a random half; score both on the other.",
        show_default="none",
    ),
]


def judge(
    predictions: FilesArgument,
    kind: KindOption = None,
    calibrate: CalibrateOption = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with diagrams, too.", show_default="none")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap and of the random half.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Score predictions that were made anywhere: no model and no images are needed.

    An .npz file has an array probs, log_probs or logits [N, Q] and labels y [N]. A .csv file has a header, a column y
    (or label) and one column a class; columns called logit_… are logits. Two files with the same labels are also
    compared row by row, which detects much smaller differences.

    Example: calgp judge mine.npz theirs.csv --html judged.html
    """
    from calgp.cli import tables
    from calgp.runs import predictions_file as files

    check_sampling(None, seed)
    if len(predictions) > 2:
        raise CalgpError(f"Invalid number of files {len(predictions)}: must be one, or two to compare in pairs.")
    if calibrate is not None and len(predictions) > 1:
        raise CalgpError("Invalid --calibrate with two files: must be one file; calibrate each by itself first.")
    read, notes = [files.read_predictions(path, kind) for path in predictions], []
    if calibrate is not None:
        before, after, note = files.calibrate_on_half(read[0], calibrate, seed=seed)
        read, notes = [after, before], [note]
    found = [files.judge(each, seed=seed) for each in read]
    paired = files.compare_predictions(read[0], read[1], seed=seed) if len(read) > 1 else None
    if html is not None:
        _write_page(html, found, paired, notes)
    if as_json:
        return print(json.dumps(_plain(found, paired, notes)))
    for note in notes:
        err.print(f"Note: {note}", soft_wrap=True)
    for each in found:
        out.print(tables.judgement_table(each))
    if paired is not None:
        out.print(tables.paired_table(found[0].name, found[1].name, paired))


def _write_page(
    path: Path, found: "list[Judgement]", paired: "Mapping[str, Difference] | None", notes: list[str]
) -> None:
    from calgp.report.judge import judge_page
    from calgp.runs.writing import wrap_os_errors, write_whole

    with wrap_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, judge_page(found, paired, notes).encode("utf-8", "replace"))
    err.print(f"Wrote {path}.", soft_wrap=True)


def _plain(found: "list[Judgement]", paired: "Mapping[str, Difference] | None", notes: list[str]) -> dict[str, Json]:
    """The results for programs."""
    from dataclasses import asdict

    judged = [
        {"name": each.name, "n": each.n, "classes": each.classes, "aurc": each.aurc, "notes": list(each.notes)}
        | asdict(each.own)
        for each in found
    ]
    differences = None
    if paired is not None:
        differences = {name: {"value": each.value, "half": each.half} for name, each in paired.items()}
    return {"predictions": judged, "differences": differences, "notes": notes}
