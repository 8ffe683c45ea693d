"""How fast are masks drawn? Keyed, many bits at a time, against torch.bernoulli."""

import torch

from bench.measure import Row, compare
from calgp.gp import Noise
from calgp.gp.noise import bernoulli, binary_digits

QUESTION = "Drawing masks"


def run(quick: bool) -> list[Row]:
    rows, size, samples = 100, 32 * 16 * 16, 5  # LeNet's second convolution
    noise = Noise(0, torch.arange(samples), torch.arange(rows))
    like = torch.zeros(())
    found = []
    for keep, reach in ((0.5, 10.0), (0.75, 4.0), (0.9, 4.0), (1 / 3, 4.0)):
        digits, probability = binary_digits(keep), torch.full((samples, rows, size), keep)
        ours = lambda digits=digits: bernoulli(noise, 7, size, digits=digits, rows=rows, shared=False, like=like)  # noqa: E731
        others = {
            "torch.bernoulli": lambda probability=probability: torch.bernoulli(probability),
            "torch.rand < keep": lambda keep=keep: (torch.rand(samples, rows, size) < keep).float(),
        }
        what = f"keep {keep:.2g}, {samples * rows * size / 1e6:.1f} million numbers"
        found += compare(QUESTION, what, ("calgp, keyed", ours), others, reach={"torch.bernoulli": reach})
    return found
