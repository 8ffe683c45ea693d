"""Files whose parts are many: refused at once, while files of the same kind that people have are read."""

import io
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from calgp.data.bombs import MAX_CHUNKS, MAX_SCANS, MAX_TILES
from calgp.data.decode import read_header, read_image
from calgp.errors import CalgpError
from hostile_images import jpeg, png, tiff, webp

NOISE = np.random.default_rng(0).integers(0, 256, (64, 48, 3), np.uint8)


def saved(form: str, **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (jpeg(20_000), "scans"),
        (jpeg(60, 5000), "scans"),
        (tiff(2_000_000), "2000000 strips or tiles"),
        (tiff(MAX_TILES + 1, ">"), "strips or tiles"),
        (tiff(MAX_TILES + 1, big=True), "strips or tiles"),
        (png(340_000), "chunks"),
        (webp(MAX_CHUNKS), "chunks"),
    ],
    ids=["scans", "scans of many pixels", "tiles", "big-endian", "BigTIFF", "chunks", "frames"],
)
def test_a_bomb_of_many_parts_is_refused_at_once(content, reason):
    memory, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CalgpError, match=f"decompression bomb.*{reason}"):
        read_image(io.BytesIO(content), name="it", size=8, colour="rgb")
    assert read_header(io.BytesIO(content)) is None
    assert time.process_time() - start < 1  # Pillow takes 29 s for the tiles, 36 s for the scans
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 50_000  # kB; 673 MB for the tiles


@pytest.mark.parametrize(
    "content",
    [
        jpeg(0), jpeg(MAX_SCANS // 2), saved("JPEG", progressive=True), saved("JPEG", optimize=True),
        tiff(256), tiff(256, ">"), tiff(256, big=True), saved("TIFF"), saved("TIFF", compression="tiff_lzw"),
        saved("TIFF", big_tiff=True), png(100), saved("WEBP"),
        saved("WEBP", save_all=True, append_images=[Image.fromarray(NOISE)]),
    ],
)  # fmt: skip
def test_files_that_people_have_are_read(content):
    assert read_image(io.BytesIO(content), name="it", size=8, colour="rgb").shape == (3, 8, 8)


def test_decoding_needs_no_torch():
    """A worker of the server starts in a tenth of a second with 30 MB, instead of seconds with 220 MB."""
    code = "import calgp.data.decode, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
