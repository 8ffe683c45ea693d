"""Embeddings as files: a folder of checked shards that `calgp embed` writes, or one file of anybody's.

A folder has manifest.json and embeddings-000000.safetensors, … with `X` [n, d] (float32) and `y` [n] (int64) each.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save
from torch import Tensor

from calgp.errors import CalgpError, one_line, path_error
from calgp.nets.preprocessing import Preprocessing
from calgp.runs.predictions_file import LABELS
from calgp.runs.reading import Stored, is_file, read_header
from calgp.runs.record import Count, Text
from calgp.runs.writing import wrap_os_errors, write_whole
from calgp.search import shards
from calgp.search.shards import MANIFEST as MANIFEST
from calgp.search.shards import Shard, Sharded, sha256

FORMAT = 1
VECTORS = ("X", "x", "embeddings", "features")
ENDINGS = (".npz", ".npy", ".safetensors", ".parquet")


@dataclass(frozen=True)
class MadeBy:
    """The network that embeddings were made by: equal descriptions mean equal features of an image."""

    network: Text
    weights: Text
    preprocessing: Preprocessing


@dataclass(frozen=True)
class Manifest(Sharded):
    """What a folder of embeddings holds, and of what: equal descriptions mean equal embeddings.

    weights: SHA-256 of the network's tensors. data: of the images and labels (of files, their names and lengths).
    """

    holds: ClassVar[str] = "embeddings"
    command: ClassVar[str] = "calgp embed"
    file: ClassVar[str] = "embeddings-{:06d}.safetensors"
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    network: Text
    weights: Text
    preprocessing: Preprocessing
    source: Text
    split: Text
    data: Text
    rows: Count
    width: Count
    classes: tuple[str, ...]
    rows_per_shard: Count
    batch_size: Count
    shards: tuple[Shard | None, ...] = ()

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(self.network, self.weights, self.preprocessing)


class Embeddings(NamedTuple):
    """Embeddings `X` [N, d] (float32), labels `y` [N] (int64) that index `classes`; without labels y is None."""

    X: np.ndarray
    y: np.ndarray | None
    classes: tuple[str, ...]


def read_manifest(folder: Path) -> Manifest:
    """manifest.json, checked."""
    return shards.read_manifest(folder, Manifest)


def write_shard(folder: Path, number: int, x: Tensor, y: Tensor) -> None:
    """Write the file of a shard; it counts when the manifest names it."""
    with wrap_os_errors(folder):
        write_whole(folder / Manifest.file.format(number), save({"X": x.contiguous(), "y": y.contiguous()}))


def load_embeddings(path: Path | str) -> Embeddings:
    """Embeddings, labels and classes of a folder that `calgp embed` has made, or of a file.

    A folder is verified: every shard must have the checksum that the manifest says. Files (.npz, .npy, .safetensors,
    .parquet) hold `X` [N, d] and labels `y` [N], numbers or texts; an .npz may have `classes`, the names of labels
    0, 1, …; an .npy has no labels.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise path_error("file or folder of embeddings", path)
    if path.suffix.lower() not in ENDINGS:
        raise CalgpError(f"Invalid embeddings {path}: must be a folder of `calgp embed` or a {', '.join(ENDINGS)}.")
    arrays = _arrays(path)
    x = next((arrays[name] for name in VECTORS if name in arrays), None)
    if x is None or x.ndim != 2 or x.dtype.kind not in "fiu" or not x.size:
        held = ", ".join(f"{name} {each.dtype} {list(each.shape)}" for name, each in arrays.items())
        raise CalgpError(f"{path} must hold numbers X [N, d]; it holds {held or 'nothing'}.")
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        row = int((~np.isfinite(x).all(1)).nonzero()[0][0])
        raise CalgpError(f"{path} has a value that is no finite number in row {row}; leave this row out.")
    y = next((arrays[name] for name in LABELS if name in arrays), None)
    return Embeddings(x, *_labels(path, len(x), y, arrays.get("classes")))


def _load_folder(folder: Path) -> Embeddings:
    manifest = read_manifest(folder)
    if not manifest.finished:
        raise CalgpError(
            f"{folder} has {manifest.made} of {manifest.shard_count} shards of embeddings; run the same `calgp "
            "embed` again, which makes the rest."
        )
    xs, ys = [], []
    for number, shard in enumerate(manifest.shards):
        path, rows = folder / manifest.shard_name(number), manifest.rows_of(number)
        wanted = {"X": Stored(torch.float32, (rows, manifest.width)), "y": Stored(torch.int64, (rows,))}
        whole = is_file(path) and read_header(path).tensors == wanted
        if shard is None or not whole or sha256(path) != shard.sha256:
            raise CalgpError(f"{path} is missing or damaged; run the same `calgp embed` again, which makes it anew.")
        tensors = load_file(path)
        xs.append(tensors["X"].numpy())
        ys.append(tensors["y"].numpy())
    y = np.concatenate(ys)
    if not 0 <= int(y.min()) <= int(y.max()) < len(manifest.classes):
        raise CalgpError(f"{folder} has labels that are none of its {len(manifest.classes)} classes; embed again.")
    return Embeddings(np.concatenate(xs), y, manifest.classes)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix.lower() == ".parquet":
            return _from_parquet(path)
        if path.suffix.lower() == ".safetensors":
            read_header(path)
            tensors = load_file(path)
            return {k: (v.float() if v.is_floating_point() else v).numpy() for k, v in tensors.items()}
        found: Any = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {"X": found}
        with found as file:
            return dict(file)
    except CalgpError:
        raise
    except Exception as error:  # NumPy and zipfile raise nearly everything on damaged files
        raise CalgpError(f"{path} is no {path.suffix} file of plain arrays ({one_line(error)}).") from None


def _from_parquet(path: Path) -> dict[str, np.ndarray]:
    """A column X (or embeddings …) of lists, or a number column each feature; y (or label …) holds the labels."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise CalgpError(f"{path} needs pyarrow, which is not here: pip install 'calgp[parquet]'.") from None
    table = parquet.read_table(path)
    columns = {name: table.column(name) for name in table.column_names}
    label = next((name for name in LABELS if name in columns), None)
    found = {} if label is None else {label: np.asarray(columns.pop(label).to_pylist())}
    vectors = next((name for name in VECTORS if name in columns), None)
    if vectors is not None:
        return found | {vectors: np.asarray(columns[vectors].to_pylist(), dtype=np.float32)}
    return found | {"X": np.stack([each.to_numpy() for each in columns.values()], 1).astype(np.float32)}


def _labels(
    path: Path, rows: int, y: np.ndarray | None, names: np.ndarray | None
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels as numbers of classes, and the names of these."""
    if y is None:
        return None, ()
    if y.shape != (rows,) or y.dtype.kind not in "iuU":
        raise CalgpError(f"{path} must have a whole number or a text as label for each of {rows} rows, not {y.dtype}.")
    if names is None:
        values, numbers = np.unique(y, return_inverse=True)
        return numbers.astype(np.int64), tuple(str(each) for each in values)
    if y.dtype.kind == "U" or names.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < len(names):
        raise CalgpError(f"{path} must have labels y from 0 to {names.size - 1}, as it has {names.size} classes.")
    return y.astype(np.int64), tuple(str(each) for each in names)
