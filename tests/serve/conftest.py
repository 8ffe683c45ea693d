"""The real application on the run that ships with the package."""

import io

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from calgp.data import load
from calgp.runs import shipped_run
from calgp.serve import create_app

RAW = {"content-type": "image/png"}


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="session")
def digits() -> np.ndarray:
    """Test digits as uint8 [N, 28, 28]."""
    return load("digits", "test").x[:24, 0].numpy()


@pytest.fixture(scope="session")
def client():
    """A server of the shipped run with its defaults."""
    with TestClient(create_app(shipped_run()), base_url="http://localhost") as client:
        yield client
