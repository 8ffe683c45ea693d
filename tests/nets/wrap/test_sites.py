import pytest
import torch
from small_networks import HALF, Residual, features, images, noise, remedy
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calgp.errors import CalgpError
from calgp.gp import UNMASKED


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        ({}, ["blocks.0.0", "blocks.1.0"]),
        ({"mask_first": True}, ["first", "blocks.0.0", "blocks.1.0"]),
        ({"mask": "convolutions"}, ["blocks.0.0", "blocks.1.0"]),
        ({"mask": ["blocks.1"]}, ["blocks.1.0"]),
        ({"mask": ["first", "blocks.1.0"]}, ["first", "blocks.1.0"]),
        ({"mask": lambda name: name.endswith(".0")}, ["blocks.0.0", "blocks.1.0"]),
        ({"mask": lambda name: True}, ["first", "blocks.0.0", "blocks.1.0"]),
        ({"mask": "none"}, []),
    ],
)
def test_which_layers_are_masked(options, sites):
    assert list(features(Residual(), **options).sites) == sites


class Net(nn.Module):
    """Two convolutions and a classifier, with `between` to go wrong in."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.classifier = nn.Linear(4, 2)

    def forward(self, x):
        return self.classifier(self.between(self.two(self.one(x).relu())).mean((2, 3)))


class FunctionalLinear(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def between(self, h):
        return F.linear(h.mT.mT.movedim(1, -1), self.inner.weight, self.inner.bias).movedim(-1, 1)


class FunctionalConvolution(Net):
    def __init__(self):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 4, 1, 1))

    def between(self, h):
        return F.conv2d(h, self.filters - self.filters.mean())


class Product(Net):
    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(2, 4, 2))

    def between(self, h):
        return torch.einsum("nchw,cd->ndhw", h, self.mixing.transpose(0, 1).flatten(1))


class TiedOutside(Net):
    def __init__(self):
        super().__init__()
        self.early, self.late = nn.Linear(4, 4), nn.Linear(4, 4)
        self.late.weight = self.early.weight

    def between(self, h):
        h = F.linear(self.late(h.movedim(1, -1)), self.early.weight)
        return h.movedim(-1, 1)


class Attention(Net):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def between(self, h):
        tokens = h.flatten(2).mT
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mT.view_as(h)


class Recurrent(Net):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(4, 4, batch_first=True)

    def between(self, h):
        return self.recurrent(h.flatten(2).mT)[0].mT.reshape(h.shape)


class EncoderLayer(Net):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def between(self, h):
        return self.encoder(h.flatten(2).mT).mT.reshape(h.shape)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.position, self.scale = nn.Parameter(torch.randn(1, 4, 8, 8)), nn.Parameter(torch.randn(4, 1, 1))

    def between(self, h):
        return (h + self.position) * self.scale


class Lookup(Net):
    """A bias for each pixel, looked up by a product with constants."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("places", torch.eye(3)[torch.arange(64) % 3])

    def between(self, h):
        return h + torch.einsum("ct,pt->cp", self.table, self.places).view(4, 8, 8)


class SequenceFirst(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def between(self, h):
        return self.inner(h.flatten(2)[:, :, :6].permute(2, 0, 1)).permute(1, 2, 0).unsqueeze(-1)


class ByKeyword(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def between(self, h):
        return self.inner(input=h)


class Constant(Net):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def between(self, h):
        return h + self.inner(torch.ones(3, 4)).mean(0)[:, None, None]


class BatchDependent(Net):
    def between(self, h):
        return h - h.mean(0)


class AlwaysRandom(Net):
    def between(self, h):
        return h + torch.rand_like(h)


class FunctionalDropout(Net):
    def between(self, h):
        return F.dropout(h, training=self.training)


class RandomModule(Net):
    def __init__(self):
        super().__init__()
        self.depth = StochasticDepth()

    def between(self, h):
        return self.depth(h)


class StochasticDepth(nn.Module):
    def forward(self, h):
        return h * torch.rand(len(h), 1, 1, 1) if self.training else h


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (FunctionalLinear, {}, r"inner \(torch's linear uses its weight outside .*unmasked=\['inner'\]"),
        (FunctionalLinear, {"mask": "linear"}, r"unmasked=\['inner'\]"),
        (FunctionalLinear, {"mask": ["inner"]}, "Invalid mask='inner': must name layers called for the features"),
        (TiedOutside, {"mask": ["late"]}, r"cannot be masked: early \(torch's linear"),
        (FunctionalConvolution, {}, r"filters \(torch's conv2d uses"),
        (FunctionalConvolution, {"mask": "convolutions"}, "filters"),
        (Product, {}, r"mixing \(torch's einsum uses"),
        (Attention, {}, r"unmasked=\['attention.in_proj_weight', 'attention.out_proj'\]"),
        (Recurrent, {}, r"recurrent.weight_ih_l0 \(torch's gru uses"),
        (EncoderLayer, {}, r"encoder.self_attn.in_proj_weight \(torch's multi_head_attention_forward uses"),
        (SequenceFirst, {}, r"inner \(its input, \(6, 2, 4\) for two images, does not hold one image"),
        (Constant, {}, r"inner \(its input, \(3, 4\) for two images, does not hold"),
        (ByKeyword, {}, r"inner \(its input, a keyword argument for two images"),
        (BatchDependent, {}, r"Invalid features \(2, 4\) of two images: must be a row for each .* alone"),
        (AlwaysRandom, {}, "in evaluation mode a network must not be random"),
        (Residual, {"mask": ["block"]}, "Invalid mask='block': must name .*, such as first, blocks.0.0, blocks.1.0"),
        (Residual, {"unmasked": ["block"]}, "Invalid unmasked='block': must name .*, such as first, norm"),
        (Residual, {"features": "blocks.0.1", "mask": ["blocks.1"]}, "Invalid mask='blocks.1'"),
        (Residual, {"mask": "linear"}, "Invalid mask='linear': must choose a layer"),
        (Residual, {"unmasked": ["blocks"]}, "Invalid mask='all': must choose a layer"),
        (Residual, {"mask": lambda name: False}, r"Invalid mask=\(\): must be one of all, convolutions"),
    ],
)
def test_what_would_be_random_only_in_name_is_refused(network, options, message):
    with pytest.raises(CalgpError, match=message):
        features(network, **options)


@pytest.mark.parametrize(
    ("network", "options", "sites"),
    [
        (FunctionalLinear, {"mask": "convolutions"}, ["two"]),
        (Attention, {"mask": "convolutions"}, ["two"]),
        (EncoderLayer, {"mask": ["two"]}, ["two"]),
        (FunctionalConvolution, {"mask": ["two"]}, ["two"]),
        (SequenceFirst, {"mask": lambda name: name == "two"}, ["two"]),
        (Scaled, {}, ["two"]),
        (Lookup, {}, ["two"]),
        (RandomModule, {}, ["two"]),
        (FunctionalDropout, {}, ["two"]),
    ],
)
def test_what_should_not_be_masked_may_be_anything(network, options, sites):
    check(features(network, **options), sites)


@pytest.mark.parametrize(
    ("network", "sites"),
    [
        (FunctionalLinear, ["two"]),
        (FunctionalConvolution, ["two"]),
        (Product, ["two"]),
        (Attention, ["two"]),
        (Recurrent, ["two"]),
        (EncoderLayer, ["two", "encoder.linear1", "encoder.linear2"]),
        (SequenceFirst, ["two"]),
        (Constant, ["two"]),
        (ByKeyword, ["two"]),
    ],
)
def test_the_remedy_that_a_refusal_names_works(network, sites):
    with pytest.raises(CalgpError) as refusal:
        features(network)
    check(features(network, unmasked=remedy(refusal)), sites)


def check(wrapped, sites):
    assert list(wrapped.sites) == sites
    one, other = (wrapped.train()(wrapped.stem(images()), noise(1)) for _ in range(2))
    assert one.equal(other)  # what is random by itself is off
    one.sum().backward()
    assert all(p.grad is not None for p in wrapped.parameters())  # what is not masked is learned


@pytest.mark.parametrize(
    ("unmasked", "sites"),
    [
        (["blocks.0"], ["first", "blocks.1.0"]),
        (["blocks.*.0"], ["first"]),
        (["first", "blocks.1.0"], ["blocks.0.0"]),
        (["norm"], ["first", "blocks.0.0", "blocks.1.0"]),
    ],
)
def test_what_is_left_unmasked_is_named_or_held_by_what_is(unmasked, sites):
    wrapped = features(Residual(), mask_first=True, unmasked=unmasked, keep=None)
    assert list(wrapped.sites) == sites
    convolutions = [name for name, module in wrapped.network.named_modules() if isinstance(module, nn.Conv2d)]
    costs = [
        (HALF if name in sites else UNMASKED).kl(layer.weight) + UNMASKED.kl(layer.bias)
        for name in convolutions
        for layer in [wrapped.network.get_submodule(name)]
    ]
    torch.testing.assert_close(wrapped.kl(), sum(costs))


def test_layers_of_an_encoder_that_torch_would_fuse_fire():
    wrapped = features(EncoderLayer, mask=["encoder.linear1", "encoder.linear2"]).eval()
    with torch.no_grad():
        c = wrapped(wrapped.stem(images()), noise())
    assert not c[:5].equal(c[5:])


def test_a_layer_that_is_called_for_some_images_only_is_found_when_it_happens():
    class Depends(Net):
        def between(self, h):
            return h if h.abs().sum() > 1e9 else self.two(h)

    wrapped = features(Depends).eval()
    assert wrapped.sites == {"two": 2}
    wrapped(wrapped.stem(images()), noise())
    with pytest.raises(CalgpError, match="not called as often as when the network was wrapped: two"):
        wrapped(wrapped.stem(1e10 * images()), noise())


def test_a_pass_that_is_computed_again_without_its_masks_is_refused():
    class Checkpointed(Net):
        def between(self, h):
            return checkpoint(self.two, h, use_reentrant=False)

    wrapped = features(Checkpointed)
    with pytest.raises(CalgpError, match="outside of a pass"):
        wrapped(wrapped.stem(images()), noise(1)).sum().backward()
    with pytest.raises(CalgpError, match="outside of a pass"):
        wrapped.network(images())
