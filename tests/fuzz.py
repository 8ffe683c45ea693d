"""Mutated files for every reader of calgp: only a CalgpError may come out, in bounded time and memory.

    python -m fuzz --files 100000          # from tests/, or `make fuzz`
    python -m fuzz --reader idx --files 5000 --seed 7

Each file is a small valid one, changed by what `seed`, the reader and its number decide. All run in one process, whose
address space is limited to `MEMORY` more than it had at the start; a file that takes longer than `SECONDS` ends it with
a traceback. A file that breaks a promise is kept in `--keep`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import gzip
import io
import json
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from calgp.errors import CalgpError

MEMORY = 2**30  # bytes beyond what the process has at the start
SECONDS = 30.0  # for one file
INTERESTING = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 10**12, 10**40, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "a", "x" * 5000, "../../../../etc/passwd", "/dev/zero", "\x00", "\x1b[2J", "\ud800", "folder:~nobody/x", [],
    {}, [[]], [1, 2, 3], {"name": "resnet"}, {"kind": "Cgp"}, {"kind": []},
)  # fmt: skip


# mutations -----------------------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flips, insertions, deletions, doublings, truncations, splices and interesting integers, one to four of them."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(changed) + 1)
        length = min(chance.choice((1, 1, 2, 4, 8, 64, 1000)), len(changed) - place)
        match chance.randrange(8):
            case 0 if changed:
                place = chance.randrange(len(changed))
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed[place:place] = chance.randbytes(chance.choice((1, 2, 4, 16, 300)))
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = changed[place : place + length] * chance.choice((1, 2, 50))
            case 4:
                del changed[place:]
            case 5:
                other = chance.randrange(len(data) + 1)
                changed[place:] = data[other:]
            case 6:
                size, order = chance.choice((1, 2, 4, 8)), chance.choice(("<", ">"))
                near = min(chance.choice((place, chance.randrange(64))), len(changed))  # headers come first
                value = chance.choice(INTERESTING) % 2 ** (8 * size)
                changed[near : near + size] = struct.pack(order + {1: "B", 2: "H", 4: "I", 8: "Q"}[size], value)
            case _:
                changed[place : place + length] = chance.randbytes(length)
    return bytes(changed)


def mutate_value(value: Any, chance: random.Random) -> Any:
    """One place of a JSON value dropped, doubled, retyped, renamed, nested, or made huge."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        rest = dict(value)
        match chance.randrange(8):
            case 0:
                del rest[key]
            case 1:
                rest[chance.choice(("", "x", "__metadata__", "kind", "name", key.upper()))] = rest.pop(key)
            case 2:
                rest[key] = chance.choice(STRANGE)
            case 3:
                rest[key] = rest[chance.choice(list(rest))]
            case _:
                rest[key] = mutate_value(rest[key], chance)
        return rest
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                small = len(value) < 100 and not isinstance(value[0], list)  # files stay small
                return value * chance.choice((2, 2, 500 if small else 1))
            case 2:
                return [*value[:place], chance.choice(STRANGE), *value[place + 1 :]]
            case _:
                return [*value[:place], mutate_value(value[place], chance), *value[place + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and chance.random() < 0.6:
        try:
            return chance.choice(
                (-value, value + 1, value * 2, value * 10**9, value / 3, str(value), [value], value * 1.0)
            )
        except OverflowError:
            return value
    if chance.random() < 0.1:
        for _ in range(chance.choice((3, 200, 3000))):
            value = [value] if chance.random() < 0.5 else {"a": value}
        return value
    return chance.choice(STRANGE)


def dump(value: Any) -> bytes:
    """JSON, however deep the value is."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        return json.dumps(value).encode("ascii")
    finally:
        sys.setrecursionlimit(before)


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """Structured mutations, or those of bytes."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
    value = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = mutate_value(value, chance)
    return dump(value)


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to each value in a JSON value, of lists those to the first two."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [found for key, each in items for found in ((*before, key), *places(each, (*before, key)))]


def mutate_keys(data: bytes, chance: random.Random) -> bytes:
    """One key, each as likely as the others however deep it lies: its value replaced, or the key renamed or removed."""
    value = json.loads(data)
    *way, last = chance.choice(places(value))
    around = value
    for key in way:
        around = around[key]
    match chance.randrange(6):
        case 0:
            del around[last]
        case 1 if isinstance(around, dict):
            around[chance.choice(("", "x", str(last).upper()))] = around.pop(last)
        case 2 if isinstance(around[last], int | float):
            around[last] = chance.choice((0, -1, 10**6, 10**12, 2**63, 1e-300, 1e300, float("nan"), -around[last]))
        case _:
            around[last] = chance.choice(STRANGE)
    return dump(value)


def mutate_lines(data: bytes, chance: random.Random) -> bytes:
    lines = data.splitlines()
    place = chance.randrange(len(lines))
    lines[place] = mutate_json(lines[place], chance)
    return b"\n".join(lines)


def mutate_tensors(data: bytes, chance: random.Random) -> bytes:
    """The header of a file of tensors changed as JSON, its length kept true or not; or the bytes."""
    if chance.random() < 0.4:
        return mutate_bytes(data, chance)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if chance.random() < 0.7 and (names := [name for name in header if name != "__metadata__"]):
        name = chance.choice(names)
        entry = dict(header[name])
        match chance.randrange(5):
            case 0:
                entry["dtype"] = chance.choice(("F64", "F16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "F4", "X", ""))
            case 1:
                entry["shape"] = chance.choice(([], [0], [2**62, 4], [10**12], [-1], [1] * 70, entry["shape"][::-1]))
            case 2:
                entry["data_offsets"] = chance.choice(([0, 0], [8, 4], [0, 2**63], [-8, 8], [0, len(data)], [0]))
            case 3:
                header[chance.choice(("x", *names))] = entry
            case _:
                del header[name]
        header = {key: (entry if key == name else value) for key, value in header.items()}
    else:
        header = mutate_value(header, chance)
    text = dump(header)
    claimed = len(text) if chance.random() < 0.8 else chance.choice(INTERESTING)
    return struct.pack("<Q", claimed % 2**64) + text + data[8 + length :]


def mutate_packed(data: bytes, chance: random.Random) -> bytes:
    """Inside a gzip file, or the file itself."""
    if chance.random() < 0.4:
        return mutate_bytes(data, chance)
    return gzip.compress(mutate_bytes(gzip.decompress(data), chance), 1)


# readers -------------------------------------------------------------------------------------------------------------

Mutation = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Reader:
    """A reader, valid files for it, and how they are changed; `weight` is its share of all files."""

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    mutate: Mutation
    weight: float = 1.0


def readers(folder: Path) -> list[Reader]:
    """Every reader of files that others may have made, with seeds made here, in `folder`."""
    return [*data_readers(folder), *run_readers(folder)]


def data_readers(folder: Path) -> list[Reader]:
    from calgp.data.decode import read_image
    from calgp.data.downloads import Published, RemoteFile
    from calgp.data.downloads import unpack as unpack_archive
    from calgp.data.files import FileNames
    from calgp.data.formats import read_cifar_binary, read_cifar_names, read_cifar_pickle, read_idx
    from calgp.data.formats import read_lines as read_names
    from calgp.data.shard_index import ShardFiles, index_shard
    from calgp.data.sources import SOURCES

    file = folder / "file"
    chance = np.random.default_rng(0)
    x = chance.integers(0, 256, (3, 3072), dtype=np.uint8)
    idx = struct.pack(">4B3I", 0, 0, 8, 3, 4, 5, 6) + x.tobytes()[:120]
    labels = struct.pack(">4BI", 0, 0, 8, 1, 4) + bytes([0, 1, 2, 9])
    batch = {"labels": [1, 2, 3], "data": x, "filenames": ["a", "b", "c"], "batch_label": "one"}
    names = {"label_names": list("abcdefghij"), "num_vis": 3072}

    def on_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def reading(data: bytes) -> object:
            file.write_bytes(data)
            return read(file)

        return reading

    def read_shard(path: Path) -> object:
        index = index_shard(path)
        starts, names = np.zeros(1, np.int64), FileNames(index.joined.tobytes(), index.ends)
        files = ShardFiles(names, index.lengths, torch.from_numpy(index.labels), (path,), starts, index.offsets)
        return [read_image(files.open(i), name=names[i], size=8, colour="rgb") for i in range(len(names))]

    mnist = folder / "sets" / "MNIST" / "raw"
    mnist.mkdir(parents=True)
    (mnist / "t10k-images-idx3-ubyte").write_bytes(idx)

    def read_set(data: bytes) -> object:
        (mnist / "t10k-labels-idx1-ubyte").write_bytes(data)
        return SOURCES["mnist"].load("test", folder / "sets")

    aside = folder / "aside"
    aside.mkdir()
    published = Published("", (RemoteFile("a.tar.gz", 0, ""),), "set", ("meta", "train"))

    def unpack(data: bytes) -> object:
        (aside / "a.tar.gz").write_bytes(data)
        before = {path.name for path in folder.iterdir()}
        try:
            return unpack_archive(published, aside)
        finally:
            written = {path.name for path in aside.iterdir()} - {"a.tar.gz", "meta", "train"}
            if written or {path.name for path in folder.iterdir()} != before:
                raise AssertionError(f"written outside of the target: {written}")
            for name in ("meta", "train"):
                (aside / name).unlink(missing_ok=True)

    return [
        Reader("idx", (idx, labels), on_file(read_idx), mutate_bytes, 2),
        Reader("idx.gz", (gzip.compress(idx), gzip.compress(labels)), on_file(read_idx), mutate_packed, 2),
        Reader("idx set", (labels,), read_set, mutate_bytes),
        Reader(
            "CIFAR pickle",
            [pickle.dumps(batch, protocol) for protocol in (2, 3, 4)],
            on_file(lambda path: read_cifar_pickle(path, "labels")),
            mutate_bytes,
            4,
        ),
        Reader(
            "CIFAR names",
            [pickle.dumps(names, protocol) for protocol in (2, 3, 4)],
            on_file(lambda path: read_cifar_names(path, "label_names")),
            mutate_bytes,
            2,
        ),
        Reader("CIFAR binary", (x.tobytes()[:3073],), on_file(lambda path: read_cifar_binary(path, 1)), mutate_bytes),
        Reader("CIFAR text", (b"airplane\nbird\n",), on_file(read_names), mutate_bytes, 0.5),
        *(
            Reader(
                form,
                image_files(form),
                on_file(lambda path: read_image(path, name="it", size=8, colour="rgb")),
                mutate_bytes,
                2 if form in ("PNG", "TIFF") else 1,
            )
            for form in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")
        ),
        Reader("tar.gz", archives(), unpack, mutate_packed, 2),
        Reader("shard", shards(), on_file(lambda path: read_shard(path)), mutate_bytes, 2),
    ]


def image_files(form: str) -> list[bytes]:
    grey = (np.arange(192, dtype=np.uint8).reshape(12, 16) * 5) % 251
    found = [Image.fromarray(grey), Image.fromarray(np.stack([grey, grey[::-1], 255 - grey], -1))]
    if form == "PNG":
        found += [Image.fromarray(grey.astype(np.uint16) * 257), found[1].convert("RGBA"), found[1].quantize(8)]
    exif = Image.Exif()
    exif[0x0112] = 6
    files = []
    for image in found:
        file = io.BytesIO()
        image.save(file, form, **({"exif": exif.tobytes()} if form in ("JPEG", "PNG", "WEBP", "TIFF") else {}))
        files.append(file.getvalue())
    if form == "TIFF":
        for compression in ("tiff_lzw", "tiff_deflate", "packbits"):
            file = io.BytesIO()
            found[1].save(file, form, compression=compression)
            files.append(file.getvalue())
    return files


def archives() -> list[bytes]:
    files = []
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz", format=kind) as tar:
            for name in ("set/meta", "../out", "/out", "set/" + "long" * 40, "set/train"):
                info = tarfile.TarInfo(name)
                info.size = 700
                tar.addfile(info, io.BytesIO(b"x" * 700))
            link = tarfile.TarInfo("set/link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        files.append(file.getvalue())
    return files


def shards() -> list[bytes]:
    files = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
            name = "b" * (40 if kind == tarfile.USTAR_FORMAT else 120)
            image = image_files("PNG")[0]
            members = {"a.png": image, "a.cls": b"1", f"{name}.json": b'{"label": 0}', f"{name}.png": image}
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        files.append(file.getvalue())
    return files


def run_readers(folder: Path) -> list[Reader]:
    from lightning_fabric import Fabric

    from calgp import runs, training
    from calgp.cli.flags import run_options
    from calgp.gp import Predictive
    from calgp.posthoc import calibration
    from calgp.report import write_report
    from calgp.runs.build import build
    from calgp.runs.decision_metrics import decide_on
    from calgp.runs.evaluation import columns_of
    from calgp.runs.pack import pack, unpack
    from calgp.search.image_scores import image_scores, image_scores_name, packed
    from calgp.training.checkpoint import LoadedCheckpoint
    from calgp.training.loop import make_optimiser

    fabric = Fabric(accelerator="cpu", devices=1)
    tiny = {
        "method": {"name": "cnn-gp-sorf", "n_rf": 4}, "backbone": {"name": "lenet", "channels": [1, 1], "hidden": [4]},
        "train_size": 50, "holdout": 0.2, "steps": 20, "batch_size": 10,
    }  # fmt: skip
    run = runs.RunFolder(folder / "run")
    classifier = training.train_run(runs.from_json(tiny), run, fabric)
    classifier.evaluate(passes=2)
    classifier.evaluate("letters", passes=2)
    other = runs.RunFolder(folder / "other")
    shutil.copytree(run.path, other.path)
    both = runs.RunFolder(folder / "both")
    runs.ensemble([run, other], both)
    classifier.calibrate(passes=2, share=0.5)
    classifier.decide(error=0.9, confidence=None, coverage=0.5, passes=2)
    begun = runs.RunFolder(folder / "begun")
    begun.path.mkdir()
    shutil.copy(run.path / "run.json", begun.path)
    write_checkpoint(begun, classifier.model)
    scores = [run.path / f"scores-{name}.json" for name in ("digits", "letters")]
    log = (run.path / "log.jsonl").read_bytes()
    predicted = run.path / run.predictions_name("digits")
    fitted = [json.dumps({"calibrator": each["calibrator"]} | each["parameters"]).encode() for each in calibrators()]

    def of(place: runs.RunFolder, name: str, read: Callable[[], object]) -> Callable[[bytes], object]:
        """Read with the file in the place of the one that is there, which comes back afterwards."""
        path = place.path / name
        whole = path.read_bytes()

        def reading(data: bytes) -> object:
            path.write_bytes(data)
            try:
                return read()
            finally:
                path.write_bytes(whole)

        return reading

    def resume() -> object:
        """What resuming reads of a checkpoint, without the images."""
        card = begun.card()
        checkpoint, model = LoadedCheckpoint(*begun.checkpoint(card)), build(card.run, card.task)
        checkpoint.restore_model(model, begun.path)
        checkpoint.restore_optimiser(make_optimiser(card.run, model))
        return range(checkpoint.state.step), checkpoint.stopping(card.run)

    def toml(data: bytes) -> object:
        (folder / "run.toml").write_bytes(data)
        return runs.from_json(run_options(folder / "run.toml", {}, ["method.keep=0.5"]))

    def report() -> object:
        return write_report([run], folder / "report.html"), runs.compare([run])

    described = (run.path / "run.json").read_bytes()
    tensors = {
        name: (place.path / f"{name}.safetensors").read_bytes()
        for name, place in (("model", run), ("checkpoint", begun))
    }
    listed, fitted_here = (both.path / "run.json").read_bytes(), (run.path / "calibration.json").read_bytes()
    decided_here = (run.path / "decisions.json").read_bytes()
    evaluated = [path.read_bytes() for path in scores]
    columns = predicted.read_bytes()

    def decided() -> object:
        """As `evaluate` does with images of the run's ten classes."""
        log_probs = torch.linspace(-1, 1, 40).view(4, 10).log_softmax(1)
        part = Predictive(log_probs, torch.zeros(4), torch.zeros(4, 10), 1)
        fitted = run.decisions()
        x = torch.zeros(4, 1, 28, 28, dtype=torch.uint8)
        return fitted and decide_on(fitted.decisions, columns_of(part), part.log_probs, x)

    def compared() -> object:
        return run.evaluations(), runs.compare([run])

    def read_columns() -> object:
        return run.predictions("digits", None, classes=10)

    plain = runs.RunFolder(folder / "small")  # small results of the run as it was before it was calibrated
    plain.path.mkdir()
    shutil.copy(run.path / "run.json", plain.path)
    found = {"inside": run.evaluation("digits"), "outside": run.evaluation("letters")}
    small = {name: packed(image_scores(run, each)) for name, each in found.items()}
    for name, each in found.items():
        (plain.path / image_scores_name(plain, each)).write_bytes(small[name])

    def kept(name: str) -> Callable[[bytes], object]:
        return of(plain, image_scores_name(plain, found[name]), lambda: image_scores(plain, found[name]))

    own = scores[0].name
    pack(run, folder / "run.calgp")
    carried = (folder / "run.calgp").read_bytes()

    def unpacked(data: bytes) -> object:
        (folder / "run.calgp").write_bytes(data)
        try:
            return unpack(folder / "run.calgp", folder / "unpacked")
        finally:
            shutil.rmtree(folder / "unpacked", ignore_errors=True)

    return [
        Reader("packed run", (carried,), unpacked, mutate_bytes),
        *embedding_readers(folder),
        *(Reader(f"per-image scores, {name}", (small[name],), kept(name), mutate_packed) for name in small),
        Reader("run.json", (described,), of(run, "run.json", run.card), mutate_json, 4),
        Reader("run.json, model", variants(described), of(run, "run.json", run.model), mutate_json, 2),
        Reader("run.json, ensemble", (listed,), of(both, "run.json", both.model), mutate_json),
        Reader("calibration.json", (fitted_here,), of(run, "calibration.json", run.calibration), mutate_json, 2),
        Reader("decisions.json", (decided_here,), of(run, "decisions.json", decided), mutate_json, 2),
        Reader("calibrators", fitted, lambda data: calibration.from_json(_loaded(data)), mutate_json),
        Reader("scores-*.json", evaluated, of(run, own, compared), mutate_json, 2),
        Reader("log.jsonl", (log,), of(run, "log.jsonl", run.log), mutate_lines),
        Reader("model.safetensors", (tensors["model"],), of(run, "model.safetensors", run.model), mutate_tensors, 4),
        Reader(
            "checkpoint.safetensors", (tensors["checkpoint"],), of(begun, "checkpoint.safetensors", resume),
            mutate_tensors, 3,
        ),
        Reader("predictions", (columns,), of(run, predicted.name, read_columns), mutate_tensors, 2),
        Reader("run.toml", (TOML,), toml, mutate_bytes, 2),
        *command_readers(folder, run, other),
        Reader("report of scores", evaluated[:1], of(run, own, report), mutate_json, 0.004),
        Reader("report of predictions", (columns,), of(run, predicted.name, report), mutate_tensors, 0.004),
        Reader("report of log", (log,), of(run, "log.jsonl", report), mutate_lines, 0.004),
    ]  # fmt: skip


def embedding_readers(folder: Path) -> list[Reader]:
    """Embeddings in one file, and the manifest of a folder of them."""
    from calgp.embeddings.cache import FORMAT, MANIFEST, Manifest, load_embeddings, write_shard
    from calgp.nets.preprocessing import Preprocessing
    from calgp.search.shards import with_shard

    place = folder / "embeddings"
    place.mkdir()
    manifest = Manifest(
        FORMAT, "nets.py:make", "0" * 64, Preprocessing(), "folder:photos", "all", "0" * 64, 4, 3, ("a", "b"), 3, 2
    )
    for number, rows in enumerate((3, 1)):
        write_shard(place, number, torch.ones(rows, 3), torch.arange(rows) % 2)
        manifest = with_shard(place, manifest, number)

    def read(path: Path, what: Path) -> Callable[[bytes], object]:
        def reading(data: bytes) -> object:
            path.write_bytes(data)
            return load_embeddings(what)

        return reading

    npz, npy = io.BytesIO(), io.BytesIO()
    np.savez(npz, X=np.ones((4, 3)), y=np.arange(4) % 2, classes=np.array(["a", "b"]))
    np.save(npy, np.ones((4, 3)))
    listed = place / MANIFEST
    return [
        Reader("embeddings.npz", (npz.getvalue(),), read(folder / "e.npz", folder / "e.npz"), mutate_bytes),
        Reader("embeddings.npy", (npy.getvalue(),), read(folder / "e.npy", folder / "e.npy"), mutate_bytes),
        Reader("manifest.json", (listed.read_bytes(),), read(listed, place), mutate_json),
    ]


def command_readers(folder: Path, run: Any, other: Any) -> list[Reader]:
    """Each JSON file of a run folder with one key edited, and the commands that read the folder, one for each edit."""
    from typer.testing import CliRunner

    from calgp import cli, runs
    from calgp.serve.limits import Limits
    from calgp.serve.model import ServedModel
    from calgp.serve.model_info import model_response

    place, picture = folder / "edited", folder / "picture.png"
    picture.write_bytes(image_files("PNG")[0])
    name = str(place)
    commands: list[list[str]] = [
        ["predict", name, str(picture), "-S", "1"], ["predict", name, str(picture), "--json"],
        ["evaluate", name, "-S", "1"], ["evaluate", name, "-S", "1", "--source", "letters"], ["verify", name],
        ["compare", name], ["compare", name, str(other.path), "--json"], ["report", name],
        ["calibrate", name, "-S", "1"], ["decide", name, "--error", "0.9", "--empirical", "-S", "1"],
        ["ensemble", name, str(other.path), "--out", str(folder / "pair")], ["train", "--resume", name],
        ["serve", name],
    ]  # fmt: skip

    def serve() -> object:
        classifier = runs.Classifier.load(runs.RunFolder(place))
        return model_response(classifier, ServedModel(classifier), Limits())

    def read(file: str) -> Callable[[bytes], object]:
        def reading(data: bytes) -> object:
            shutil.rmtree(place, ignore_errors=True)
            shutil.rmtree(folder / "pair", ignore_errors=True)
            shutil.copytree(run.path, place)
            (place / file).write_bytes(data)
            unchanged = data == (run.path / file).read_bytes()  # must be read, which `train --resume` rightly refuses
            command = commands[0] if unchanged else random.Random(data).choice(commands)  # noqa: S311
            if command[0] == "serve":
                return serve()
            done = CliRunner().invoke(cli.app, command)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception
            return done.output

        return reading

    files = sorted(path.name for path in run.path.glob("*.json"))
    return [
        Reader(f"commands, {file}", ((run.path / file).read_bytes(),), read(file), mutate_keys, 0.1) for file in files
    ]


TOML = b"""source = "digits"
epochs = 2.5
steps = 100
seed = 3
[method]
name = "cnn-gp-rf"
depth = 2
keep = 0.5
[backbone]
name = "lenet"
channels = [4, 8]
"""


def write_checkpoint(folder: Any, model: Any) -> None:
    """As training does after step 5: the model, and Adam's moments."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, parameter in enumerate(each for each in model.parameters() if each.requires_grad):
        tensors |= {f"optimiser.{index}.{name}": torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        tensors[f"optimiser.{index}.step"] = torch.tensor(5.0)
    folder.write_tensors("checkpoint.safetensors", tensors, {"step": 5})


def variants(described: bytes) -> list[bytes]:
    """The description of the run, and of others whose models are not those in its file."""
    data = json.loads(described)
    huge = [
        {"kind": "CnnGp", "n_rf": 10**12}, {"kind": "CnnGp", "depth": 900}, {"kind": "Svdkl", "reduced": 10**9},
        {"kind": "Cgp", "inducing": 10**9}, {"kind": "CnnLaplace", "n_rf": 10**4}, {"kind": "Gpdnn", "inducing": 10**7},
    ]  # fmt: skip
    wide = [
        {"kind": "ResNet", "n": 10**9},
        {"kind": "ResNet", "widths": [10**9]},
        {"kind": "LeNet", "channels": [10**9] * 3},
    ]
    runs = [data["run"] | {"method": each} for each in huge] + [data["run"] | {"backbone": each} for each in wide]
    return [described, *(json.dumps(data | {"run": each}).encode() for each in runs)]


def calibrators() -> list[dict[str, Any]]:
    from calgp.posthoc import calibration

    log_probs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    y = torch.arange(40) % 3
    fitted = [calibration.to_json(kind.fit(log_probs, y)) for kind in calibration.CALIBRATORS.values()]
    return [{"calibrator": each.pop("calibrator"), "parameters": each} for each in fitted]


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise CalgpError("no JSON") from None


# the loop ------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the files of one reader."""

    reader: str
    files: int = 0
    refused: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    peak: float = 0.0  # MiB of resident memory above that at the reader's start
    failures: list[str] = field(default_factory=list)


def fuzz(reader: Reader, files: int, seed: int, keep: Path) -> Tally:
    """Mutate, read, count. The seeds themselves must be read."""
    tally, clock = Tally(reader.name), time.perf_counter()
    for data in reader.seeds[:1]:
        reader.read(data)
    gc.collect()
    start = _reset_peak()
    for number in range(files):
        chance = random.Random(f"{seed} {reader.name} {number}")  # noqa: S311
        data = reader.mutate(chance.choice(reader.seeds), chance)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began = time.perf_counter()
        try:
            reader.read(data)
            tally.accepted += 1
        except CalgpError as error:
            tally.refused += 1
            if len(str(error)) > 3000 or not str(error):
                tally.failures.append(_failure(reader, number, data, keep, f"a message of {len(str(error))} letters"))
        except Exception as error:  # what must never come
            trace = "".join(traceback.format_exception(error)[-3:])
            tally.failures.append(_failure(reader, number, data, keep, trace))
        faulthandler.cancel_dump_traceback_later()
        tally.files += 1
        tally.slowest = max(tally.slowest, time.perf_counter() - began)
    tally.seconds, tally.peak = time.perf_counter() - clock, (_peak() - start) / 2**20
    return tally


def _failure(reader: Reader, number: int, data: bytes, keep: Path, why: str) -> str:
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{''.join(c if c.isalnum() else '-' for c in reader.name)}-{number}"
    path.write_bytes(data)
    return f"{reader.name}, file {number}, kept as {path}: {why}"


def _reset_peak() -> int:
    """Start measuring the peak again (Linux), from the memory that is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_memory() -> None:
    """No more address space than `MEMORY` above what there is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def table(tallies: Sequence[Tally]) -> str:
    lines = [
        "| reader | files | clear errors | accepted | seconds | slowest file, s | peak memory, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    total = Tally(
        "all", *(sum(getattr(t, name) for t in tallies) for name in ("files", "refused", "accepted", "seconds")),
        max(t.slowest for t in tallies), max(t.peak for t in tallies),
    )  # fmt: skip
    for t in (*tallies, total):
        numbers = f"{t.files:,} | {t.refused:,} | {t.accepted:,} | {t.seconds:.1f} | {t.slowest:.2f} | {t.peak:.0f}"
        lines.append(f"| {t.reader} | {numbers} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=100_000, help="mutated files in all, or for --reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", help="this one only, or those whose names begin so")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where files that fail are kept")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        every = [
            reader
            for reader in readers(Path(place))
            if options.reader is None or reader.name.startswith(options.reader)
        ]
        if not every:
            parser.error(f"there is no reader {options.reader!r}")
        limit_memory()
        gc.freeze()  # what torch has made is not looked through again for each reader
        whole = sum(reader.weight for reader in every)
        tallies = []
        for reader in every:
            tallies.append(
                fuzz(reader, max(round(options.files * reader.weight / whole), 2), options.seed, options.keep)
            )
            print(f"{reader.name}: {tallies[-1].files} files, {tallies[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    print(table(tallies))
    failures = [failure for tally in tallies for failure in tally.failures]
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    print(f"{len(failures)} failures; at most {MEMORY / 2**20:.0f} MiB and {SECONDS:.0f} s a file were allowed.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
