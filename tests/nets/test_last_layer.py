from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from calgp.errors import CalgpError
from calgp.nets.last_layer import LastLayer

X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Classifier(nn.Module):
    """Layers in another order than they are called, dropout, and an output as the test wants it."""

    def __init__(self, output=lambda f: f):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.drop, self.output = nn.Linear(5, 4), nn.Dropout(), output
        self.convolution, self.middle = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)

    def forward(self, x):
        c = self.middle(self.convolution(x).relu().mean((2, 3))).relu()
        return self.output(self.head(self.drop(c)))


class Output(dict):
    """As transformers have it."""


@dataclass
class Answer:
    loss: None
    logits: torch.Tensor


@pytest.mark.parametrize(
    "output",
    [
        lambda f: f, lambda f: f.log_softmax(1), lambda f: f.softmax(1), lambda f: (f,), lambda f: Output(logits=f),
        lambda f: Answer(None, f),
    ],
    ids=["logits", "log-softmax", "softmax", "tuple", "logits by name", "a dataclass"],
)  # fmt: skip
def test_features_and_logits_are_those_of_the_last_layer(output):
    network = Classifier(output)
    last = LastLayer.find(network, X)
    c, f = last(X)
    network.eval()
    with torch.no_grad():
        expected = network.middle(network.convolution(X).relu().mean((2, 3))).relu()
        torch.testing.assert_close(c, expected)
        torch.testing.assert_close(f, network.head(expected))
    assert last.name == "head" and last.weight.equal(network.head.weight) and last.bias.equal(network.head.bias)


class Tokens(nn.Module):
    """A linear layer on each token, and the average of its logits."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(x.flatten(2).mT).mean(1)


@pytest.mark.parametrize(
    "network, name",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), "0"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1, bias=False), nn.Flatten()), "1"),
        (Tokens(), "head"),
    ],
)
def test_logits_averaged_over_pixels_or_tokens_are_those_of_the_average(network, name):
    last = LastLayer.find(network, X)
    c, f = last(X)
    assert last.name == name
    torch.testing.assert_close(c, X.mean((2, 3)))
    torch.testing.assert_close(f, network(X).detach())
    torch.testing.assert_close(f, F.linear(c, last.weight, last.bias))


def test_of_a_compiled_network_the_module_inside_is_run():
    network = Classifier()
    compiled = torch.compile(network, backend="eager")
    assert LastLayer.find(compiled, X).name == "head" and LastLayer(compiled, "head").network is network
    network.compile(backend="eager")
    with pytest.raises(CalgpError, match=r"compiled in place.*with the same state_dict"):
        LastLayer.find(network, X)


def test_networks_that_are_random_or_mix_inputs_are_refused():
    mixing = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(192, 4))
    for network in (nn.Sequential(Dropping(), nn.Linear(192, 4)), mixing):
        with pytest.raises(CalgpError, match=r"gives other logits for the same input.*self\.training"):
            LastLayer.find(network, X)


class Dropping(nn.Module):
    def forward(self, x):
        return F.dropout(x.flatten(1), 0.5)


class Cosine(nn.Linear):
    """It is called linear, and is not."""

    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


def test_a_pass_leaves_the_network_as_it_was():
    network = Classifier().train()
    LastLayer.find(network, X)(X)
    assert network.training and network.drop.training
    assert not any(module._forward_hooks for module in network.modules())


def test_half_precision_gives_single_precision():
    c, f = LastLayer.find(Classifier().bfloat16(), X)(X)
    assert c.dtype == f.dtype == torch.float32


def test_what_does_not_end_so_is_refused():
    convolutional = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(CalgpError, match=r"does not end with a linear layer.*Put a module around"):
        LastLayer.find(convolutional, X)
    with pytest.raises(CalgpError, match="does not end with a linear layer"):
        LastLayer.find(Classifier(lambda f: f * 2), X)
    with pytest.raises(CalgpError, match="does not end with a linear layer"):
        LastLayer.find(Classifier(), X, "middle")
    with pytest.raises(CalgpError, match="does not end with a linear layer"):
        LastLayer.find(nn.Sequential(nn.Flatten(), Cosine(192, 4, bias=False)), X)
    with pytest.raises(CalgpError, match=r"it gives a dictionary of out\. Put a module around"):
        LastLayer.find(Classifier(lambda f: Output(out=f)), X)
    with pytest.raises(CalgpError, match="did you mean 'head'"):
        LastLayer(Classifier(), "heads")
    with pytest.raises(CalgpError, match="at least two logits"):
        LastLayer.find(nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), X)
    with pytest.raises(CalgpError, match=r"cannot take inputs of \(4, 2, 8, 8\)"):
        LastLayer.find(Classifier(), X[:, :2])
    with pytest.raises(CalgpError, match="no finite numbers"):
        LastLayer(Classifier(), "head")(X * torch.nan)
