"""Deep ensembles: a run folder that lists others."""

import os
from collections.abc import Sequence
from dataclasses import replace

from calgp.errors import CalgpError
from calgp.runs.card import Card, Member
from calgp.runs.environment import environment
from calgp.runs.folder import RunFolder


def ensemble(members: Sequence[RunFolder], folder: RunFolder) -> Card:
    """Make `folder` the ensemble of finished runs, equally weighted (Lakshminarayanan et al. 2017).

    It copies nothing: run.json has the members' paths from the folder. The members' own calibrators are not used; the
    ensemble has one of its own, if it is calibrated, on the images that all members hold out.
    """
    if len({member.path.resolve() for member in members}) < max(2, len(members)):
        raise CalgpError(f"An ensemble needs at least two runs, each of them once; {len(members)} were given.")
    if (folder.path / "run.json").exists():
        raise CalgpError(f"{folder.path} already holds a run. Choose another --out.")
    cards = [member.card() for member in members]
    paths = (os.path.relpath(member.path.resolve(), folder.path.resolve()) for member in members)
    made_of = zip(paths, cards, strict=True)
    listed = tuple(Member(path, card.label, card.network, card.run.seed) for path, card in made_of)
    rows = set.intersection(*(set(card.holdout_rows) for card in cards))
    if len({card.run.source for card in cards}) > 1:  # rows are those of one source
        rows = set()
    common = tuple(row for row in cards[0].holdout_rows if row in rows)
    card = replace(cards[0], holdout_rows=common, environment=environment(), members=listed)
    folder.mixture(card)  # refuses what does not fit together or is not finished
    with folder.owned():
        folder.create(card)
    return card
