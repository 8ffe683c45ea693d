"""RunFolder: which file of a run is where. Every file appears whole or not at all."""

import functools
import json
import os
import platform
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors.torch import save
from torch import Tensor

from calgp import calibration, decisions
from calgp._version import __version__
from calgp.calibration import Calibrator
from calgp.decisions import Decisions
from calgp.errors import CalgpError, brief
from calgp.gp import Mixture, Model
from calgp.nets import Task
from calgp.runs import older
from calgp.runs.reading import (
    check_checkpoint,
    check_columns,
    check_model,
    digest,
    is_file,
    read_header,
    read_json,
    read_lines,
    read_tensors,
)
from calgp.runs.run import Run, from_json, network, to_json
from calgp.runs.schema import CALIBRATION, CARD, DECISIONS, INSIDE, OUTSIDE, RECORD, RECORDS
from calgp.runs.writing import owned, reporting, write_whole

FORMAT = 1  # of run.json; a run folder of another format is refused by name


@dataclass(frozen=True)
class Member:
    """A run that an ensemble is made of: where it is from the ensemble's folder, and what it is."""

    path: str
    label: str
    network: str
    seed: int


@dataclass(frozen=True)
class Card:
    """run.json: what was trained, on what, by what. Of an ensemble: the first member's, and who the members are."""

    run: Run
    task: Task
    classes: tuple[str, ...]
    train_images: int
    checksum: str  # of the training images
    holdout_rows: tuple[int, ...]  # of an ensemble: what all its members hold out
    environment: dict[str, Any]
    members: tuple[Member, ...] = ()  # none but for an ensemble
    class_weights: tuple[float, ...] | None = None  # of the likelihood term, where they are not all 1

    @property
    def label(self) -> str:
        """The method with its options, or what the ensemble is made of."""
        return _of(self.run.label, [member.label for member in self.members])

    @property
    def network(self) -> str:
        return ", ".join(dict.fromkeys(m.network for m in self.members)) if self.members else self.run.backbone_label

    def titled(self, calibrator: str | None) -> str:
        """The label of a result: the method, and what its probabilities have been through."""
        if calibrator is not None:
            return f"{self.label} + {calibrator}"
        return f"{self.label}, uncalibrated" if self.run.method.calibrator and not self.members else self.label


def _of(single: str, members: list[str]) -> str:
    if not members:
        return single
    kinds = list(dict.fromkeys(members))
    return f"ensemble of {len(members)} {kinds[0]}" if len(kinds) == 1 else f"ensemble of {', '.join(members)}"


class RunFolder:
    """A folder that holds a run as data: run.json, model.safetensors, log.jsonl, calibration, decisions, scores …

    Predictions and scores of calibrated probabilities have the calibrator in their names: scores-mnist.temperature.json
    stands beside scores-mnist.json. Those of corrupted images have the corruption: scores-mnist~noise-3.json.
    An ensemble has no model of its own; its run.json names those of its members.

    With `writes` false nothing is ever written: so the other ranks of a run have the folder that rank 0 writes.
    """

    def __init__(self, path: Path | str, *, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        """Whether the training has come to its end; an ensemble's has."""
        return is_file(self.path / "model.safetensors") or self._is_ensemble()

    @property
    def interrupted(self) -> bool:
        """Whether a training can be resumed here."""
        return is_file(self.path / "checkpoint.safetensors")

    def owned(self) -> AbstractContextManager[None]:
        """Be the only process that writes here. What dead ones have left unfinished is removed."""
        return owned(self.path) if self.writes else nullcontext()

    def create(self, card: Card) -> None:
        """Make the folder, if need be, and its run.json."""
        data = {
            "format": FORMAT,
            "run": to_json(card.run),
            "task": asdict(card.task),
            "classes": list(card.classes),
            "train_images": card.train_images,
            "checksum": card.checksum,
            "holdout_rows": list(card.holdout_rows),
            "environment": card.environment,
            "members": [asdict(member) for member in card.members],
            "class_weights": card.class_weights,
        }
        if self.writes:
            with reporting(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
        self._write_json("run.json", data)

    def card(self) -> Card:
        """run.json, checked."""
        if not is_file(self.path / "run.json"):
            raise CalgpError(
                f"{self.path} is no run folder: it has no run.json. `calgp train --out {self.path}` makes one."
            )
        data = read_json(self.path / "run.json")
        version = data.get("format") if isinstance(data, dict) else None
        if version != FORMAT:
            writer = data.get("environment") if isinstance(data, dict) else None
            writer = writer.get("calgp", "unknown") if isinstance(writer, dict) else "unknown"
            raise CalgpError(
                f"{self.path / 'run.json'} has format {brief(version)}, written by calgp {str(writer)[:40]}; this one "
                f"reads format {FORMAT}. Use the version that wrote it, or train again."
            )
        try:
            CARD.check(data)
            if len(data["classes"]) != data["task"]["classes"]:
                raise CalgpError(f"{len(data['classes'])} classes are named, {data['task']['classes']} are counted")
            return Card(
                run=from_json(data["run"]),
                task=Task(**{name: data["task"][name] for name in ("channels", "height", "width", "classes")}),
                classes=tuple(data["classes"]),
                train_images=data["train_images"],
                checksum=data["checksum"],
                holdout_rows=tuple(data["holdout_rows"]),
                environment=data["environment"],
                members=tuple(
                    Member(member["path"], member["label"], member["network"], member["seed"])
                    for member in data.get("members", ())
                ),
                class_weights=None if data.get("class_weights") is None else tuple(data["class_weights"]),
            )
        except CalgpError as error:
            path = self.path / "run.json"
            raise CalgpError(f"{path} is damaged ({str(error).rstrip('.')}); copy it again or train again.") from None

    def model(self) -> Model:
        """The trained model."""
        if not self.finished:
            hint = f"`calgp train --resume {self.path}` goes on" if self.interrupted else "train again"
            raise CalgpError(f"{self.path} holds no finished model; {hint}.")
        card = self.card()
        if card.members:
            return self.mixture(card)
        tensors = self.tensors("model.safetensors")  # refuses what does not fit, before anything is built
        model = build(card.run, card.task)
        load_state(model, tensors, self.path / "model.safetensors")
        return model

    def mixture(self, card: Card) -> Mixture:
        """The models of an ensemble's members, which must have learned the same task."""
        folders = [RunFolder(os.path.normpath(self.path.resolve() / member.path)) for member in card.members]
        if len({folder.path for folder in folders}) < len(folders):
            raise CalgpError(f"{self.path} lists a member twice; an ensemble has each of its runs once.")
        for folder in folders:
            other = folder.card()
            if other.members:
                raise CalgpError(f"{folder.path} is an ensemble itself; list its members instead.")
            if (other.task, other.classes) != (card.task, card.classes):
                raise CalgpError(
                    f"{folder.path} tells {_task(other)}, {folders[0].path} {_task(card)}; the members of an ensemble "
                    "must have the same classes and take the same images."
                )
        try:
            return Mixture([folder.model() for folder in folders])
        except ValueError as error:
            raise CalgpError(f"These runs are no ensemble: {error}.") from None

    def calibration(self) -> dict[str, Any] | None:
        """calibration.json: the calibrator, and what it does on the hold-out; None if the run is not calibrated."""
        path = self.path / "calibration.json"
        if not is_file(path):
            return None
        try:
            return CALIBRATION.check(read_json(path))
        except CalgpError as error:
            raise CalgpError(f"{path} cannot be used ({error}); `calgp calibrate {self.path}` makes it anew.") from None

    def calibrator(self, found: dict[str, Any] | None = None) -> Calibrator | None:
        """What all predictions of the run go through, if it is calibrated; or of what calibration.json once held."""
        found = self.calibration() if found is None else found
        if found is None:
            return None
        try:
            return calibration.from_json({"calibrator": found["calibrator"]} | found["parameters"])
        except (CalgpError, KeyError, TypeError) as error:
            path = self.path / "calibration.json"
            raise CalgpError(f"{path} cannot be used ({error}); `calgp calibrate {self.path}` makes it anew.") from None

    def write_calibration(self, found: dict[str, Any]) -> None:
        self._write_json("calibration.json", found)

    def probabilities(self, *, calibrated: bool) -> dict[str, Any] | None:
        """What probabilities go through: the calibrator and its parameters; None: they are as trained."""
        found = self.calibration() if calibrated else None
        return None if found is None else {name: found.get(name) for name in ("calibrator", "parameters")}

    def decisions(self) -> dict[str, Any] | None:
        """decisions.json: thresholds, sets, and the probabilities that they are for; None if nothing was decided."""
        path = self.path / "decisions.json"
        if not is_file(path):
            return None
        try:
            return DECISIONS.check(read_json(path))
        except CalgpError as error:
            raise CalgpError(f"{path} cannot be used ({error}); `calgp decide {self.path}` makes it anew.") from None

    def decider(self, *, calibrated: bool) -> Decisions | None:
        """The run's decisions, if they were made for such probabilities as it gives now."""
        found = self.decisions()
        if found is None:
            return None
        try:
            same = found["calibration"] == self.probabilities(calibrated=calibrated)
            return decisions.from_json(found) if same else None
        except (CalgpError, KeyError, TypeError) as error:
            path = self.path / "decisions.json"
            raise CalgpError(f"{path} cannot be used ({error}); `calgp decide {self.path}` makes it anew.") from None

    def write_decisions(self, found: dict[str, Any]) -> None:
        self._write_json("decisions.json", found)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file of the folder; of a model or a checkpoint, those that run.json describes."""
        self.check_tensors(name)
        found = read_tensors(self.path / name)
        if name == "checkpoint.safetensors":
            older.check_resumable(found)
        return older.whiten(found)

    def check_tensors(self, name: str) -> None:
        """Refuse a model or a checkpoint that is not of the run, by its header alone."""
        check = {"model.safetensors": check_model, "checkpoint.safetensors": check_checkpoint}.get(name)
        if check is not None:
            card, path = self.card(), self.path / name
            check(card.run, card.task, read_header(path), path)

    def predictions(self, source: str, calibrator: str | None = None) -> dict[str, Tensor] | None:
        """What was predicted of a source: a row an image in each column; None if that was not kept."""
        path = self.path / self.predictions_name(source, calibrator)
        return check_columns(read_tensors(path), self.card().task.classes, path) if is_file(path) else None

    def metadata(self, name: str) -> dict[str, Any]:
        """The JSON that was stored beside the tensors of a file."""
        return read_header(self.path / name).metadata

    def write_tensors(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, Any] | None = None) -> None:
        """Store tensors, with JSON beside them."""
        if not self.writes:
            return
        tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        tensors = _apart(tensors)
        self._write(name, save(tensors, {"calgp": json.dumps(metadata or {}), "sha256": digest(tensors)}))

    def remove(self, name: str) -> None:
        if not self.writes:
            return
        with reporting(self.path):
            (self.path / name).unlink(missing_ok=True)

    def append_log(self, record: dict[str, Any]) -> None:
        """One line of log.jsonl."""
        if not self.writes:
            return
        with reporting(self.path), (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def flush_log(self) -> None:
        """Make the lines of log.jsonl last, before a file that counts on them is written."""
        if not self.writes:
            return
        with reporting(self.path), (self.path / "log.jsonl").open("a") as file:
            os.fsync(file.fileno())

    def cut_log(self, step: int) -> None:
        """Leave out of log.jsonl what comes after a step, so that the steps can be made again."""
        kept = [json.dumps(record) + "\n" for record in self.log() if record["step"] <= step]
        self._write("log.jsonl", "".join(kept).encode())

    def log(self) -> list[dict[str, Any]]:
        """log.jsonl. Of a step written twice (by a resumed run) the later line counts; a line cut off is left out."""
        path = self.path / "log.jsonl"
        records: dict[tuple[str, int], dict[str, Any]] = {}
        for line in read_lines(path) if is_file(path) else []:
            try:
                record = json.loads(line)
                if RECORDS.get(record["kind"], RECORD).fits(record):
                    records[record["kind"], record["step"]] = record
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return sorted(records.values(), key=lambda record: record["step"])

    def write_evaluation(self, source: str, scores: dict[str, Any], corruption: str | None = None) -> None:
        """Keep scores, beside those of the same source with another calibrator or none (`scores["calibrator"]`)."""
        self._write_json(f"scores-{_result(source, scores.get('calibrator'), corruption)}.json", scores)

    def evaluations(self) -> list[dict[str, Any]]:
        """What the run was evaluated on, images as they are: the contents of its scores-*.json."""
        return [self._evaluation(name) for name in self._scores() if "~" not in name]

    def shifted(self) -> list[dict[str, Any]]:
        """What the run was evaluated on, images corrupted: the contents of its scores-*~*.json."""
        return [self._evaluation(name) for name in self._scores() if "~" in name]

    def evaluation(self, source: str, calibrator: str | None = None) -> dict[str, Any] | None:
        """What the run was found to be on a source with a calibrator or none; None if it was not evaluated so."""
        name = self.scores_name(source, calibrator)
        return self._evaluation(name) if is_file(self.path / name) else None

    def scores_name(self, source: str, calibrator: str | None = None) -> str:
        return f"scores-{_result(source, calibrator, None)}.json"

    def predictions_name(self, source: str, calibrator: str | None = None, corruption: str | None = None) -> str:
        return f"predictions-{_result(source, calibrator, corruption)}.safetensors"

    def _scores(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("scores-*.json"))

    def _evaluation(self, name: str) -> dict[str, Any]:
        path = self.path / name
        data = read_json(path)
        schema = OUTSIDE if isinstance(data, dict) and data.get("outside") is True else INSIDE
        try:
            return schema.check(data)
        except CalgpError as error:
            raise CalgpError(f"{path} is damaged ({error}); `calgp evaluate {self.path}` makes it anew.") from None

    def _is_ensemble(self) -> bool:
        return is_file(self.path / "run.json") and bool(self.card().members)

    def _write_json(self, name: str, data: dict[str, Any]) -> None:
        self._write(name, (json.dumps(data, indent=1) + "\n").encode())

    def _write(self, name: str, data: bytes) -> None:
        if not self.writes:
            return
        with reporting(self.path):
            write_whole(self.path / name, data)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory (tied weights), each with its own: safetensors stores no other."""
    seen: set[int] = set()
    apart = {}
    for key, value in tensors.items():
        memory = value.untyped_storage().data_ptr()
        apart[key] = value.clone() if memory in seen else value
        seen.add(memory)
    return apart


def shipped_run() -> RunFolder:
    """The small run that comes with the package: CNN+GP(SORF) on `digits`."""
    return RunFolder(Path(__file__).parent / "shipped")


def build(run: Run, task: Task) -> Model:
    """The model of a run, everything that is drawn once drawn from its seed."""
    generator = torch.Generator().manual_seed(run.seed)
    model = run.method.build(task, network(run), generator=generator)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def load_state(module: torch.nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Put tensors from a file into a module; those of another model are refused."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CalgpError(f"{path} does not fit the model that run.json describes: {first}") from None


def arithmetic(fabric: Fabric | None = None) -> dict[str, Any]:
    """What decides the bits of a result, besides the run and its data."""
    where = {} if fabric is None else {"device": fabric.device.type, "precision": fabric.strategy.precision.precision}
    return {
        "calgp": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "processor": processor(),
    } | where


@functools.cache
def processor() -> str:
    """The processor's name, where the system tells it, and the instructions that torch uses of it."""
    told = Path("/proc/cpuinfo")
    text = told.read_text(errors="replace") if told.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{found[1] if found else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def environment(fabric: Fabric | None = None) -> dict[str, Any]:
    """What a run was made by."""
    program = Path(sys.argv[0]).name
    command = ["calgp"] if program in ("calgp", "__main__.py") else ["python", program]
    return arithmetic(fabric) | {
        "python": platform.python_version(),
        "platform": platform.system(),
        "command": [*command, *sys.argv[1:]],
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _result(source: str, calibrator: str | None, corruption: str | None) -> str:
    """The part of a file's name that tells what was predicted; a slug has neither ~ nor dot, so none is mixed up."""
    shift = "" if corruption is None else f"~{corruption}"
    return slug(source) + shift + ("" if calibrator is None else f".{calibrator}")


def _task(card: Card) -> str:
    task = card.task
    return (
        f"{task.classes} classes ({', '.join(card.classes[:3])}, …) in {task.channels} × {task.height} × {task.width}"
    )


def slug(source: str) -> str:
    """A source's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-").lower()[-60:]
