"""The command for predictions that were made elsewhere: judge."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from calgp.cli import parameters, rooms
from calgp.cli.shared import check_seed, err, note, out
from calgp.errors import CalgpError
from calgp.json_values import Json


def judge(
    predictions: Annotated[
        list[Path],
        Argument(metavar="FILE...", help="One or two files: .npz or .csv with probabilities or logits, and labels."),
    ],
    kind: Annotated[
        Literal["probs", "log_probs", "logits"] | None,
        Option(help="What the numbers are.", show_default="by the names of arrays or columns"),
    ] = None,
    calibrate: Annotated[
        str | None,
        Option(
            help="Fit temperature, vector, platt or isotonic on a random half; score both on the other.",
            show_default="none",
        ),
    ] = None,
    html: Annotated[Path | None, Option(help="Write a page with diagrams, too.", show_default="none")] = None,
    seed: Annotated[int, Option(help="Seed of the bootstrap and of the random half.", callback=check_seed)] = 0,
    as_json: parameters.AsJson = False,
) -> None:
    """Score predictions that were made anywhere: no model and no images are needed.

    An .npz file has an array probs, log_probs or logits [N, Q] and labels y [N]. A .csv file has a header, a column y
    (or label) and one column a class; columns called logit_… are logits. One column alone is class 1 of two. Two files
    with the same labels are also compared row by row, which detects much smaller differences.

    Example: calgp judge mine.npz theirs.csv --html judged.html
    """
    from calgp.report.judge import judge_page
    from calgp.runs.writing import write_files

    if len(predictions) > 2:
        raise CalgpError(f"Invalid number of files {len(predictions)}: must be one, or two to compare in pairs.")
    if calibrate is not None and len(predictions) > 1:
        raise CalgpError("Invalid --calibrate with two files: must be one file; calibrate each by itself first.")
    read, notes = [rooms.predictions_file.read_predictions(path, kind) for path in predictions], []
    if calibrate is not None:
        before, after, how = rooms.predictions_file.calibrate_on_half(read[0], calibrate, seed=seed)
        read, notes = [after, before], [how]
    found = [rooms.predictions_file.judge(each, seed=seed) for each in read]
    paired = rooms.predictions_file.compare_predictions(read[0], read[1], seed=seed) if len(read) > 1 else None
    if html is not None:
        write_files(html.parent, {html.name: judge_page(found, paired, notes)})
        err.say(f"Wrote {html}.")
    if as_json:
        return print(json.dumps(_plain(found, paired, notes)))
    for each in notes:
        note(each)
    for each in found:
        out.print(rooms.tables.judgement_table(each))
    if paired is not None:
        out.print(rooms.tables.paired_table(found[0].name, found[1].name, paired))


def _plain(
    found: "list[rooms.predictions_file.Judgement]",
    paired: "Mapping[str, rooms.metrics.Difference] | None",
    notes: list[str],
) -> dict[str, Json]:
    """The results for programs."""
    judged = [
        {"name": each.name, "n": each.n, "classes": each.classes, "aurc": each.aurc, "notes": list(each.notes)}
        | asdict(each.own)
        for each in found
    ]
    differences = None if paired is None else {name: asdict(each) for name, each in paired.items()}
    return {"predictions": judged, "differences": differences, "notes": notes}
