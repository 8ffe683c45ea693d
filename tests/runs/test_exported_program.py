"""The program that `calgp export` writes beside a model prepares images as `calgp predict` does."""

import numpy as np
import pytest
from PIL import Image

from calgp.data.decode import read_image
from calgp.runs.exported_program import prepare

SIZE = (13, 9)  # width, height
RNG = np.random.default_rng(0)
RGBA = RNG.integers(0, 256, (9, 13, 4), np.uint8)


def rotated(path):
    """A JPEG that lies on its side, with the EXIF orientation 6."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(RGBA[..., :3]).save(path, "JPEG", exif=exif)


def palette(path):
    """Indexed colours, one of which is transparent."""
    Image.fromarray(RGBA[..., :3]).quantize(16).save(path, "PNG", transparency=3)


CASES = {
    "L.png": lambda path: Image.fromarray(RGBA[..., 0]).save(path, "PNG"),
    "RGB.png": lambda path: Image.fromarray(RGBA[..., :3]).save(path, "PNG"),
    "RGBA.png": lambda path: Image.fromarray(RGBA).save(path, "PNG"),
    "LA.png": lambda path: Image.fromarray(RGBA[..., :2], "LA").save(path, "PNG"),
    "P.png": palette,
    "1.png": lambda path: Image.fromarray(RGBA[..., 0]).convert("1").save(path, "PNG"),
    "CMYK.jpg": lambda path: Image.fromarray(RGBA, "CMYK").save(path, "JPEG"),
    "16-bit.png": lambda path: Image.fromarray(RNG.integers(0, 2**16, (9, 13)).astype(np.uint16)).save(path, "PNG"),
    "rotated.jpg": rotated,
    "animated.gif": lambda path: Image.fromarray(RGBA[..., :3]).save(
        path, "GIF", save_all=True, append_images=[Image.fromarray(RGBA[..., 1:])]
    ),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [(9, 13), (13, 9), (6, 7), (28, 28)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_images_of_every_kind_are_prepared_as_predict_prepares_them(tmp_path, name, side, channels):
    CASES[name](tmp_path / name)
    expected = read_image(tmp_path / name, name=name, size=side, colour="grey" if channels == 1 else "rgb")
    found = prepare(tmp_path / name, ["N", channels, *side])
    assert found.dtype == np.float32 and found.shape == (1, channels, *side)
    np.testing.assert_array_equal(found[0], expected.astype(np.float32) / np.float32(255))


def test_pixels_without_a_known_range_are_refused(tmp_path):
    Image.fromarray(RGBA[..., 0].astype(np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(ValueError, match="whose range is not known"):
        prepare(tmp_path / "float.tiff", ["N", 1, 9, 13])
