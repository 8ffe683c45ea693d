import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from calgp.data import Images, load
from calgp.gp import UNMASKED, Masking, Noise, name_sites
from calgp.nets import BACKBONES, Auto, Compact, Standardised, Task, standardisers
from calgp.nets.compact import FLOOR, Whitening

NARROW = Compact(widths=(32, 64, 128))
SMALL = Compact(widths=(4, 6, 8), entry=3)


def photographs(n=40, side=16, channels=3):
    """Images with correlated pixels: noise, smoothed."""
    noise = torch.rand(n, channels, side + 4, side + 4, generator=torch.Generator().manual_seed(0))
    return (torch.nn.functional.avg_pool2d(noise, 5, stride=1) * 255).to(torch.uint8)


def patches(responses: torch.Tensor) -> np.ndarray:
    """The responses to patches that do not overlap, a row each."""
    return responses[:, :, ::2, ::2].movedim(1, -1).flatten(0, -2).double().numpy()


def test_whitened_patches_are_uncorrelated_and_have_variance_one():
    x = photographs().float() / 255
    whitening = Whitening(3)
    whitening.fit(x)
    first, second = np.split(patches(whitening(x)), 2, axis=1)
    np.testing.assert_allclose(second, -first, atol=1e-5)
    covariance = np.cov(first.T)
    np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0, atol=1e-4)  # float32
    plain = np.cov(patches(Whitening(3)(x))[:, :12].T)
    values = np.linalg.eigvalsh(plain)
    np.testing.assert_allclose(
        np.sort(np.diag(covariance)), np.sort(values / (values + FLOOR * values.mean())), atol=1e-3
    )


def test_images_of_one_pixel_are_whitened():
    x = torch.randint(0, 256, (20, 3, 1, 1), generator=torch.Generator().manual_seed(0)).byte()
    net = Compact(widths=(8,)).build(Task(3, 1, 1, classes=2), Masking())
    Compact().start(net, Images.of(x, torch.arange(20) % 2, ("a", "b")))
    assert net.whitening.filters.isfinite().all() and net(net.stem(x / 255)).shape == (20, 8)


def test_images_without_content_leave_finite_filters():
    whitening = Whitening(1)
    whitening.fit(torch.zeros(3, 1, 16, 16))
    assert whitening.filters.isfinite().all()


@pytest.mark.parametrize("normalised", [False, True])
def test_the_start_whitens_what_the_network_sees_and_is_stored_with_it(normalised):
    spec = Standardised(SMALL) if normalised else SMALL
    images = Images.of(photographs(), torch.arange(40) % 2, ("a", "b"))
    net = spec.build(Task(3, 16, 16, 2), UNMASKED, generator=torch.Generator().manual_seed(0))
    for each in standardisers(net):
        each.fit([images.x])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    SMALL.start(net, images, generator=torch.Generator().manual_seed(0))
    (changed,) = (name for name, value in net.state_dict().items() if not value.equal(before[name]))
    assert changed.endswith("whitening.filters")
    whitening = net.network.whitening if normalised else net.whitening
    x = images.pixels()
    variances = np.var(patches(whitening(standardisers(net)[0].normalised(x) if normalised else x)), axis=0)
    np.testing.assert_allclose(variances, 1, atol=0.05)  # FLOOR, and the smallest directions


@pytest.mark.parametrize(("side", "stages"), [(8, 3), (16, 3), (32, 3), (45, 3), (48, 3), (64, 3), (96, 4), (224, 5)])
def test_large_images_have_further_stages_and_all_have_the_same_features(side, stages):
    net = SMALL.build(Task(1, side, side - 3, 5), Masking(0.5), generator=torch.Generator().manual_seed(0)).eval()
    halvings = max(round(math.log2(side / 32)), 0)  # the first of them by patches that do not overlap
    assert len(net.stages) == stages == 3 + max(halvings - 1, 0)
    assert net.whitening.stride == (2 if halvings else 1)
    assert net(net.stem(torch.rand(2, 1, side, side - 3))).shape == (2, 8) and net.out_features == 8


@pytest.mark.parametrize("unmasked", [0, 1, 2, 3])
def test_samples_share_the_stages_without_masks(unmasked):
    net = Compact(widths=(4, 6, 8), unmasked=unmasked).build(Task(3, 32, 32, 5), Masking(0.5)).eval()
    sites = [name for name in name_sites(net) if name.startswith("stages")]
    assert {int(name.split(".")[1]) for name in sites} == set(range(unmasked, 3))
    x = torch.rand(2, 3, 32, 32)
    c = net(net.stem(x), Noise(0, torch.arange(5), torch.arange(2)))
    assert c.shape == ((10, 8) if unmasked < 3 else (2, 8))


@pytest.mark.parametrize(("shift", "mirror"), [(0, True), (1, False), (2, True)])
def test_a_prediction_is_the_mean_of_the_features_of_all_views(shift, mirror):
    task, x = Task(3, 32, 32, 10), photographs(4, 32).float() / 255
    plain, averaged = (
        Compact(widths=(4, 6, 8), **options).build(task, Masking(0.8), generator=torch.Generator().manual_seed(0))
        for options in ({}, {"shift": shift, "mirror": mirror})
    )
    for net in (plain, averaged):
        name_sites(net)
    noise = Noise(0, torch.arange(3), torch.arange(4))

    def features(net, x):
        return net(net.stem(x), noise)

    assert features(averaged, x).equal(features(plain, x))  # training sees images as they are
    plain.load_state_dict(averaged.state_dict())
    plain.eval(), averaged.eval()
    bordered = np.pad(x.numpy(), ((0, 0), (0, 0), (shift, shift), (shift, shift)), mode="edge")
    corners = {0, shift, 2 * shift}  # of the windows: moved down and right, not at all, up and left
    views = [torch.from_numpy(bordered[:, :, k : k + 32, k : k + 32]) for k in corners]
    views += [view.flip(-1) for view in views] if mirror else []
    expected = sum(features(plain, view) for view in views) / len(views)
    assert torch.allclose(features(averaged, x), expected, atol=1e-6)
    if mirror and not shift:
        assert torch.allclose(features(averaged, x), features(averaged, x.flip(-1)), atol=1e-6)


def test_the_filters_cost_their_kl_and_the_whitening_costs_nothing():
    net = SMALL.build(Task(3, 32, 32, 5), Masking(0.5), generator=torch.Generator().manual_seed(0))
    keeps = [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    filters = [convolution.weight for stage in net.stages for convolution in stage.convolutions]
    expected = sum(keep / 2 * (each**2).sum().item() for keep, each in zip(keeps, filters, strict=True))
    assert net.kl().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Task(1, 28, 28, 10), NARROW), (Task(1, 32, 20, 10), NARROW), (Task(1, 33, 20, 10), Compact()),
        (Task(3, 32, 32, 10), Compact()), (Task(3, 96, 64, 2), Compact()), (Task(4, 8, 8, 2), Compact()),
    ],
)  # fmt: skip
def test_auto_chooses_by_size_and_channels(task, expected):
    assert Auto().choose(task) == expected
    assert Auto().choose(task, mirror=True) == replace(expected, mirror=True)
    assert all(each.choose(task) is each for name, each in BACKBONES.items() if name != "auto")


def test_auto_builds_what_it_chooses():
    images, task = load("digits", "test").pixels()[:3], Task(1, 28, 28, 10)
    nets = [each.build(task, UNMASKED, generator=torch.Generator().manual_seed(0)) for each in (Auto(), NARROW)]
    assert torch.equal(*(net(net.stem(images)) for net in nets))
