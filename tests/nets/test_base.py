import dataclasses
import os
import signal

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric

from calgp.errors import CalgpError
from calgp.gp import UNMASKED, Convolution, Masking, MeanField, Noise, name_sites
from calgp.methods import METHODS
from calgp.nets import Compact, LeNet, ResNet, Task
from calgp.runs import Interrupted, Run, RunFolder
from calgp.training import train_run

NETS = {
    "lenet": LeNet(channels=(4, 6), hidden=(8,)),
    "resnet": ResNet(n=1, widths=(4, 6, 9), pad_to=8),
    "compact": Compact(widths=(4, 6)),
}
TASK = Task(3, 12, 12, 4)
every_net = pytest.mark.parametrize("name", NETS)


def build(name, posterior=UNMASKED, **options):
    spec = dataclasses.replace(NETS[name], **options)
    return spec.build(TASK, posterior, generator=torch.Generator().manual_seed(0))


def images(n=2):
    return torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def convolutions(net):
    return [module for module in net.modules() if isinstance(module, Convolution)]


@every_net
@pytest.mark.parametrize("posterior", [UNMASKED, Masking(), MeanField()], ids=["points", "masks", "mean-field"])
def test_a_spectral_bound_holds_for_every_convolution_and_changes_nothing_else(name, posterior):
    free, bounded = build(name, posterior).double(), build(name, posterior, spectral=0.5).double()
    assert list(name_sites(free)) == list(name_sites(bounded))
    assert len(convolutions(free)) == len(convolutions(bounded)) > 1
    for before, after in zip(convolutions(free), convolutions(bounded), strict=True):
        weight = before.weight.detach().flatten(1).numpy()
        factor = min(1, 0.5 / np.linalg.norm(weight, 2))
        np.testing.assert_allclose(after.weight.detach().flatten(1), factor * weight, rtol=1e-10)
        with torch.no_grad():
            before.weight.mul_(factor)
    noise, x = Noise(0, torch.arange(2), torch.arange(2)), images().double()
    torch.testing.assert_close(bounded(bounded.stem(x), noise), free(free.stem(x), noise))
    torch.testing.assert_close(bounded.kl(), free.kl())


@every_net
def test_bounded_networks_do_not_mind_the_memory_layout_and_learn(name):
    net, x = build(name, spectral=0.5).eval(), images()
    expected = net(net.stem(x))
    net = net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(net.stem(x)), expected, rtol=1e-4, atol=1e-4)  # float32, other sums
    net(net.stem(x)).square().sum().backward()
    assert all(c.parametrizations.weight.original.grad.any() for c in convolutions(net))


@pytest.mark.parametrize("spectral", [0.0, -1.0, float("inf"), float("nan")])
@every_net
def test_what_cannot_bound_a_norm_is_refused(name, spectral):
    with pytest.raises(CalgpError, match=f"spectral={spectral}"):
        build(name, spectral=spectral)


@pytest.mark.parametrize("method", ["cnn-laplace", "cnn-gp-sorf"])
def test_a_run_with_bounded_filters_resumes_to_the_same_bits(tmp_path, method):
    fabric, backbone = Fabric(accelerator="cpu", devices=1), LeNet(channels=(3, 4), hidden=(8,), spectral=0.8)
    options = {"n_rf": 32}
    run = Run(
        dataclasses.replace(METHODS[method], **options), backbone, train_size=100, batch_size=30, steps=6, holdout=0.2
    )
    whole, folder = train_run(run, RunFolder(tmp_path / "whole"), fabric).model, RunFolder(tmp_path / "parts")

    def interrupt(step):
        if step.step == 4:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C

    with pytest.raises(Interrupted):
        train_run(run, folder, fabric, watch=interrupt)
    resumed = train_run(run, folder, fabric, resume=True).model.state_dict()
    assert all(value.equal(resumed[key]) for key, value in whole.state_dict().items())
