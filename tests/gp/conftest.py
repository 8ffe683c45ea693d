import pytest
import torch
from jaxtyping import config

import reference
from calgp.gp import masks


@pytest.fixture
def every_mask(monkeypatch):
    """Masked layers draw, instead of S samples of z, every z there is: sample s is row s of `reference.all_masks`."""

    def all_of_them(noise, site, size, *, digits, rows, shared, like):
        return torch.as_tensor(reference.all_masks(size, 0.5)[0], dtype=like.dtype).unsqueeze(1)

    monkeypatch.setattr(masks, "bernoulli", all_of_them)


@pytest.fixture
def unchecked(monkeypatch):
    """Without the run-time checks of shapes that pyproject.toml turns on for calgp.gp: as users run it."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)
