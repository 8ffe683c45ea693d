"""Run what experiments lack, like make, and read what they found."""

from collections.abc import Callable, Iterable

from calgp.runs import RunFolder
from calgp.runs.writing import owned
from calgp.search.engines import Engine, SerialEngine
from calgp.search.image_scores import image_scores_name
from calgp.search.jobs import Job, Paths, Progress, done_folder, finished_results, first_done, keep, key, run_jobs

from .rows import Cell, Row, row_of


def jobs_of(cells: Iterable[Cell]) -> list[Job]:
    """The runs of all cells, each once, with all that they are tested on; the cheapest first."""
    found: dict[tuple[str, int], Job] = {}
    for cell in cells:
        for run in cell.runs:
            name = key(run), cell.samples
            job = found.get(name, Job(run, cell.samples))
            tests = tuple(dict.fromkeys((*job.tests, cell.test)))
            outside = job.outside + ((cell.outside,) if cell.outside and cell.outside not in job.outside else ())
            found[name] = Job(run, cell.samples, tests, outside, temperature=job.temperature or cell.temperature)
    return sorted(found.values(), key=lambda job: job.seconds)


def _keep_finished(cells: Iterable[Cell], where: Paths) -> None:
    """Keep what is finished and was not kept: by a process that was killed, or without its per-image scores."""
    if where.keep is None:
        return
    for job in jobs_of(cells):
        folder, target = RunFolder(where.runs / job.key), RunFolder(where.keep / job.key)
        if first_done(job, [folder]) is not None and (
            first_done(job, [target]) is None or _lacks_image_scores(folder, target)
        ):
            keep(folder, target.path)


def _lacks_image_scores(folder: RunFolder, target: RunFolder) -> bool:
    """Whether the run's folder has predictions whose per-image scores were not kept."""
    return any(
        not (target.path / image_scores_name(folder, evaluated)).is_file()
        for evaluated in folder.evaluations()
        if (folder.path / folder.predictions_name(evaluated.source, evaluated.calibrator)).is_file()
    )


def missing(cells: Iterable[Cell], where: Paths) -> list[Job]:
    """The jobs that are still to be done."""
    results = finished_results(where.small)
    return [job for job in jobs_of(cells) if done_folder(job, where, results) is None]


def run_missing(
    cells: Iterable[Cell],
    where: Paths,
    *,
    engine: Engine = SerialEngine(),
    watch: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, str]:
    """Run what is missing for some cells; what failed, by key, with the reason. The others go on.

    Of two processes with the same place for their runs the second is refused.
    """
    cells = list(cells)
    with owned(where.runs):
        _keep_finished(cells, where)
        return run_jobs(missing(cells, where), where, engine=engine, watch=watch)


def rows_of(cells: Iterable[Cell], where: Paths) -> list[Row]:
    """A row for each cell, from the small results of runs that are done; `where.runs` is not looked at."""
    results = finished_results(where.small)
    rows = []
    for cell in cells:
        outside = (cell.outside,) if cell.outside else ()
        wanted = [Job(run, cell.samples, (cell.test,), outside, temperature=cell.temperature) for run in cell.runs]
        found = [first_done(job, results.get(job.key, ())) for job in wanted]
        rows.append(row_of(cell, [folder for folder in found if folder is not None]))
    return rows
