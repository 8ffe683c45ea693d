"""Draw every corruption of some test images: kinds from top to bottom, severities 0 (untouched) to 5 from left.

usage: python tools/corruptions_picture.py docs/corruptions.png [SOURCE]     (digits unless given)
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from calgp.data import Images, load
from calgp.data.corruptions import CORRUPTIONS, SEVERITIES, corrupted

SHOWN, ENLARGED, GAP, MARGIN, HEAD = (
    3,
    2,
    10,
    110,
    34,
)  # images a cell; pixels a pixel; the rest in pixels of the drawing


def main(out: str, source: str = "digits") -> None:
    images = load(source, "test")
    first = [int((images.y == label).nonzero()[0]) for label in range(len(images.classes))]
    cells = [_cell(images, first, number, kind) for number, kind in enumerate(CORRUPTIONS)]
    height, width = cells[0][0].shape[:2]
    size = MARGIN + len(cells[0]) * (width + GAP), HEAD + len(cells) * (height + GAP)
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(15)
    for column in range(len(cells[0])):
        words = f"severity {column}" if column else "untouched"
        draw.text((MARGIN + column * (width + GAP) + width / 2, HEAD / 2), words, "black", font, "mm")
    for row, kind in enumerate(CORRUPTIONS):
        top = HEAD + row * (height + GAP)
        draw.text((GAP, top + height / 2), kind, "black", font, "lm")
        for column, cell in enumerate(cells[row]):
            page.paste(Image.fromarray(cell), (MARGIN + column * (width + GAP), top))
    page.quantize(64).save(Path(out), optimize=True)


def _cell(images: Images, first: list[int], number: int, kind: str) -> list[np.ndarray]:
    """The same few images, other ones for each kind, at severities 0 to 5: each a strip [H, W, 3]."""
    places = [first[(number * SHOWN + shift) % len(first)] for shift in range(SHOWN)]
    chosen = images.take(torch.tensor(places)).coloured("rgb" if images.x.shape[1] == 3 else "grey")
    versions = [chosen, *(corrupted(chosen, kind, severity, seed=0) for severity in SEVERITIES)]
    return [_strip(version.coloured("rgb")) for version in versions]


def _strip(images: Images) -> np.ndarray:
    joined = np.concatenate(list(images.x.permute(0, 2, 3, 1).numpy()), 1)
    return joined.repeat(ENLARGED, 0).repeat(ENLARGED, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
