"""RunFolder: which file of a run is where. Every file appears whole or not at all."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor

from calgp.errors import CalgpError, short_repr
from calgp.gp import Mixture, Model
from calgp.json_values import Json
from calgp.options import adapter
from calgp.runs import older, reading
from calgp.runs.build import build, load_state
from calgp.runs.card import FORMAT, Card
from calgp.runs.reading import LARGEST_JSON, digest, is_file, read_header, read_json, read_tensors
from calgp.runs.record import parse, to_json
from calgp.runs.results import INSIDE, Calibration, Checkpoint, Evaluation, FittedDecisions, LogRecord, TrainRecord
from calgp.runs.writing import owned, wrap_os_errors, write_whole

CHECKPOINT, NETWORK = "checkpoint.safetensors", "network.json"
T = TypeVar("T")


class RunFolder:
    """A folder that holds a run as data: run.json, model.safetensors, log.jsonl, calibration, decisions, scores …

    Predictions and scores of calibrated probabilities have the calibrator in their names: scores-mnist.temperature.json
    stands beside scores-mnist.json. Those of corrupted images have the corruption: scores-mnist~noise-3.json.
    An ensemble has no model of its own; its run.json names those of its members.

    With `writes` false nothing is ever written: so the other ranks of a run have the folder that rank 0 writes.

    >>> folder = shipped_run()
    >>> folder.card().run.source, folder.evaluation("letters").outside
    ('digits', True)
    """

    def __init__(self, path: str | os.PathLike[str], *, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        """Whether the training has come to its end; an ensemble's has."""
        if is_file(self.path / "model.safetensors"):
            return True
        return is_file(self.path / "run.json") and bool(self.card().members)

    @property
    def interrupted(self) -> bool:
        """Whether a training can be resumed here."""
        return is_file(self.path / "checkpoint.safetensors")

    def owned(self) -> AbstractContextManager[None]:
        """Be the only process that writes here. What dead ones have left unfinished is removed."""
        return owned(self.path) if self.writes else nullcontext()

    def create(self, card: Card) -> None:
        """Make the folder, if need be, and its run.json."""
        data = to_json(card) | {"environment": _without_none(to_json(card.environment))}
        if self.writes:
            with wrap_os_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
        if (network := card.run.backbone.stored_text()) is not None:
            self._write(NETWORK, network.encode())
        self._write_json("run.json", data, Card)

    def card(self) -> Card:
        """run.json, checked."""
        path = self.path / "run.json"
        if not is_file(path):
            raise CalgpError(f"{self.path} is no run folder: it has no run.json. `calgp train` makes one.")
        data = read_json(path)
        version = data.get("format") if isinstance(data, dict) else None
        if version != FORMAT:
            writer = data.get("environment") if isinstance(data, dict) else None
            writer = writer.get("calgp", "unknown") if isinstance(writer, dict) else "unknown"
            raise CalgpError(
                f"{path} has format {short_repr(version)}, written by calgp {str(writer)[:40]}; this one reads format "
                f"{FORMAT}. Use the version that wrote it, or train again."
            )
        try:
            card = parse(Card, data)
        except CalgpError as error:
            raise CalgpError(f"{path} is damaged ({str(error).rstrip('.')}); copy it again or train again.") from None
        reading.recall_network(card.run, self.path / NETWORK)
        return card

    def model(self, card: Card | None = None) -> Model:
        """The trained model, in evaluation mode; `card` if run.json has been read already."""
        card = self.card() if card is None else card
        if card.members:
            return self.mixture(card).eval()
        if card.upgraded is not None or card.vectors is not None:
            raise CalgpError(f"{self.path} has no network that was trained here; it cannot be a member of an ensemble.")
        path = self.path / "model.safetensors"
        if not is_file(path):
            hint = f"`calgp train --resume {self.path}` goes on" if self.interrupted else "train again"
            raise CalgpError(f"{self.path} holds no finished model; {hint}.")
        header = read_header(path)
        reading.check_model(card.run, card.task, header, path)  # before anything is built
        model = build(card.run, card.task)
        load_state(model, older.whiten(read_tensors(path, header)), path)
        return model.eval()

    def mixture(self, card: Card) -> Mixture:
        """The models of an ensemble's members, which must have learned the same task."""
        folders = [RunFolder(os.path.normpath(self.path.resolve() / member.path)) for member in card.members]
        if len({folder.path for folder in folders}) < len(folders):
            raise CalgpError(f"{self.path} lists a member twice; an ensemble has each of its runs once.")
        cards = [folder.card() for folder in folders]
        for folder, other in zip(folders, cards, strict=True):
            if other.members:
                raise CalgpError(f"{folder.path} is an ensemble itself; list its members instead.")
            if (other.task, other.classes) != (card.task, card.classes):
                raise CalgpError(
                    f"{folder.path} has {other.task_summary()}, {folders[0].path} {card.task_summary()}; the members "
                    "of an ensemble must have the same classes and take the same images."
                )
        try:
            return Mixture([folder.model(other) for folder, other in zip(folders, cards, strict=True)])
        except ValueError as error:
            raise CalgpError(f"These runs are no ensemble: {error}.") from None

    def calibration(self) -> Calibration | None:
        """calibration.json; None if the run is not calibrated."""
        return self._optional("calibration.json", Calibration, "calibrate")

    def write_calibration(self, found: Calibration) -> None:
        self._write_json("calibration.json", to_json(found), Calibration)

    def decisions(self) -> FittedDecisions | None:
        """decisions.json; None if nothing was decided."""
        return self._optional("decisions.json", FittedDecisions, "decide")

    def write_decisions(self, found: FittedDecisions) -> None:
        self._write_json("decisions.json", to_json(found), FittedDecisions)

    def _optional(self, name: str, kind: type[T], command: str) -> T | None:
        return self._read(name, kind, "cannot be used", command) if is_file(self.path / name) else None

    def _read(self, name: str, kind: type[T], broken: str, command: str) -> T:
        """A record of a file; where it is none, what is wrong and the command that makes a new one."""
        path = self.path / name
        try:
            return parse(kind, read_json(path))
        except CalgpError as error:
            raise CalgpError(
                f"{path} {broken} ({str(error).rstrip('.')}); `calgp {command} {self.path}` makes a new one."
            ) from None

    def checkpoint(self, card: Card) -> tuple[dict[str, Tensor], Checkpoint]:
        """The tensors of the checkpoint, and how far it is."""
        path = self.path / CHECKPOINT
        header = read_header(path)
        state = reading.check_checkpoint(
            card.run, card.task, header, path, steps=card.run.total_steps(card.train_images)
        )
        tensors = read_tensors(path, header)
        older.check_resumable(tensors)
        return older.whiten(tensors), state

    def check_checkpoint(self, card: Card) -> Checkpoint:
        """Refuse a checkpoint that is not of the run, by its header alone; how far it is."""
        path = self.path / CHECKPOINT
        steps = card.run.total_steps(card.train_images)
        return reading.check_checkpoint(card.run, card.task, read_header(path), path, steps=steps)

    def predictions(self, source: str, calibrator: str | None, classes: int) -> dict[str, Tensor] | None:
        """What was predicted of a source: a row an image in each column; None if that was not kept.

        Predictions that are not those which were scored, since an evaluation was killed between its two files, are
        refused.
        """
        return self.columns(self.predictions_name(source, calibrator), classes, self.evaluation(source, calibrator))

    def columns(self, name: str, classes: int, scored: Evaluation | None = None) -> dict[str, Tensor] | None:
        """The columns of a file of predictions, checked; None if there is no such file. `scored`: what they gave."""
        path = self.path / name
        if not is_file(path):
            return None
        header = read_header(path)
        if scored is not None and scored.predictions not in (None, header.digest):
            raise CalgpError(
                f"{path} and the scores beside it are of two evaluations, of which one was not finished; `calgp "
                f"evaluate {self.path}` with the same options makes both again."
            )
        return reading.check_columns(read_tensors(path, header), classes, path)

    def checksum(self, name: str) -> str | None:
        """The checksum of the tensors in a file, as it tells it; None if there is no such file."""
        return read_header(self.path / name).digest if is_file(self.path / name) else None

    def write_tensors(self, name: str, tensors: dict[str, Tensor], metadata: Mapping[str, Json] | None = None) -> str:
        """Store tensors, with JSON beside them; the checksum of the tensors. Equal ones give equal bytes."""
        tensors = _apart({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
        checksum = digest(tensors)
        if self.writes:
            self._write(name, in_order(save(tensors, {"calgp": json.dumps(metadata or {}), "sha256": checksum})))
        return checksum

    def remove(self, name: str) -> None:
        if self.writes:
            with wrap_os_errors(self.path):
                (self.path / name).unlink(missing_ok=True)

    def append_log(self, record: LogRecord) -> None:
        """One line of log.jsonl."""
        if self.writes:
            with wrap_os_errors(self.path), (self.path / "log.jsonl").open("a") as file:
                file.write(_log_line(record))

    def flush_log(self) -> None:
        """Make the lines of log.jsonl last, before a file that counts on them is written."""
        if self.writes:
            with wrap_os_errors(self.path), (self.path / "log.jsonl").open("a") as file:
                os.fsync(file.fileno())

    def cut_log(self, step: int) -> None:
        """Leave out of log.jsonl what comes after a step, so that the steps can be made again."""
        self._write("log.jsonl", "".join(_log_line(each) for each in self.log() if each.step <= step).encode())

    def log(self) -> list[LogRecord]:
        """log.jsonl. Of a step written twice (by a resumed run) the later line counts; a line cut off is left out."""
        path = self.path / "log.jsonl"
        records: dict[tuple[str, int], LogRecord] = {}
        for line in reading.read_lines(path) if is_file(path) else []:
            try:
                record = adapter(LogRecord).validate_json(line, strict=True)
                records[record.kind, record.step] = record
            except ValidationError:
                continue
        return sorted(records.values(), key=lambda record: record.step)

    def train_seconds(self) -> float:
        """How long the training took, by its log."""
        return sum(record.seconds for record in self.log() if isinstance(record, TrainRecord))

    def write_evaluation(self, found: Evaluation) -> None:
        """Keep scores, beside those of the same source with another calibrator or none."""
        self._write_json(self.scores_name(*found.named), evaluation_data(found), Evaluation)

    def evaluations(self) -> list[Evaluation]:
        """What the run was evaluated on, images as they are: its scores-*.json."""
        return self._evaluations(corrupted=False)

    def shifted(self) -> list[Evaluation]:
        """What the run was evaluated on, images corrupted: its scores-*~*.json."""
        return self._evaluations(corrupted=True)

    def evaluation(self, source: str, calibrator: str | None = None) -> Evaluation | None:
        """What the run was found to be on a source with a calibrator or none; None if it was not evaluated so."""
        name = self.scores_name(source, calibrator)
        return self._evaluation(name) if is_file(self.path / name) else None

    def scores_name(self, source: str, calibrator: str | None = None, corruption: str | None = None) -> str:
        return f"scores-{_result(source, calibrator, corruption)}.json"

    def predictions_name(self, source: str, calibrator: str | None = None, corruption: str | None = None) -> str:
        return f"predictions-{_result(source, calibrator, corruption)}.safetensors"

    def _evaluations(self, *, corrupted: bool) -> list[Evaluation]:
        names = sorted(path.name for path in self.path.glob("scores-*.json"))
        return [self._evaluation(name) for name in names if ("~" in name) == corrupted]

    def _evaluation(self, name: str) -> Evaluation:
        return self._read(name, Evaluation, "is damaged", "evaluate")

    def _write_json(self, name: str, data: Mapping[str, Json], kind: type) -> None:
        """Write what can be read again as a record of this kind; anything else is refused here, before work is lost."""
        text = (json.dumps(data, indent=1) + "\n").encode()
        try:
            json.dumps(data, ensure_ascii=False).encode("utf-8")
            if len(text) > LARGEST_JSON:
                raise CalgpError(f"it would have {len(text):,} bytes, and {LARGEST_JSON:,} can be read")
            parse(kind, data)
        except UnicodeEncodeError as error:
            raise CalgpError(f"{name} cannot be written: {short_repr(error.object)} is no UTF-8; rename it.") from None
        except CalgpError as error:
            raise CalgpError(f"{name} cannot be written, since it could not be read again: {error}.") from None
        self._write(name, text)

    def _write(self, name: str, data: bytes) -> None:
        if self.writes:
            with wrap_os_errors(self.path):
                write_whole(self.path / name, data)


def in_order(data: bytes) -> bytes:
    """A file of tensors with its metadata in the order of their names: safetensors writes them in any order."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(data)[8 + length :]])


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
    """The small run that comes with the package: CNN+GP(SORF) on `digits`.

    >>> shipped_run().card().classes[:3]
    ('0', '1', '2')
    """
    return RunFolder(Path(__file__).parent / "shipped")


def open_folder(path: str | os.PathLike[str]) -> RunFolder:
    """A run folder by its path; "shipped" is the one that comes with the package, unless there is such a folder.

    >>> open_folder("shipped").card().run.source, open_folder("runs/mine").name
    ('digits', 'mine')
    """
    return shipped_run() if str(path) == "shipped" and not Path(path).exists() else RunFolder(path)


def check_new(path: Path) -> None:
    """Refuse a folder that holds anything."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CalgpError(f"{path} is there already; choose the name of a new folder.")


def evaluation_data(found: Evaluation) -> dict[str, Json]:
    """What scores-*.json holds: of images of other classes no scores, of the run's own nothing that compares them."""
    data = to_json(found) | {"environment": _without_none(to_json(found.environment))}
    others = (*INSIDE, "confusion", "selective") if found.outside else ("ood", "inside")
    return {key: value for key, value in data.items() if key not in others}


def _log_line(record: LogRecord) -> str:
    return json.dumps(_without_none(asdict(record))) + "\n"


def _without_none(data: Mapping[str, Json]) -> dict[str, Json]:
    """Only what is known: lines and descriptions stay short."""
    return {key: value for key, value in data.items() if value is not None and value != []}


def _result(source: str, calibrator: str | None, corruption: str | None) -> str:
    """The part of a file's name that tells what was predicted; a slug has neither ~ nor dot, so none is mixed up."""
    shift = "" if corruption is None else f"~{corruption}"
    return slug(source) + shift + ("" if calibrator is None else f".{calibrator}")


def slug(source: str) -> str:
    """A source's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-").lower()[-60:]
