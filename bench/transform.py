"""How fast is the structured transform? SORF, forward and backward to its input, against what else gives d × N_RF."""

import torch
from hadamard_transform import hadamard_transform as pypi_hadamard

from bench.measure import Row, compare
from calgp.gp.frequencies import Sorf

QUESTION = "SORF transform, forward + backward"


def run(quick: bool) -> list[Row]:
    rows = []
    for d in (64, 4096, 65_536) if quick else (64, 512, 4096, 16_384, 65_536):
        for batch in (100, 1000) if quick else (1, 100, 1000):
            if d * batch <= 2**25:
                rows += _compare(d, batch)
    return rows


def _compare(d: int, batch: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, d, generator=generator).requires_grad_()
    outside = torch.randn(batch, d, generator=generator)
    sorf, lengthscale = Sorf(d, d, generator=generator), torch.ones(1)
    d1, d2, d3 = sorf.signs[:, 0].float()

    def both(product):
        return lambda: torch.autograd.grad(product(x), x, outside)

    def by_pypi(x):  # its transforms are orthonormal: √d' · H D₁ H D₂ H D₃
        return d**0.5 * pypi_hadamard(pypi_hadamard(pypi_hadamard(x * d3) * d2) * d1)

    torch.testing.assert_close(by_pypi(x), sorf(x, lengthscale), rtol=1e-3, atol=1e-3 * d**0.5)
    others = {"hadamard-transform (PyPI)": both(by_pypi), "one copy of the data": both(torch.clone)}
    note = ""
    if d <= 16_384:
        omega = torch.randn(d, d, generator=generator)
        others["dense product, Ω fixed"] = both(lambda x: x @ omega)
    else:
        note = f"dense not run: Ω would take {4 * d * d / 2**30:.0f} GB"
    reach = {"dense product, Ω fixed": 5.0, "hadamard-transform (PyPI)": 10.0} if (d, batch) == (4096, 1000) else {}
    what = f"d = N_RF = {d:,}, batch {batch:,}"
    return compare(QUESTION, what, ("calgp", both(lambda x: sorf(x, lengthscale))), others, reach=reach, note=note)
