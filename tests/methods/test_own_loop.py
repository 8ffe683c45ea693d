"""`calgp.gp_classifier`: a network with a Gaussian process on top, in a loop of one's own."""

import copy
from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calgp
from calgp import METHODS, CalgpError
from calgp.gp import Bound, Noise
from calgp.methods.own_loop import find_image_shape


def small_network(classes=7):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, classes),
    )  # fmt: skip


def bars(n, seed=0):
    """Images of 28 × 28 with a bar that lies or stands."""
    g = torch.Generator().manual_seed(seed)
    y, place = torch.arange(n) % 2, torch.randint(4, 24, (n,), generator=g)
    x = 0.3 * torch.rand(n, 1, 28, 28, generator=g)
    for image, label, at in zip(x, y, place, strict=True):
        image[0, at, :] += 1.0 - label
        image[0, :, at] += label
    return x, y


def trained(net, steps=80, **data):
    x, y = bars(200, **data)
    optimiser = torch.optim.Adam([each for each in net.parameters() if each.requires_grad], lr=1e-2)
    torch.manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (50,))
        loss = net.loss(x[rows], y[rows], n=len(x))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


def test_a_frozen_network_has_a_head_that_learns_what_its_features_tell():
    """About as much as logistic regression finds in the same features of a network that was never trained."""
    network, (x, y), (x_test, y_test) = small_network(), bars(200), bars(400, seed=1)
    with torch.no_grad():
        c, c_test = (network.eval()[:-1](each).numpy() for each in (x, x_test))
    linear = LogisticRegression(C=100, max_iter=5000).fit(c, y).score(c_test, y_test)
    net = trained(calgp.gp_classifier(network, classes=2, freeze=True, n_rf=512), steps=300)
    found = (calgp.predict(net, x_test).labels == y_test).float().mean().item()
    assert found > linear - 0.1 and found > 0.7  # chance is 0.5, with a standard error of 0.025


def test_it_learns():
    net = trained(calgp.gp_classifier(small_network(), classes=2, n_rf=64))
    x, y = bars(100, seed=1)
    predictive = calgp.predict(net, x)
    assert (predictive.labels == y).float().mean() > 0.9
    assert predictive.probs.sum(1).allclose(torch.ones(100))


def test_the_loss_is_the_bound_per_datum():
    net, (x, y) = calgp.gp_classifier(small_network(), classes=2, n_rf=64), bars(20)
    net.start(x)
    torch.manual_seed(1)
    loss = net.loss(x, y, n=200)
    torch.manual_seed(1)
    expected = sum(Bound(net, n=200)(x, y))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    nll, kl = net.bound(x, y, n=200)
    assert kl.item() == pytest.approx(net.kl().item() / 200) and nll > 0


def test_a_frozen_network_stays_to_the_bit_and_has_no_gradients():
    network = small_network()
    net = trained(calgp.gp_classifier(network, classes=2, freeze=True, n_rf=64), steps=5)
    features = net.model.features
    mine = features.network.state_dict()
    assert all(value.equal(mine[name]) for name, value in network.state_dict().items() if not name.startswith("8."))
    assert not features(features.stem(bars(4)[0])).requires_grad and not features.sites
    assert all(each.requires_grad for each in [net.model.gp.layers[0].weights.weight])


def test_the_network_that_was_given_is_not_changed():
    network = small_network()
    before = copy.deepcopy(network.state_dict())
    trained(calgp.gp_classifier(network, classes=2, n_rf=64), steps=3)
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())
    assert isinstance(network[8], nn.Linear)


@pytest.mark.parametrize("by", ["the first batch", "start"])
def test_latent_functions_have_the_scale_that_was_asked_for(by):
    """σ · median ‖c‖ / ℓ is 16, or what was asked for, on the images of the start."""
    x, y = bars(100)
    for scale, options in ((16.0, {}), (4.0, {"scale": 4.0})):
        net = calgp.gp_classifier(small_network(), classes=2, n_rf=64, **options).eval()
        if by == "start":
            net.start(DataLoader(TensorDataset(x, y), 100))
        else:
            net.loss(x, y, n=100)
        rows = torch.arange(100)
        c = net.model.features(net.stem(x), Noise(0, rows[:1], rows, mean=True))
        assert (c.norm(dim=1).median() / net.model.gp.layers[0].kernel.lengthscale).item() == pytest.approx(
            scale, rel=1e-4
        )


def test_a_lengthscale_of_the_method_stays_and_the_start_is_part_of_the_state():
    x, y = bars(20)
    fixed = calgp.gp_classifier(small_network(), classes=2, n_rf=64, lengthscale=3.0)
    fixed.loss(x, y, n=20)
    assert fixed.model.gp.layers[0].kernel.lengthscale.item() == pytest.approx(3.0)
    net = trained(calgp.gp_classifier(small_network(), classes=2, n_rf=64), steps=3)
    other = calgp.gp_classifier(small_network(), classes=2, n_rf=64, seed=1)
    other.load_state_dict(net.state_dict())
    assert other.started
    assert calgp.predict(other, x).probs.equal(calgp.predict(net, x).probs)


@pytest.mark.parametrize("method", ["cnn-gp-rf", "cnn-dgp", "cnn-gp-mf", replace(METHODS["cnn-gp-sorf"], kernel="rbf")])
def test_other_methods(method):
    net = trained(calgp.gp_classifier(small_network(), classes=2, method=method, n_rf=32), steps=2)
    assert calgp.predict(net, bars(3)[0]).log_probs.isfinite().all()


def test_a_backbone_has_all_options_of_wrap():
    backbone = calgp.wrap(small_network(), mask=["3"], mean=(0.1,), std=(0.3,))
    net = calgp.gp_classifier(backbone, classes=2, image_shape=(1, 28, 28), n_rf=32)
    assert [*net.model.features.sites] == ["3"]


def test_options_of_masks_go_to_the_network():
    net = calgp.gp_classifier(small_network(), classes=2, n_rf=32, mask="none", mean=(0.1,), std=(0.3,))
    x = bars(5)[0]
    assert not net.model.features.sites
    torch.testing.assert_close(net.eval().stem(x), small_network()[:8].eval()((x - 0.1) / 0.3))


def test_predictions_do_not_depend_on_batches():
    net = trained(calgp.gp_classifier(small_network(), classes=2, n_rf=64), steps=3)
    x = bars(30)[0]
    whole, parts = calgp.predict(net, x), torch.cat([calgp.predict(net, part).log_probs for part in x.split(7)])
    torch.testing.assert_close(whole.log_probs, parts, rtol=1e-4, atol=1e-5)


def test_the_shape_of_images_is_found():
    assert find_image_shape(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 5))) == (3, 64, 64)
    assert find_image_shape(small_network()) == (1, 28, 28)
    timm_like = small_network()
    timm_like.pretrained_cfg = {"input_size": (1, 56, 56)}
    assert find_image_shape(timm_like) == (1, 56, 56)
    with pytest.raises(CalgpError, match=r"image_shape=\(3, 224, 224\)"):
        find_image_shape(nn.Sequential(nn.Flatten(), nn.Linear(17, 5)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "cnn"}, "no method for your own loop called 'cnn'"),
        ({"method": "cnn-gp-sorff"}, "did you mean 'cnn-gp-sorf"),
        ({"nrf": 3}, "did you mean 'n_rf'"),
        ({"keep": 2.0}, "keep"),
        ({"classes": 1}, "at least 2"),
        ({"image_shape": (28, 28)}, "channels, height, width"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options, message):
    with pytest.raises(CalgpError, match=message):
        calgp.gp_classifier(small_network(), **{"classes": 2} | options)


def test_labels_and_n_are_checked():
    x, y = bars(10)
    net = calgp.gp_classifier(small_network(), classes=2, n_rf=32)
    with pytest.raises(CalgpError, match="whole numbers 0 … 1"):
        net.loss(x, y + 1, n=10)
    with pytest.raises(CalgpError, match="number of training images"):
        net.loss(x, y, n=0)
    with pytest.raises(CalgpError, match="A backbone has its own options"):
        calgp.gp_classifier(calgp.wrap(small_network()), classes=2)


def test_a_compiled_network_is_refused_before_it_is_compiled_for_each_size():
    def never(graph, inputs):
        raise AssertionError("it was compiled, for each size that was tried")

    with pytest.raises(CalgpError, match="must be the plain module, not scripted, compiled"):
        calgp.gp_classifier(torch.compile(small_network(), backend=never), classes=2)
