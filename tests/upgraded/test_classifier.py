"""A trained classifier that is upgraded: what stays, what gets better, what is written."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import calgp
from calgp import CalgpError
from calgp.data import load
from calgp.posthoc.decisions import keyed_uniform
from calgp.posthoc.last_layer import UncertaintyScaling, log_odds_variance
from calgp.upgraded import UpgradedClassifier

from .conftest import CLASSES, blobs


def outside(n, seed=9):
    """What was never seen: far from all three."""
    return blobs(n, seed)[0] - 4


@pytest.fixture(scope="module")
def upgraded(network):
    return calgp.upgrade(network, blobs(4000, 1), train=blobs(300, 0), error=0.3)


def test_labels_are_those_of_the_network(network, upgraded):
    x = torch.cat([blobs(2000, 2)[0], outside(200), 100 * blobs(100, 3)[0]])
    assert upgraded.predict(x).predictive.labels.equal(network(x).argmax(1))


def test_probabilities_are_no_worse_than_with_a_temperature_and_far_better_than_before(upgraded):
    found = upgraded.evaluate(blobs(5000, 2))
    assert found.scores.err == found.before.err == found.temperature_alone.err
    assert found.before.mnll > 2 * found.scores.mnll
    assert found.scores.mnll <= found.temperature_alone.mnll + 0.002  # of 5,000, where the standard error is 0.01
    assert found.scores.ece < 0.03 < found.before.ece


def test_outliers_are_found_from_the_features(upgraded):
    found = upgraded.evaluate(blobs(1000, 2), outside=outside(500)).ood
    assert found["combined"].auroc > 0.99
    assert found["combined"].auroc > found["network-confidence"].auroc
    flagged = upgraded.predict(outside(500)).outliers.float().mean()
    false = upgraded.predict(blobs(5000, 4)[0]).outliers.float().mean()
    assert flagged > 0.95 and false < 0.08  # 0.05 on average over hold-outs; of 500 its deviation is 0.01


def test_sets_and_answers_keep_their_promises(upgraded):
    """90 % and an error of 0.3; of a hold-out of 2,000 the coverage has a deviation of 0.007."""
    evaluation = upgraded.evaluate(blobs(5000, 5))
    found = evaluation.decisions
    assert 0.86 < found.sets.covered < 0.94
    assert found.selection.error < min(0.3, evaluation.scores.err) and found.selection.share < 1
    prediction = upgraded.predict(blobs(50, 6)[0])
    assert prediction.sets.shape == (50, CLASSES) and prediction.abstains.shape == (50,)


def test_the_temperature_is_of_the_whole_hold_out_and_decisions_never_read_their_own_images(network):
    """Other labels of the half that decides change the temperature, but no probability that decisions read."""
    x, y = blobs(400, 8)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    changed = y.clone()
    changed[order[200:]] = (y[order[200:]] + 1) % CLASSES
    first, second = (calgp.upgrade(network, (x, labels), train=blobs(500, 1)) for labels in (y, changed))
    for each, labels in ((first, y), (second, changed)):
        c, f = each.network(x)
        variance = log_odds_variance(f, each.posterior.logit_covariance(c)).double()
        expected = UncertaintyScaling.with_trust(each.fitted.scaling.trust, f.double(), variance, labels)
        assert each.fitted.scaling.temperature == pytest.approx(expected.temperature)
        assert each.fitted.decisions.power == each.fitted.power
    assert second.fitted.scaling.temperature > 1.5 * first.fitted.scaling.temperature
    read = [each.fitted.scaling.temperature / each.fitted.power for each in (first, second)]
    assert read[0] == pytest.approx(read[1])
    new = blobs(100, 9)[0]  # ordinary scores are counted: of those inputs themselves, rounding may move the count
    torch.testing.assert_close(first.predict(new).outlier_score, second.predict(new).outlier_score)
    plain = replace(first.fitted.decisions, power=1.0).decisions
    before = replace(first.fitted.scaling, temperature=read[0])
    c, f = first.network(new)
    log_probs = before.apply(f.double(), log_odds_variance(f, first.posterior.logit_covariance(c)).double())
    assert first.predict(new).sets.equal(plain.sets.apply(log_probs, keyed_uniform(new)))


def test_uncertainty_of_the_last_layer_is_larger_where_there_were_no_data(upgraded):
    inside, far = (upgraded.predict(x).predictive.latent_variance.median() for x in (blobs(500, 2)[0], outside(500)))
    assert far > 2 * inside
    information = upgraded.predict(blobs(500, 2)[0]).mutual_information
    assert (information >= 0).all() and information.max() > 0


def test_saved_and_loaded_it_predicts_the_same_bits(network, upgraded, tmp_path):
    path, x = tmp_path / "upgraded.safetensors", blobs(100, 7)[0]
    upgraded.save(path)
    loaded = UpgradedClassifier.load(path, copy.deepcopy(network))
    before, after = upgraded.predict(x), loaded.predict(x)
    for name in ("probs", "mutual_information", "outlier_score", "sets", "abstains", "outliers"):
        assert getattr(before, name).equal(getattr(after, name)), name
    assert loaded.fitted == upgraded.fitted
    with safe_open(path, "pt") as file:  # no pickle: anybody can read it
        assert set(file.metadata()) == {"calgp", "sha256"}


def test_the_weights_must_be_those_that_it_was_saved_with(network, upgraded, tmp_path):
    upgraded.save(tmp_path / "upgraded.safetensors")
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[2].weight[0, 0] += 1e-3
    with pytest.raises(CalgpError, match="saved for another network: the weight of its last layer '2'"):
        UpgradedClassifier.load(tmp_path / "upgraded.safetensors", other)
    (tmp_path / "damaged").write_bytes(b"\x00" * 100)
    with pytest.raises(CalgpError, match="damaged"):
        UpgradedClassifier.load(tmp_path / "damaged", network)


def test_pairs_loaders_and_data_sets_give_the_same(network):
    x, y = blobs(300, 1)
    forms = [(x, y), DataLoader(TensorDataset(x, y), 64), TensorDataset(x, y), [(x[:200], y[:200]), (x[200:], y[200:])]]
    found = [calgp.upgrade(network, form).predict(x).probs for form in forms]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_images_and_neighbours():
    torch.manual_seed(0)
    images = load("digits", "test")
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))
    found = calgp.upgrade(network, images, outliers="neighbours", structure="kronecker", classes=images.classes)
    prediction = found.predict(images.pixels()[:5])
    assert prediction.labels == [images.classes[q] for q in network(images.pixels()[:5]).argmax(1).tolist()]
    assert prediction.outlier_score.shape == (5,)


def test_arrays_are_taken_as_tensors_are(network):
    x, y = blobs(200, 1)
    given = [calgp.upgrade(network, data) for data in ((x, y), (x.numpy(), y.numpy()), [(x.numpy(), y.numpy())])]
    assert given[0].fitted == given[1].fitted == given[2].fitted


class Samples(Dataset):
    """What a data set gives one by one, made of an input and its label."""

    def __init__(self, make):
        self.pairs, self.make = list(zip(*blobs(200, 1), strict=True)), make

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, place):
        return self.make(*self.pairs[place])


def test_lists_of_labels_and_dictionaries_are_taken_as_pairs_are(network):
    x, y = blobs(200, 1)
    named = Samples(lambda x, y: {"label": int(y), "image": x})
    forms = [(x, y), (x, y.tolist()), {"x": x, "y": y}, named, DataLoader(named, 50), [(x, y.tolist())]]
    forms.append(Samples(lambda x, y: (x.numpy(), int(y), "more")))
    found = [calgp.upgrade(network, data).predict(x.numpy()).probs for data in forms]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_weights_that_are_not_finite_are_named(network):
    for place, value in (("0.weight", float("nan")), ("2.bias", float("inf"))):
        failed = copy.deepcopy(network)
        with torch.no_grad():
            failed.get_parameter(place).view(-1)[0] = value
        with pytest.raises(CalgpError, match=f"its weights '{place}' are not finite"):
            calgp.upgrade(failed, blobs(200, 1))


@pytest.mark.parametrize(
    "network, message",
    [
        (nn.Linear(10, 3, device="meta"), "give the nn.Module itself, with its weights loaded"),
        (lambda x: x, "must be an nn.Module with parameters, not function"),
        (nn.Flatten(), "must be an nn.Module with parameters, not Flatten"),
        (nn.Linear(10, 1), r"If it has one logit for two classes, put nn.Linear\(d, 2\)"),
        (nn.Sequential(nn.Linear(10, 3), nn.Sigmoid()), "does not end with a linear layer"),
    ],
)
def test_networks_that_cannot_be_upgraded_are_refused_with_a_remedy(network, message):
    with pytest.raises(CalgpError, match=message):
        calgp.upgrade(network, blobs(200, 1))


def test_the_network_is_left_alone(network):
    before, mode = copy.deepcopy(network.state_dict()), network.training
    calgp.upgrade(network, blobs(200, 1)).predict(blobs(5, 2)[0])
    assert all(value.equal(before[name]) for name, value in network.state_dict().items())
    assert network.training == mode and not any(module._forward_hooks for module in network.modules())


@pytest.mark.parametrize(
    "data, options, message",
    [
        (lambda x, y: (x, y + 1), {}, "Labels must lie in 0 … 2"),
        (lambda x, y: (x, y.float()), {}, "a whole number as the label"),
        (lambda x, y: (x, y[:-1]), {}, "200 inputs and 199 labels"),
        (lambda x, y: [], {}, "no data"),
        (lambda x, y: (x[:0], y[:0]), {}, "no data"),
        (lambda x, y: None, {}, "there is NoneType"),
        (lambda x, y: (x, F.one_hot(y)), {}, r"Take y.argmax\(1\) of one-hot labels"),
        (lambda x, y: (x * float("nan"), y), {}, "no finite numbers"),
        (lambda x, y: [x], {}, "a whole number as the label"),
        (lambda x, y: [{"x": x}], {}, "there is a dictionary of x. Make pairs"),
        (lambda x, y: (x, ["cat"] * 200), {}, "a whole number as the label of each input, .N.; there are list"),
        (lambda x, y: (x, np.array(["cat"] * 200)), {}, "there are <U3 .200."),
        (lambda x, y: list(zip(x, y.tolist(), strict=True)), {}, "single images, not batches"),
        (lambda x, y: Samples(lambda x, y: (x[: int(y) + 1], y)), {}, "do not make a batch"),
        (lambda x, y: (x[:, :4], y), {}, "cannot take inputs"),
        (lambda x, y: (x[:20], y[:20]), {}, "needs at least 19 held-out"),
        (lambda x, y: (x, y), {"share": 1.0}, "Invalid share=1"),
        (lambda x, y: (x, y), {"outliers": "densities"}, "did you mean 'density'"),
        (lambda x, y: (x, y), {"classes": ["a", "b"]}, "2 classes are named; the network has 3"),
        (lambda x, y: (x, y), {"coverage": 2.0}, "Invalid coverage=2: must be a share"),
        (lambda x, y: (x, y), {"sets": "asp"}, "There is no sets 'asp'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(network, data, options, message):
    with pytest.raises(CalgpError, match=message):
        calgp.upgrade(network, data(*blobs(200, 1)), **options)
