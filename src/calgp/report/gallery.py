"""Images to look at: the most uncertain, the confidently wrong, the most certain."""

import base64
import struct
import zlib
from dataclasses import dataclass

from torch import Tensor

from calgp.data import Images

from .words import nats, percent

LARGEST = 96  # pixels a side: larger images are shrunk, so that a report stays small
SHOWN = 12


@dataclass(frozen=True)
class Thumbnail:
    """A test image with what the model says of it, ready to be shown."""

    uri: str
    name: str
    truth: str
    label: str
    confidence: str
    entropy: str
    mutual_information: str
    wrong: bool


@dataclass(frozen=True)
class Gallery:
    title: str
    note: str
    thumbnails: tuple[Thumbnail, ...]


def galleries(images: Images, columns: dict[str, Tensor], classes: tuple[str, ...]) -> list[Gallery]:
    """Images of the run's own classes. Among equals the first in the data set comes first."""
    wrong = columns["label"] != columns["y"]
    mistakes = wrong.nonzero().squeeze(1)
    by_confidence = mistakes[columns["confidence"][mistakes].argsort(descending=True, stable=True)]
    found = [
        ("Most uncertain", "The highest entropy: what to ask a person about.", by_entropy(columns)),
        ("Confidently wrong", "The mistakes with the highest confidence.", by_confidence),
        ("Most certain", "The lowest entropy.", by_entropy(columns, descending=False)),
    ]
    return [
        Gallery(title, note, thumbnails(images, columns | {"wrong": wrong}, index[:SHOWN], classes))
        for title, note, index in found
        if len(index)
    ]


def outside_galleries(images: Images, columns: dict[str, Tensor], classes: tuple[str, ...]) -> list[Gallery]:
    """Images of other classes: uncertainty is the right answer, certainty is not."""
    found = [
        ("Most uncertain", "The highest entropy: the model notices these.", by_entropy(columns)),
        (
            "Least uncertain",
            "The lowest entropy: the model takes these for its own classes.",
            by_entropy(columns, descending=False),
        ),
    ]
    never = columns["y"] < 0
    return [
        Gallery(title, note, thumbnails(images, columns | {"wrong": never}, index[:SHOWN], classes))
        for title, note, index in found
    ]


def by_entropy(columns: dict[str, Tensor], *, descending: bool = True) -> Tensor:
    """Where the images stand, ordered by entropy."""
    return columns["entropy"].argsort(descending=descending, stable=True)


def thumbnails(
    images: Images, columns: dict[str, Tensor], index: Tensor, classes: tuple[str, ...]
) -> tuple[Thumbnail, ...]:
    """The images at `index`, in that order; `classes` are those of the model, which may not be those of the images."""
    chosen = {name: values[index].tolist() for name, values in columns.items() if values.ndim == 1}
    return tuple(
        Thumbnail(
            uri=data_uri(images.x[place]),
            name=f"row {chosen['rows'][i]}" if images.names is None else images.names[place],
            truth=images.classes[chosen["y"][i]],
            label=classes[chosen["label"][i]],
            confidence=percent(chosen["confidence"][i]),
            entropy=nats(chosen["entropy"][i]),
            mutual_information=nats(chosen["mutual_information"][i]),
            wrong=chosen["wrong"][i],
        )
        for i, place in enumerate(map(int, index))
    )


def data_uri(x: Tensor) -> str:
    """An image (uint8 [C, H, W]) as a PNG inside its own address."""
    return "data:image/png;base64," + base64.b64encode(png(_shrunk(x))).decode()


def png(x: Tensor) -> bytes:
    """An image (uint8 [C, H, W], C = 1 grey or 3 RGB) as a PNG file; of other channels the first is shown."""
    x = x if len(x) == 3 else x[:1]
    channels, height, width = x.shape
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in x.permute(1, 2, 0))  # \0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _shrunk(x: Tensor) -> Tensor:
    """Means of k × k pixels, with the k that brings the larger side to LARGEST or less."""
    channels, height, width = x.shape
    k = -(-max(height, width) // LARGEST)
    if k == 1:
        return x
    rows, columns = max(height // k, 1), max(width // k, 1)
    x = x[:, : rows * k, : columns * k]
    blocks = x.reshape(channels, rows, x.shape[1] // rows, columns, x.shape[2] // columns)
    return blocks.float().mean((2, 4)).round().byte()
