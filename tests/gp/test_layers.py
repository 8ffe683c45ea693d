import copy
import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import reference
from calgp.gp import (
    FREQUENCIES,
    KERNELS,
    UNMASKED,
    DeepGP,
    Masking,
    Noise,
    RandomFeatureGP,
    Theta,
    make_kernel,
    name_sites,
)

FIXED = ["sorf", "gaussian", "orthogonal"]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


def gp(d=5, outputs=3, *, seed=0, **options):
    return RandomFeatureGP(d, outputs, generator=seeded(seed), **options)


def deep(d=6, width=4, outputs=3, *, depth=3, seed=0, **options):
    widths = [d] + [width + d] * (depth - 1)
    outs = [width] * (depth - 1) + [outputs]
    generator = seeded(seed)
    return DeepGP([RandomFeatureGP(i, o, generator=generator, **options) for i, o in zip(widths, outs, strict=True)])


# F = ΦW


@pytest.mark.parametrize("frequencies", FREQUENCIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_functions_are_features_times_weights(kernel, frequencies):
    layer = gp(kernel=kernel, frequencies=frequencies, n_rf=11, masking=UNMASKED).double()
    c = randn(4, 5)
    phi = layer.phi(c)
    assert phi.shape == (4, 22 if kernel == "rbf" else 11)
    torch.testing.assert_close(layer(c), phi @ layer.weights.weight)


@pytest.mark.slow
def test_prior_functions_have_the_kernels_covariance():
    """W ~ N(0, 1) makes cov(f) = ΦΦᵀ, near K with 4000 frequencies; over 4000 functions, within 5 standard errors."""
    layer = gp(3, 4000, n_rf=4000, frequencies="orthogonal", masking=UNMASKED).double()
    c = randn(4, 3)
    with torch.no_grad():
        layer.weights.weight.copy_(randn(4000, 4000, seed=1))
        f, k = layer(c), layer.kernel.covariance(c, c)
        phi = layer.phi(c)
    found = f @ f.mT / 4000
    scale = k.diagonal().sqrt()
    assert ((found - phi @ phi.mT) / (scale[:, None] * scale)).abs().max() < 5 * math.sqrt(2 / 4000)
    assert ((found - k) / (scale[:, None] * scale)).abs().max() < 5 * math.sqrt(2 / 4000) + 5 * math.sqrt(5 / 4000)


def test_masks_switch_features_not_classes(every_mask):
    """Every z over the m features gives ΦW with rows of W switched off."""
    layer = gp(3, 2, n_rf=4, frequencies="gaussian", masking=Masking(0.3)).double()
    c = randn(2, 3)
    f = layer(c).detach().unflatten(0, (16, 2)).numpy()
    phi, m = layer.phi(c).detach().numpy(), layer.weights.weight.detach().numpy()
    for z, sample in zip(reference.all_masks(4, 0.3)[0], f, strict=True):
        np.testing.assert_allclose(sample, phi @ (np.diag(z) @ m), atol=1e-14)


@pytest.mark.parametrize("masking", [UNMASKED, Masking(0.4), Masking(0.4, "shared", inverted=True)])
@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize("frequencies", FIXED)
@pytest.mark.parametrize("kernel", ["arc-cosine-1", "rbf"])
def test_own_theta_for_each_output_equals_separate_processes(kernel, frequencies, ard, masking):
    """Q functions with their own σ and ℓ are Q processes of one output each, with the same Ω, W and masks."""
    together = gp(kernel=kernel, frequencies=frequencies, theta=Theta(ard=ard, outputs=3), masking=masking).double()
    with torch.no_grad():
        together.kernel.log_sigma.copy_(randn(3, 1, seed=1) / 2)
        together.kernel.log_lengthscale.copy_(randn(3, 5 if ard else 1, seed=2) / 2)
    name_sites(together)
    c, noise = randn(4, 5, seed=3), Noise(0, torch.arange(2), torch.arange(4))
    f = together(c, noise)
    for q in range(3):
        alone = gp(5, 1, kernel=kernel, frequencies=frequencies, theta=Theta(ard=ard), masking=masking).double()
        alone.frequencies.load_state_dict(together.frequencies.state_dict())
        with torch.no_grad():
            alone.kernel.log_sigma.copy_(together.kernel.log_sigma[q])
            alone.kernel.log_lengthscale.copy_(together.kernel.log_lengthscale[q])
            alone.weights.weight.copy_(together.weights.weight[:, q : q + 1])
        name_sites(alone)
        torch.testing.assert_close(f[:, q : q + 1], alone(c, noise), rtol=1e-12, atol=1e-12)


def test_deep_layers_take_the_functions_before_them_and_the_features():
    process = deep(masking=UNMASKED).double()
    c = randn(5, 6)
    first, second, third = process.layers
    f1 = first(c)
    f2 = second(torch.cat([f1, c], 1))
    torch.testing.assert_close(process(c), third(torch.cat([f2, c], 1)))


@pytest.mark.parametrize("frequencies", ["variational", "sorf"])
@pytest.mark.parametrize("granularity", ["element", "shared"])
def test_samples_of_a_deep_process_are_what_each_would_be_alone(frequencies, granularity):
    process = deep(frequencies=frequencies, masking=Masking(0.5, granularity)).double()
    name_sites(process)
    c = randn(5, 6)
    together = process(c, Noise(3, torch.arange(4), torch.arange(5))).unflatten(0, (4, 5))
    for s in range(4):
        alone = process(c[[2, 0]], Noise(3, torch.tensor([s]), torch.tensor([2, 0])))
        torch.testing.assert_close(together[s][[2, 0]], alone, rtol=1e-12, atol=1e-12)


def test_sites_of_a_deep_process():
    assert list(name_sites(deep(depth=2, frequencies="variational"))) == [
        "layers.0.frequencies.mask",
        "layers.0.weights.mask",
        "layers.1.frequencies.mask",
        "layers.1.weights.mask",
    ]
    assert list(name_sites(deep(depth=2, frequencies="sorf"))) == ["layers.0.weights.mask", "layers.1.weights.mask"]


def test_omega_can_have_its_own_keep():
    layer = gp(frequencies="variational", masking=Masking(0.5), masking_omega=Masking(0.9))
    assert layer.frequencies.mask.masking.keep == 0.9
    assert layer.weights.mask.masking.keep == 0.5


# KL


@pytest.mark.parametrize("keep", [0.5, 0.3])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("ard", [False, True])
def test_kl_of_a_layer_with_variational_frequencies_by_enumerating_all_masks(keep, inverted, ard):
    """Changes of E_q[−log p(W) − log p(ε)] with M_W and M_ε are changes of `kl`, whatever ℓ."""
    differences = []
    for seed in range(3):
        masking = Masking(keep, inverted=inverted)
        layer = gp(3, 2, n_rf=4, frequencies="variational", theta=Theta(ard=ard), masking=masking, seed=seed).double()
        with torch.no_grad():
            layer.kernel.log_lengthscale.copy_(randn(3 if ard else 1, seed=seed) / 3)
        w, epsilon = layer.weights.weight.detach().numpy(), layer.frequencies.epsilon.detach().numpy()
        enumerated = reference.expected_minus_log_prior(w, keep, inverted)
        enumerated += reference.expected_minus_log_prior(epsilon, keep, inverted)
        differences.append(layer.kl().item() - enumerated)
    np.testing.assert_allclose(differences, differences[0], atol=1e-10)


@pytest.mark.parametrize("frequencies", ["variational", "sorf"])
def test_kl_of_a_deep_process_is_the_sum_over_its_layers(frequencies):
    process = deep(frequencies=frequencies)
    total = sum(layer.kl().item() for layer in process.layers)
    assert process.kl().item() == pytest.approx(total, rel=1e-6)
    assert total != 0


def test_every_parameter_is_counted_once():
    """∂KL/∂M = π M for W and ε: twice that if it were counted twice."""
    process = deep(frequencies="variational", masking=Masking(0.3), masking_omega=Masking(0.8)).double()
    process.kl().backward()
    for layer in process.layers:
        torch.testing.assert_close(layer.weights.weight.grad, 0.3 * layer.weights.weight.detach())
        torch.testing.assert_close(layer.frequencies.epsilon.grad, 0.8 * layer.frequencies.epsilon.detach())


def test_a_layer_used_twice_is_counted_once():
    first, tied = gp(3, 2), gp(5, 2)
    process = DeepGP([first, tied, tied])
    assert process(torch.ones(4, 3)).shape == (4, 2)
    assert process.kl().item() == pytest.approx(first.kl().item() + tied.kl().item(), rel=1e-6)


def test_own_theta_for_each_output_counts_the_weights_once():
    layer = gp(theta=Theta(outputs=3), masking=Masking(0.3)).double()
    assert layer.kl().item() == pytest.approx(0.15 * layer.weights.weight.square().sum().item())


# A plain module in anybody's code


def blobs(n=60, d=8, classes=3):
    y = torch.arange(n) % classes
    centres = 2 * randn(classes, d, dtype=torch.float32)
    return centres[y] + 0.3 * randn(n, d, seed=1, dtype=torch.float32), y


def heads():
    return {
        **{name: lambda name=name: RandomFeatureGP(16, 3, frequencies=name) for name in FREQUENCIES},
        "rbf": lambda: RandomFeatureGP(16, 3, kernel="rbf", theta=Theta(ard=True, learn=True)),
        "per-output": lambda: RandomFeatureGP(16, 3, theta=Theta(outputs=3, learn=True)),
        "deep": lambda: DeepGP([RandomFeatureGP(16, 4), RandomFeatureGP(20, 3)]),
    }


def network(head, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 16), heads()[head]())


@pytest.mark.parametrize("head", heads())
def test_five_lines_of_plain_torch_train_it(head):
    net, (x, y) = network(head), blobs()
    x = x.unflatten(1, (2, 2, 2))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for _ in range(80):
        loss = F.cross_entropy(net(x), y) + net[-1].kl() / len(y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:5])
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in net.named_parameters() if p.requires_grad}  # θ included where it is learned


@pytest.mark.parametrize("head", heads())
def test_state_dict_carries_everything(head):
    """Into a network that was drawn from another seed: the same outputs for the same masks."""
    one, other, (x, _) = network(head), network(head, seed=1), blobs()
    other.load_state_dict(one.state_dict())
    assert torch.equal(drawn(one, x), drawn(other, x))


@pytest.mark.parametrize("head", heads())
def test_copies_are_equal_and_independent(head):
    net, (x, _) = network(head), blobs()
    twin = copy.deepcopy(net)
    expected = drawn(net, x)
    assert torch.equal(expected, drawn(twin, x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(expected, drawn(net, x))


@pytest.mark.parametrize("head", heads())
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_floating_types(head, dtype):
    net, (x, _) = network(head), blobs()
    expected = drawn(net, x)
    other = drawn(net.to(dtype), x.to(dtype))
    assert other.dtype == dtype
    assert other.isfinite().all()
    tolerance = 1e-4 if dtype == torch.float64 else 0.15  # bfloat16 has 8 bits: 0.4 % an operation, sums of 16
    torch.testing.assert_close(other.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head", heads())
def test_autocast_to_bfloat16_agrees_with_float32(head):
    net, (x, y) = network(head), blobs()
    expected = drawn(net, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = drawn(net, x)
        loss = F.cross_entropy(found, y)
    loss.backward()
    torch.testing.assert_close(found.float(), expected, rtol=0.15, atol=0.15)  # 8 bits, as above
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_every_call_draws_new_masks_in_evaluation_too():
    net, (x, _) = network("sorf").eval(), blobs()
    assert not torch.equal(net(x), net(x))


def test_any_leading_axes():
    layer = gp(8, 3, masking=UNMASKED)
    c = randn(2, 5, 8, dtype=torch.float32)
    torch.testing.assert_close(layer(c), layer(c.flatten(0, 1)).unflatten(0, (2, 5)))


def drawn(net, x, seed=7):
    torch.manual_seed(seed)
    return net(x)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["sorf", "variational", "rbf", "deep"])
def test_compiles_without_changing_results(head, unchecked):
    check_compiled(head, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor imports deprecated parts of torch
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiles_with_inductor(unchecked):
    check_compiled("sorf", "inductor")


@pytest.mark.slow
def test_layers_of_different_keep_compile_side_by_side(unchecked):
    """torch.compile takes a number that it has seen to change for a variable."""
    torch.compiler.reset()
    c = torch.ones(40, 50)
    for keep in (0.5, 0.3, 0.9):
        layer = gp(50, 40, frequencies="gaussian", masking=Masking(keep))
        with torch.no_grad():
            kept = torch.compile(layer.weights.mask, backend="aot_eager")(c).mean().item()
        assert kept == pytest.approx(keep, abs=5 * math.sqrt(keep * (1 - keep) / 2000))


def check_compiled(head, backend):
    """With all features kept, since inductor's random numbers differ from torch's; then with masks, for their mean."""
    torch.compiler.reset()
    net, (x, _) = network(head), blobs()
    for module in net.modules():
        if hasattr(module, "masking"):
            module.masking = UNMASKED
    compiled = torch.compile(net, backend=backend)
    expected = net(x)
    found = compiled(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(f.square().sum(), net[1].weight)[0] for f in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)

    masked = network(head)
    compiled = torch.compile(masked, backend=backend)
    with torch.no_grad():
        outputs = torch.stack([compiled(x) for _ in range(200)])
        plain = torch.stack([masked(x) for _ in range(200)])
    error = (outputs.var(0) / 200 + plain.var(0) / 200).sqrt()
    assert ((outputs.mean(0) - plain.mean(0)).abs() < 6 * error).all()  # 180 numbers
    assert (outputs.std(0) > 0).all()


# What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_rf": 0}, "positive"),
        ({"frequencies": "fourier"}, "frequencies"),
        ({"kernel": "matern"}, "kernel"),
        ({"theta": Theta(outputs=2)}, "per output"),
        ({"theta": Theta(outputs=3), "frequencies": "variational"}, "per output"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gp(5, 3, **options)


def test_layers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="9 in all"):
        DeepGP([gp(5, 4), gp(4, 3)])


def test_kernels_by_name():
    assert [type(make_kernel(name, 3, Theta())).__name__ for name in KERNELS] == ["ArcCosine"] * 3 + ["RBF"]
    assert [make_kernel(name, 3, Theta()).order for name in KERNELS[:3]] == [0, 1, 2]
