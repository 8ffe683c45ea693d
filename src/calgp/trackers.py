"""Runs in other people's experiment trackers: TensorBoard and MLflow. Nothing of calgp needs them.

A run folder is the truth; a tracker gets a copy of it: the options of run.json as parameters, log.jsonl and scores as
metrics, small files as artifacts.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from calgp.errors import CalgpError, name_error
from calgp.json_values import Json
from calgp.runs import RunFolder, to_json
from calgp.runs.description import flat
from calgp.runs.results import LogRecord
from calgp.training import Step

EVERY = 100  # steps between two looks into the log
ARTIFACTS = ("run.json", "log.jsonl", "calibration.json", "report.html", "scores-*.json")  # model: see `track`
Scalar = tuple[str, float, int]  # name, value, step


def track(folder: RunFolder, to: str, where: str, *, model: bool = False) -> str:
    """Copy a run into a tracker; says where it is now.

    Args:
        folder: a run, finished or not.
        to: tensorboard or mlflow.
        where: a directory of event files; or MLflow's store: a directory, or any address that MLflow takes.
        model: copy model.safetensors as an artifact too (MLflow).
    """
    if to not in TRACKERS:
        raise name_error("There is no tracker", to, TRACKERS)
    return TRACKERS[to](folder, where, model)


def parameters(folder: RunFolder) -> dict[str, Json]:
    """What was trained on what, flat: method.depth, backbone.channels, source, seed …

    >>> from calgp.runs import shipped_run
    >>> parameters(shipped_run())["source"]
    'digits'
    """
    card = folder.card()
    described = {"label": card.label, "network": card.network, "train_images": card.train_images}
    return described | flat(to_json(card.run)) | {f"task.{name}": value for name, value in vars(card.task).items()}


def logged(records: list[LogRecord]) -> Iterator[Scalar]:
    """The numbers of log.jsonl: train/nll, train/kl, holdout/err …

    >>> from calgp.runs import shipped_run
    >>> sorted({name for name, _, _ in logged(shipped_run().log())})[:2]
    ['holdout/brier', 'holdout/confidence']
    """
    for record in records:
        for name, value in vars(record).items():
            if name not in ("kind", "step", "n") and isinstance(value, int | float):
                yield f"{record.kind}/{name}", float(value), record.step


def scored(folder: RunFolder, step: int) -> Iterator[Scalar]:
    """The numbers of scores-*.json: mnist/err, mnist/ece, notmnist/entropy_auroc …; calibrated, mnist.platt/err …"""
    for found in [*folder.evaluations(), *folder.shifted()]:
        place = found.source.replace(":", "-").replace("~", "-")
        place += f".{found.calibrator}" if found.calibrator else ""
        values = {} if found.scores is None else {name: v for name, v in vars(found.scores).items() if name != "n"}
        values["mean_entropy"] = found.mean_entropy
        for score, numbers in (found.ood or {}).items():
            values |= {f"{score}_{name}": number.value for name, number in vars(numbers).items()}
        yield from ((f"{place}/{name}", float(value), step) for name, value in values.items())


@contextmanager
def tensorboard_watch(folder: RunFolder, directory: Path, *, resume: bool = False) -> Iterator[Callable[[Step], None]]:
    """For the `watch` of `train`: what is logged goes into event files while the run is trained."""
    writer = _summary_writer(directory / folder.name)
    seen = len(folder.log()) if resume else 0

    def look() -> None:
        nonlocal seen
        records = folder.log()
        for name, value, step in logged(records[seen:]):
            writer.add_scalar(name, value, step)
        seen = len(records)
        writer.flush()

    def watch(step: Step) -> None:
        if step.step % EVERY == 1 and step.step > 1:
            look()

    try:
        yield watch
    finally:
        look()
        writer.close()


def _to_tensorboard(folder: RunFolder, where: str, model: bool) -> str:
    target, records = Path(where) / folder.name, folder.log()
    with _summary_writer(target) as writer:
        writer.add_text("run", "\n".join(f"    {name}: {value}" for name, value in parameters(folder).items()))
        for name, value, step in [*logged(records), *scored(folder, _last(records))]:
            writer.add_scalar(name, value, step)
    return f"Event files: {target}. Look at them with: tensorboard --logdir {where}"


def _summary_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise CalgpError("TensorBoard is not here: pip install 'calgp[tensorboard]'.") from None
    try:
        return SummaryWriter(str(directory))
    except OSError as error:
        raise CalgpError(f"Cannot write in {directory}: {error.strerror or error}.") from None


def _to_mlflow(folder: RunFolder, where: str, model: bool) -> str:
    card, records = folder.card(), folder.log()
    time = card.environment.started
    started = 0 if time is None else int(datetime.fromisoformat(time).timestamp() * 1000)
    with _mlflow(where) as (mlflow, client):
        experiment = client.get_experiment_by_name("calgp")
        number = experiment.experiment_id if experiment else client.create_experiment("calgp")
        tags = {"calgp": str(card.environment.calgp), "folder": str(folder.path)}
        run = client.create_run(number, start_time=started, run_name=folder.name, tags=tags).info.run_id
        params = [mlflow.entities.Param(name, str(value)[:500]) for name, value in parameters(folder).items()]
        client.log_batch(run, params=params)
        scalars = [*logged(records), *scored(folder, _last(records))]
        metrics = [mlflow.entities.Metric(name, value, started, step) for name, value, step in scalars]
        for first in range(0, len(metrics), 1000):  # no more at a time
            client.log_batch(run, metrics=metrics[first : first + 1000])
        for pattern in (*ARTIFACTS, *["model.safetensors"] * model):
            for file in sorted(folder.path.glob(pattern)):
                client.log_artifact(run, str(file))
        client.set_terminated(run, "FINISHED" if folder.finished else "KILLED")
    return f"MLflow run {run} in experiment calgp of {where}"


@contextmanager
def _mlflow(where: str) -> Iterator[tuple[Any, Any]]:
    """MLflow and a client of the store; a directory is a store of files, which MLflow takes only if that is allowed."""
    settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    address = where
    if "://" not in where:
        settings["MLFLOW_ALLOW_FILE_STORE"] = "true"
        address = Path(where).resolve().as_uri()
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= {name: value for name, value in settings.items() if name not in os.environ}
    try:
        try:
            import mlflow
            import mlflow.entities
        except ImportError:
            raise CalgpError("MLflow is not here: pip install 'calgp[mlflow]'.") from None
        try:
            yield mlflow, mlflow.MlflowClient(tracking_uri=address)
        except (mlflow.MlflowException, ImportError, OSError) as error:
            raise CalgpError(f"MLflow refuses {where}: {str(error).splitlines()[0]}") from error
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


TRACKERS: dict[str, Callable[[RunFolder, str, bool], str]] = {"tensorboard": _to_tensorboard, "mlflow": _to_mlflow}


def _last(records: list[LogRecord]) -> int:
    return records[-1].step if records else 0
