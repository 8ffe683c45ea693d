"""Image files that cost far more than their size suggests: for the tests of decoding and of the server."""

import io
import struct
import zlib

from PIL import Image


def jpeg(scans: int, side: int = 1000) -> bytes:
    """A progressive JPEG whose last scan, 12 bytes of nothing new, is repeated."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content[content.rfind(b"\xff\xda") : -2]
    return content[:-2] + last * scans + b"\xff\xd9"


def tiff(tiles: int, order: str = "<", big: bool = False) -> bytes:
    """An image of 256 × 256 pixels, whose table of tiles has many more entries than it needs."""
    number, entry = ("Q", "HHQQ") if big else ("L", "HHLL")
    tags = [(256, 256), (257, 256), (258, 8), (259, 1), (262, 1), (277, 1), (322, 16), (323, 16)]
    head = 16 if big else 8
    place = head + (8 if big else 2) + (len(tags) + 1) * struct.calcsize("<" + entry) + struct.calcsize("<" + number)
    rows = [(tag, 16 if big else 4, 1, value) for tag, value in tags] + [(324, 16 if big else 4, tiles, place)]
    start = b"II+\0\x08\0\0\0" if big else {"<": b"II*\0", ">": b"MM\0*"}[order]
    content = start + struct.pack(order + number, head) + struct.pack(order + ("Q" if big else "H"), len(rows))
    content += b"".join(struct.pack(order + entry, *row) for row in rows) + bytes(struct.calcsize("<" + number))
    return content + struct.pack(order + number, 8) * tiles


def png(chunks: int) -> bytes:
    """Empty private chunks behind the header."""
    file = io.BytesIO()
    Image.new("RGB", (48, 64)).save(file, "PNG")
    content = file.getvalue()
    chunk = struct.pack(">L", 0) + b"prVt" + struct.pack(">L", zlib.crc32(b"prVt"))
    return content[:33] + chunk * chunks + content[33:]


def webp(frames: int) -> bytes:
    frame = b"ANMF" + struct.pack("<L", 16) + bytes(16)
    content = b"WEBP" + b"VP8X" + struct.pack("<L", 10) + bytes(10) + frame * frames
    return b"RIFF" + struct.pack("<L", len(content)) + content
