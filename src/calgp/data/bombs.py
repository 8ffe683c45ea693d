"""Image files that cost far more time or memory than their size suggests: found before a pixel is decoded.

Pillow itself bounds the directories of TIFF and Exif (by the length of the file) and the text of PNG.
"""

import struct
from typing import IO

from PIL import Image

from calgp.errors import CalgpError

MAX_FILE_BYTES = 2**28  # bytes
MAX_PIXELS = 2**26  # 67 million: decoded and made RGB they take some 20 bytes each
MAX_SCANS = 100  # of a JPEG; encoders write about ten
MAX_SCANS_OF_LARGEST = 16  # of a JPEG of the most pixels: 2^30 pixels in all are scanned in two seconds
MAX_TILES = 2**16  # strips or tiles of a TIFF: Pillow lists them all, some 300 bytes each
MAX_CHUNKS = 2**16  # of a PNG, or of a WebP, whose frames are chunks
_OFFSETS = {273, 324}  # tags of a TIFF: where its strips or tiles are


def check_container(file: IO[bytes]) -> None:
    """Refuse a file whose parts are too many for Pillow to open it cheaply; leaves the file at its start."""
    file.seek(0)
    head = file.read(16)
    if head[:4] in {b"II*\0", b"MM\0*", b"MM*\0", b"II\0*", b"II+\0", b"MM\0+"}:
        _check("strips or tiles", _tiles(file, head), MAX_TILES)
    elif head[:8] == b"\x89PNG\r\n\x1a\n":
        _check("chunks", _chunks(file, 8, ">L4x", extra=4), MAX_CHUNKS)
    elif head[:4] == b"RIFF":
        _check("chunks", _chunks(file, 12, "<4xL", extra=0), MAX_CHUNKS)
    file.seek(0)


def check_image(image: Image.Image, pixels: int | None = None) -> None:
    """Refuse an opened image that unfolds to gigabytes (a decompression bomb) or takes minutes to decode."""
    (width, height), pixels = image.size, MAX_PIXELS if pixels is None else pixels
    if width * height > pixels:
        raise CalgpError(f"a decompression bomb? It has {width} × {height} pixels; at most {pixels} are decoded")
    if image.format in {"JPEG", "MPO"}:
        _check("scans", _scans(image.fp), min(MAX_SCANS, MAX_SCANS_OF_LARGEST * pixels // (width * height)))  # type: ignore[attr-defined]


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise CalgpError(f"a decompression bomb? It has {count} {what} or more; at most {most} are decoded")


def _tiles(file: IO[bytes], head: bytes) -> int:
    """The longest table of strips or tiles in the first directory of a TIFF."""
    order, big = "<" if head[:2] == b"II" else ">", head[2] == 43  # as Pillow finds it
    number, entry = (order + "Q", order + "HHQ8x") if big else (order + "H", order + "HHL4x")
    try:
        file.seek(struct.unpack_from(order + ("Q" if big else "L"), head, 8 if big else 4)[0])
        (entries,) = struct.unpack(number, file.read(struct.calcsize(number)))
    except (struct.error, OSError, OverflowError, ValueError):
        return 0  # damaged: Pillow reports it
    size = struct.calcsize(entry)
    table = file.read(min(entries, 2**16) * size)
    rows = struct.iter_unpack(entry, table[: len(table) // size * size])
    return max((count for tag, _, count in rows if tag in _OFFSETS), default=0)


def _chunks(file: IO[bytes], start: int, header: str, *, extra: int) -> int:
    """Chunks of a PNG or RIFF file, counted until there are too many."""
    count, place = 0, start
    while count <= MAX_CHUNKS:
        file.seek(place)
        if len(found := file.read(8)) < 8:
            break
        (length,) = struct.unpack(header, found)
        place += 8 + length + extra + (length % 2 if not extra else 0)
        count += 1
    return count


def _scans(file: IO[bytes]) -> int:
    """Start-of-scan markers of a JPEG. Coded data has none by chance; thumbnails and metadata may add a few."""
    place = file.tell()
    file.seek(0)
    count, last = 0, b""
    while (block := file.read(2**20)) and count <= MAX_SCANS:
        count += (last + block).count(b"\xff\xda")
        last = block[-1:] if block[-1:] == b"\xff" else b""
    file.seek(place)
    return count
