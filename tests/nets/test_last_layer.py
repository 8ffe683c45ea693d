import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize(
    "output",
    [lambda f: f, lambda f: f.log_softmax(1), lambda f: f.softmax(1), lambda f: (f,), lambda f: Output(logits=f)],
    ids=["logits", "log-softmax", "softmax", "tuple", "logits by name"],
)
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
    with pytest.raises(CalgpError, match=r"does not end with a linear layer on vectors.*Put a module around"):
        LastLayer.find(convolutional, X)
    with pytest.raises(CalgpError, match="does not end with a linear layer"):
        LastLayer.find(Classifier(lambda f: f * 2), X)
    with pytest.raises(CalgpError, match="does not end with a linear layer"):
        LastLayer.find(Classifier(), X, "middle")
    with pytest.raises(CalgpError, match="did you mean 'head'"):
        LastLayer(Classifier(), "heads")
    with pytest.raises(CalgpError, match="at least two logits"):
        LastLayer.find(nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), X)
    with pytest.raises(CalgpError, match=r"cannot take inputs of \(4, 2, 8, 8\)"):
        LastLayer.find(Classifier(), X[:, :2])
    with pytest.raises(CalgpError, match="no finite numbers"):
        LastLayer(Classifier(), "head")(X * torch.nan)
