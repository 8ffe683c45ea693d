"""Progress bars of the command line, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn

from calgp.cli.terminal import PlainColumn, Terminal
from calgp.search.jobs import Progress as Done
from calgp.training.loop import Step

PROGRESS = Terminal(stderr=True)
STAGES = {"features": "features of the frozen network", "head": "head on these features"}


@contextmanager
def training_bar(title: str) -> Iterator[Callable[[Step], None]]:
    """A bar with the two parts of the bound, smoothed, and the time that is left."""
    PROGRESS.say(title)
    columns = (
        BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), PlainColumn("left"), TimeRemainingColumn(),
        PlainColumn("{task.fields[bound]}"),
    )  # fmt: skip
    with Progress(*columns, console=PROGRESS) as bar:
        task = bar.add_task("", total=None, bound="")
        smoothed, text = None, ""

        def watch(step: Step) -> None:
            nonlocal smoothed, text
            if step.stage is not None:
                text = STAGES[step.stage]
            elif step.skipped is not None:
                PROGRESS.say(f"Step {step.step} was skipped: {step.skipped}.")
            elif step.step % 10 == 0 or step.step == step.steps:
                smoothed = step.nll.item() if smoothed is None else 0.8 * smoothed + 0.2 * step.nll.item()
                text = f"nll {smoothed:.4g}  kl/n {step.kl.item():.3g}"
            bar.update(task, completed=step.step, total=step.steps, bound=text)

        yield watch


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over a known amount: call with (how much more, how much in all)."""
    with Progress(PlainColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=PROGRESS) as bar:
        task = bar.add_task(title, total=None)
        yield lambda more, total: bar.update(task, advance=more, total=total)


@contextmanager
def steps_shown() -> Iterator[Callable[[str], None]]:
    """What is being done now, by name."""
    with Progress(SpinnerColumn(), PlainColumn("{task.description}"), console=PROGRESS, transient=True) as bar:
        task = bar.add_task("")
        yield lambda what: bar.update(task, description=what)


@contextmanager
def overall_bar() -> Iterator[Callable[[Done], None]]:
    """A bar over many runs, weighted by what each is expected to take, with the time that is left."""
    columns = (
        BarColumn(None), PlainColumn("{task.fields[runs]}"), TimeElapsedColumn(), PlainColumn("left"),
        TimeRemainingColumn(), PlainColumn("{task.fields[now]}"),
    )  # fmt: skip
    with Progress(*columns, console=PROGRESS) as bar:
        task = bar.add_task("", total=None, runs="", now="")

        def watch(done: Done) -> None:
            runs = f"{done.done}/{done.jobs} runs" + (f", {done.failed} failed" if done.failed else "")
            bar.update(task, completed=done.work, total=max(done.whole, 1e-9), runs=runs, now=done.now)

        yield watch
