"""Three overlapping classes, and a network that is over-confident of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 3


def blobs(n, seed, *, noise=1.0):
    """Three Gaussians in ten dimensions that overlap."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    return 1.2 * F.one_hot(y, 10).float() + noise * torch.randn(n, 10, generator=g), y


@pytest.fixture(scope="module")
def network():
    """Trained on 300 points until it is certain of all of them: over-confident."""
    torch.manual_seed(0)
    x, y = blobs(300, 0)
    found = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimiser = torch.optim.Adam(found.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        F.cross_entropy(found(x), y).backward()
        optimiser.step()
    return found.eval()
