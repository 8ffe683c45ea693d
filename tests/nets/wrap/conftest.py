import pytest
import torch

from calgp.nets.wrap import NETWORKS


@pytest.fixture(autouse=True)
def _fresh_registry():
    before = dict(NETWORKS)
    NETWORKS.clear()
    torch.manual_seed(0)
    yield
    NETWORKS.clear()
    NETWORKS.update(before)
