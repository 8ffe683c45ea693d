import io
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from calgp.data import CORRUPTIONS, SEVERITIES, Corruption, Images, corrupted, load
from calgp.data.corruptions import GREY, STRENGTHS
from calgp.errors import CalgpError


def photographs(n=40, channels=3, height=32, width=32) -> Images:
    """Smooth random images: like photographs, neighbouring pixels are alike."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, channels, 6, 6, generator=generator)
    x = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").mul(255).clamp(0, 255).byte()
    return Images.of(x, torch.arange(n) % 2, ("a", "b"), names=tuple(f"{i}.png" for i in range(n)))


def flat(value=100, n=200, channels=1, size=32) -> Images:
    return Images.of(torch.full((n, channels, size, size), value).byte(), torch.zeros(n).long(), ("a",))


def damage(before: Images, after: Images) -> float:
    return (before.x.double() - after.x.double()).square().mean().item()


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 9, 9), (3, 20, 45), (1, 1, 1), (2, 1, 7)])
def test_everything_but_the_pixels_is_kept(kind, shape):
    before = photographs(6, *shape)
    x = before.x.clone()
    after = corrupted(before, kind, 5, seed=0)
    assert after.x.shape == x.shape and after.x.dtype == torch.uint8
    assert torch.equal(after.y, before.y) and torch.equal(after.rows, before.rows)
    assert after.classes == before.classes and after.names == before.names
    assert torch.equal(before.x, x)
    if min(shape[1:]) > 8:
        assert (after.x != x).flatten(1).any(1).all()


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_is_corrupted_by_its_row_whatever_comes_with_it(kind):
    before = photographs()
    after = corrupted(before, kind, 3, seed=1)
    order = torch.tensor([31, 4, 17, 0])
    assert torch.equal(corrupted(before.take(order), kind, 3, seed=1).x, after.x[order])
    assert torch.equal(corrupted(before, kind, 3, seed=1).x, after.x)


@pytest.mark.parametrize("kind", ["noise", "rotation", "occlusion"])
def test_what_is_random_differs_by_seed_and_by_row(kind):
    same = photographs(1).take(torch.zeros(20).long())  # one picture twenty times, in twenty rows
    same = Images.of(same.x, same.y, same.classes)
    first, other = (corrupted(same, kind, 3, seed=seed).x for seed in (0, 1))
    assert not torch.equal(first, other)
    assert len(first.flatten(1).unique(dim=0)) > 1


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("images", [load("digits", "test").take(torch.arange(200)), photographs()], ids=["grey", "rgb"])
def test_damage_grows_with_severity(kind, images):
    found = [damage(images, corrupted(images, kind, severity, seed=0)) for severity in SEVERITIES]
    assert found[0] > 0 and all(less < more for less, more in pairwise(found)), found


def test_the_global_generators_are_left_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    for kind in CORRUPTIONS:
        corrupted(photographs(2), kind, 1, seed=0)
    assert torch.equal(torch_state, torch.get_rng_state()) and (numpy_state == np.random.get_state()[1]).all()


@pytest.mark.parametrize("severity", [1, 3])
def test_noise_is_white_and_gaussian_with_the_deviation_of_the_table(severity):
    before = flat(128, channels=3)
    noise = (corrupted(before, "noise", severity, seed=0).x.double() - 128).numpy()
    deviation = 255 * STRENGTHS["noise"][severity - 1]
    n = noise.size
    assert abs(noise.mean()) < 5 * deviation / math.sqrt(n)
    # rounding adds 1/12 to the variance, clipping at 3.8 deviations takes less; five standard errors of a variance
    assert noise.var() == pytest.approx(deviation**2 + 1 / 12, rel=5 * math.sqrt(2 / n))
    assert (np.abs(noise) < deviation).mean() == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)
    for shifted in (np.roll(noise, 1, 1), np.roll(noise, 1, 2), np.roll(noise, 1, 3)):  # channels, rows, columns
        assert abs((noise * shifted).mean()) < 5 * deviation**2 / math.sqrt(n)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_blur_spreads_a_line_by_the_deviation_of_the_table(severity):
    x = torch.zeros(1, 2, 101, 101, dtype=torch.uint8)
    x[0, 0, :, 50] = 255
    x[0, 1, 50] = 255
    across, down = corrupted(Images.of(x, torch.tensor([0]), ("a",)), "blur", severity, seed=0).x[0].double()
    place = torch.arange(101) - 50.0
    for line in (across[50], down[:, 50]):
        share = line / line.sum()
        assert (share * place).sum().item() == pytest.approx(0, abs=1e-6)
        deviation = (share * place.square()).sum().sqrt().item()
        assert deviation == pytest.approx(101 * STRENGTHS["blur"][severity - 1], rel=0.05)  # tails are rounded away


def test_blur_and_rotation_keep_a_picture_of_one_colour():
    for kind in ("blur", "rotation", "contrast"):
        assert torch.equal(corrupted(flat(), kind, 5, seed=0).x, flat().x), kind


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_scales_the_distance_to_each_channels_mean(severity):
    before = photographs(5)
    after = corrupted(before, "contrast", severity, seed=0).x.double()
    x = before.x.double()
    mean = x.mean((2, 3), keepdim=True)
    assert (after - mean - STRENGTHS["contrast"][severity - 1] * (x - mean)).abs().max() <= 0.5 + 1e-9


@pytest.mark.parametrize("severity", SEVERITIES)
def test_rotation_turns_a_ramp_as_its_formula(severity):
    """Bilinear interpolation is exact on a linear function: a + b u + c v turned is a + b u' + c v'."""
    size, centre = 33, 16.0
    v, u = torch.meshgrid(torch.arange(size) - centre, torch.arange(size) - centre, indexing="ij")
    ramp = (128 + 3 * u + 2 * v).byte()
    after = corrupted(Images.of(ramp.repeat(40, 1, 1, 1), torch.zeros(40).long(), ("a",)), "rotation", severity, seed=0)
    within = u.square() + v.square() < (centre - 1) ** 2
    signs = []
    for picture in after.x[:, 0].double():
        for sign in (-1, 1):
            angle = math.radians(sign * STRENGTHS["rotation"][severity - 1])
            turned_u, turned_v = (
                math.cos(angle) * u - math.sin(angle) * v,
                math.sin(angle) * u + math.cos(angle) * v,
            )
            if ((128 + 3 * turned_u + 2 * turned_v - picture)[within]).abs().max() <= 1:  # rounding
                signs.append(sign)
    assert len(signs) == 40 and set(signs) == {-1, 1}


def test_rotation_fills_with_the_colour_of_the_border():
    x = torch.full((1, 3, 40, 40), 0, dtype=torch.uint8)
    x[0] = torch.tensor([200, 30, 90], dtype=torch.uint8).view(3, 1, 1)
    x[:, :, 10:30, 10:30] = 0
    after = corrupted(Images.of(x, torch.tensor([0]), ("a",)), "rotation", 5, seed=0).x[0]
    for corner in (after[:, 0, 0], after[:, 0, -1], after[:, -1, 0], after[:, -1, -1]):
        assert corner.tolist() == [200, 30, 90]


@pytest.mark.parametrize("shape", [(28, 28), (20, 45)])
def test_occlusion_is_one_grey_square_that_only_grows(shape):
    before = Images.of(torch.full((50, 3, *shape), 9, dtype=torch.uint8), torch.zeros(50).long(), ("a",))
    smaller = torch.zeros(50, *shape, dtype=torch.bool)
    for severity in SEVERITIES:
        after = corrupted(before, "occlusion", severity, seed=0).x
        grey = (after == GREY).all(1)
        assert torch.equal(grey, (after != 9).any(1))
        side = round(STRENGTHS["occlusion"][severity - 1] * min(shape))
        assert (grey.any(2).sum(1) == side).all() and (grey.any(1).sum(1) == side).all()
        assert (grey.sum((1, 2)) == side**2).all()
        assert (smaller <= grey).all()
        smaller = grey


def test_occlusion_reaches_every_place():
    after = corrupted(flat(n=3000, size=12), "occlusion", 3, seed=0).x
    assert (after == GREY).any(0).all()


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pillows(severity, channels):
    before = photographs(4, channels)
    after = corrupted(before, "jpeg", severity, seed=0).x.numpy()
    for x, found in zip(before.x, after, strict=True):
        file = io.BytesIO()
        picture = Image.fromarray(x.permute(1, 2, 0).squeeze(-1).numpy())
        picture.save(file, "JPEG", quality=STRENGTHS["jpeg"][severity - 1])
        expected = np.asarray(Image.open(file)).reshape(32, 32, channels).transpose(2, 0, 1)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "severity", "seed", "message"),
    [
        ("fog", 3, 0, "Invalid corruption 'fog': must be one of noise, blur, contrast, rotation, occlusion, jpeg"),
        ("noise", 0, 0, "severity=0"),
        ("noise", 6, 0, "1 .slight. to 5"),
        ("noise", 1, -1, "seed=-1"),
    ],
)
def test_what_is_not_known_is_refused(kind, severity, seed, message):
    with pytest.raises(CalgpError, match=message):
        corrupted(photographs(1), kind, severity, seed=seed)


def test_corruptions_are_read_from_text():
    assert Corruption.parse("jpeg:4", seed=3) == [Corruption("jpeg", 4, 3)]
    assert Corruption.parse("jpeg") == [Corruption("jpeg", severity) for severity in SEVERITIES]
    for text, message in {
        "noise:": "KIND:SEVERITY", "noise:x": "KIND:SEVERITY", "noise:-1": "KIND:SEVERITY",
        "noise:1:2": "KIND:SEVERITY", "noise:0": "severity=0", "": "Invalid corruption ''",
        ":3": "Invalid corruption ''", "Noise:3": "Invalid corruption 'Noise'",
    }.items():  # fmt: skip
        with pytest.raises(CalgpError, match=message):
            Corruption.parse(text)


def test_the_documentation_has_the_strengths_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "corruptions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*?((?:\| [\d.]+ ){5})\|$", text, re.MULTILINE)
    assert {kind: tuple(float(cell) for cell in cells.strip("| ").split("|")) for kind, cells in rows} == STRENGTHS
