"""Vectors in: a Gaussian process classifier for embeddings or any matrix of numbers, and the files of both."""

from pathlib import Path
from typing import TYPE_CHECKING

from calgp.embeddings.classifier import GPClassifier
from calgp.embeddings.hyperparameters import Choice
from calgp.embeddings.inputs import Inputs

if TYPE_CHECKING:
    from calgp.embeddings.cache import Embeddings

__all__ = ["Choice", "GPClassifier", "Inputs", "load_embeddings"]


def load_embeddings(path: Path | str) -> "Embeddings":
    """X, y and classes of embeddings in files: a folder that `calgp embed` has made, .npz, .npy or .safetensors."""
    from calgp.embeddings.cache import load_embeddings  # all of calgp.runs, which nothing else here needs

    return load_embeddings(path)
