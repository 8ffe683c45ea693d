import io
import os
import resource
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from calgp.data.decode import MAX_FILE_BYTES, read_header, read_image
from calgp.errors import CalgpError

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
RGB = np.stack([GREY, GREY[::-1], 255 - GREY], -1)


def read(picture: Image.Image, form="PNG", size=None, colour=None, **options) -> np.ndarray:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return read_image(io.BytesIO(file.getvalue()), name="it", size=size, colour=colour)


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "GIF"])
def test_grey_is_one_channel(form):
    assert np.array_equal(read(Image.fromarray(GREY), form, colour="grey"), GREY[None])


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF"])
def test_rgb_is_three_channels_first(form):
    assert np.array_equal(read(Image.fromarray(RGB), form), RGB.transpose(2, 0, 1))


def test_sixteen_bits_are_scaled_to_eight():
    wide = (GREY.astype(np.uint16) * 257).copy()
    for form in ("PNG", "TIFF"):
        assert np.array_equal(read(Image.fromarray(wide), form), GREY[None])


def test_one_bit_is_black_and_white():
    assert np.array_equal(read(Image.fromarray(GREY > 100)), (GREY > 100)[None] * np.uint8(255))


def test_what_is_transparent_is_white():
    alpha = np.zeros((3, 4), np.uint8)
    alpha[0] = 255
    expected = np.where(alpha[..., None] == 255, RGB, 255).transpose(2, 0, 1)
    assert np.array_equal(read(Image.fromarray(np.dstack([RGB, alpha]))), expected)
    grey = read(Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(alpha)]))
    assert np.array_equal(grey, np.where(alpha == 255, GREY, 255)[None])


def test_palettes_show_their_colours():
    palette = Image.fromarray(RGB).quantize(12)
    assert np.array_equal(read(palette), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))
    assert read(palette, transparency=0).shape == (3, 3, 4)


def test_a_turned_photograph_is_set_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270°
    assert np.array_equal(read(Image.fromarray(GREY), exif=exif.tobytes()), np.rot90(GREY, 3)[None])
    Image.fromarray(GREY).save(tmp_path / "a.png", exif=exif.tobytes())
    assert read_header(tmp_path / "a.png") == (True, (3, 4))


def test_size_and_colour_are_as_asked():
    assert read(Image.fromarray(RGB), size=8, colour="grey").shape == (1, 8, 8)
    assert read(Image.fromarray(GREY), size=2, colour="rgb").shape == (3, 2, 2)
    assert read(Image.new("CMYK", (4, 3)), "JPEG").shape == (3, 3, 4)


def test_bombs_and_damage_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("calgp.data.bombs.MAX_PIXELS", 8)
    for width in (4, 40):
        with pytest.raises(CalgpError, match=r"it is not a readable image.*decompression bomb"):
            read(Image.new("L", (width, 3)))
    for content in (b"", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x89PNG\r\n\x1a\n" + bytes(40)):
        with pytest.raises(CalgpError, match="it is not a readable image"):
            read_image(io.BytesIO(content), name="it", size=None, colour=None)


def test_damaged_images_raise_only_our_error():
    chance = np.random.default_rng(0)
    for form in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        file = io.BytesIO()
        Image.fromarray(RGB).save(file, form)
        for _ in range(60):
            broken = np.frombuffer(file.getvalue(), np.uint8)[: chance.integers(1, len(file.getvalue()) + 1)].copy()
            broken[chance.integers(len(broken))] = chance.integers(256)
            try:
                assert read_image(io.BytesIO(broken.tobytes()), name="it", size=4, colour="rgb").shape == (3, 4, 4)
            except CalgpError as error:
                assert str(error).startswith("it is not a readable image")


def test_a_bomb_is_refused_before_it_unfolds():
    header = struct.pack(">IIBBBBB", 10_000, 10_000, 1, 0, 0, 0, 0)  # one bit a pixel; as RGBA it would have 400 MB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1251 * 10_000))), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert len(file.getvalue()) < 20_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CalgpError, match="10000 × 10000 pixels; at most 67108864 are decoded"):
        read_image(file, name="it", size=8, colour="rgb")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


def test_a_file_that_is_too_large_or_none_is_not_opened(tmp_path):
    (tmp_path / "a.webp").write_bytes(b"RIFF")
    os.truncate(tmp_path / "a.webp", MAX_FILE_BYTES + 1)  # Pillow would read it whole
    os.mkfifo(tmp_path / "b.png")  # and wait for this one
    for name, why in (("a.webp", "at most 268435456 are read"), ("b.png", "no regular file"), ("c.png", "no regular")):
        with pytest.raises(CalgpError, match=why):
            read_image(tmp_path / name, name=name, size=None, colour=None)
        assert read_header(tmp_path / name) is None


def test_a_size_that_no_image_has_is_refused():
    with pytest.raises(CalgpError, match="Invalid size=1000000000: must be the side"):
        read(Image.fromarray(GREY), size=10**9)
