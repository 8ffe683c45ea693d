"""Batch norm and padding as parts of convolutions: the same numbers and gradients in fewer steps."""

import pytest
import torch
from torch import nn

from calgp.nets.fusion import NORMED, normed_convolution
from calgp.nets.program import Program, describe_module


class Net(nn.Module):
    """Convolutions as networks have them; `between`: what else happens to the output of the first."""

    def __init__(self, *, bias: bool, affine: bool, pad: tuple[int, int, int, int], between: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, bias=bias, padding=(1, 0))
        self.norm = nn.BatchNorm2d(4, affine=affine, eps=1e-3)
        self.second = nn.Conv2d(4, 4, 3, groups=4, bias=False)
        self.pad, self.between = pad, between
        for value in (*self.norm.parameters(), self.norm.running_mean, self.norm.running_var):
            nn.init.uniform_(value, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        h = self.first(nn.functional.pad(x, self.pad))
        return (self.second(self.norm(h) + h if self.between else self.norm(h)),)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, 2),
        ({"bias": True}, 2),
        ({"pad": (2, 2, 1, 1)}, 2),
        ({"pad": (0, 1, 0, 1)}, 3),  # only one side is padded, as TensorFlow does
        ({"affine": False}, 4),  # batch norm, and the first of its results
        ({"between": True}, 5),
    ],
)
def test_numbers_and_gradients_are_those_of_the_network_in_fewer_steps(options, left):
    torch.manual_seed(0)
    net = Net(**({"bias": False, "affine": True, "pad": (0, 0, 0, 0), "between": False} | options)).double().eval()
    x = torch.rand(3, 3, 8, 9, dtype=torch.double)
    described, tensors = describe_module(net, x, 1, "")
    program = Program(described, tensors, outputs=1, trained=described["parameters"])
    run = [step.operation for step, _ in program._run if not step.operation.startswith("aten.sym_size")]
    assert len(run) == left and (NORMED in run) == (left < 4)
    (found,), (expected,) = program(x), net(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.square().sum().backward()
    expected.square().sum().backward()
    own = [getattr(program, program.names[name]) for name in described["parameters"]]
    for here, there in zip(own, net.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-10, atol=1e-10)


def test_a_program_cannot_ask_for_it_by_name():
    steps = [["y", NORMED, [{"node": "x"}], {}]]
    with pytest.raises(ValueError, match="no operation of torch"):
        Program({"steps": steps, "outputs": ["y"]}, {}, outputs=1)


def test_a_norm_may_be_more_precise_than_its_convolution():
    """As in autocast: images and filters in bfloat16, statistics in float32."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 5, 5, generator=g), torch.randn(4, 3, 3, 3, generator=g)
    norm = torch.ones(4), torch.zeros(4), torch.randn(4, generator=g), torch.ones(4), 1e-5
    rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    half = normed_convolution(x.bfloat16(), weight.bfloat16(), None, *rest, norm=norm)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), normed_convolution(x, weight, None, *rest, norm=norm), rtol=0.02, atol=0.1)
