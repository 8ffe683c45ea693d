"""How fast is the structured transform? SORF, forward and backward to its input, against what else gives d × N_RF.

On one thread: fht-cpu's threads and torch's are two pools, which would be measured instead.
"""

from collections.abc import Callable

import torch
from fht_cpu import fht
from hadamard_transform import hadamard_transform as pypi_hadamard
from torch import Tensor

from bench.measure import Contender, Row, compare
from calgp.gp.frequencies import Fixed, Sorf, gaussian

QUESTION = "SORF, forward + backward, one thread"
DENSE, PRODUCT = "dense Ω (gaussian frequencies)", "x @ Ω alone, no ℓ"
FHT, IN_PLACE = "fht-cpu, three transforms each way", "the same in place: no input is kept"
PYPI, COPY = "hadamard-transform (PyPI)", "one copy of the data"
LARGEST = 2**34  # multiplications each way with a dense Ω that are waited for
LARGEST_OMEGA = 2**28  # its numbers: 1 GB, twice


def run(quick: bool) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for d in (64, 768, 4096) if quick else (16, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 4096, 16_384, 65_536):
        for batch in (100, 1000) if quick else (1, 100, 1000):
            if d * batch <= 2**25:
                rows += _compare(d, batch)
    torch.set_num_threads(threads)
    return rows


def _compare(d: int, batch: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, d, generator=generator).requires_grad_()
    outside = torch.randn(batch, d, generator=generator)
    sorf, lengthscale = Sorf(d, d, generator=generator), torch.ones(1)
    padded = sorf.signs.shape[-1]

    def both(product: Callable[[Tensor], Tensor]) -> Contender:
        return lambda: torch.autograd.grad(product(x), x, outside)

    others, reach, note = {}, {}, ""
    if d * d * batch <= LARGEST and d * d <= LARGEST_OMEGA:
        dense, omega = Fixed(gaussian(d, d, generator=generator)), gaussian(d, d, generator=generator)
        others = {DENSE: both(lambda x: dense(x, lengthscale)), PRODUCT: both(lambda x: x @ omega)}
        reach = {DENSE: 0.9}
    else:
        note = f"dense not run: Ω would take {4 * d * d / 2**30:.0f} GB"
    if padded & (padded - 1) == 0:
        others |= {FHT: _by_fht(x, outside), PYPI: both(_by_pypi(sorf, d))}
        torch.testing.assert_close(_by_pypi(sorf, d)(x), sorf(x, lengthscale), rtol=1e-3, atol=1e-3 * d**0.5)
    if (d, batch) == (4096, 1000):
        work = torch.zeros(batch, d).numpy()
        others[IN_PLACE] = lambda: [fht(work, num_threads=1) for _ in range(6)]
        reach = {DENSE: 5.0, FHT: 1 / 1.5, PYPI: 10.0}
    others[COPY] = both(torch.clone)
    what = f"d = N_RF = {d:,}, batch {batch:,}"
    return compare(QUESTION, what, ("calgp", both(lambda x: sorf(x, lengthscale))), others, reach=reach, note=note)


def _by_fht(x: Tensor, outside: Tensor) -> Contender:
    """The transforms alone, without signs; the first of each way makes the output, since an input is not to be lost."""
    arrays = x.detach().numpy(), outside.numpy()

    def transforms() -> None:
        for array in arrays:
            out = fht(array, inplace=False, num_threads=1)
            fht(out, num_threads=1)
            fht(out, num_threads=1)

    return transforms


def _by_pypi(sorf: Sorf, d: int) -> Callable[[Tensor], Tensor]:
    """Its transforms are orthonormal: √d' · H D₁ H D₂ H D₃."""
    d1, d2, d3 = sorf.signs[:, 0].float()
    return lambda x: d**0.5 * pypi_hadamard(pypi_hadamard(pypi_hadamard(x * d3) * d2) * d1)
