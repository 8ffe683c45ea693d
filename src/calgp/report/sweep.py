"""The page of a sweep: one self-contained file with its table, the best setting first."""

from collections.abc import Mapping, Sequence

from .page import Table, render_page

Metrics = Mapping[str, tuple[float, float | None]]


def sweep_page(
    rows: Sequence[tuple[str, str, Metrics, Metrics]], *, title: str, command: str, best: str | None,
    failures: Sequence[str],
) -> str:  # fmt: skip
    """The whole page as HTML; of each row: the setting, its seeds, the scores on the hold-out, those on test images."""
    inside, test = (list(dict.fromkeys(name for row in rows for name in row[place])) for place in (2, 3))
    table = Table(
        "Mean over seeds; below it ± its standard error. The lowest MNLL of the hold-out first; settings whose runs "
        "are not all done come last.",
        ("setting", "seeds"),
        [f"hold-out {name.upper()}" for name in inside] + [f"test {name.upper()}" for name in test],
        [
            ((setting, seeds), [_cell(found, name) for found, names in ((held, inside), (own, test)) for name in names])
            for setting, seeds, held, own in rows
        ],
    )
    return render_page("sweep.html", sweep=table, title=title, command=command, best=best, failures=failures)


def _cell(found: Metrics, name: str) -> tuple[str, str]:
    if name not in found:
        return "not run", ""
    value, error = found[name]
    return f"{value:.4f}", "" if error is None else f"± {error:.4f}"
