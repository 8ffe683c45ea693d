"""Image classifiers that know when they don't know: calibrated deep convolutional Gaussian processes.

The shelf: names are fetched from their rooms when first used, so that `calgp --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from calgp._version import __version__ as __version__

if TYPE_CHECKING:
    from calgp.embeddings import GPClassifier
    from calgp.errors import CalgpError
    from calgp.gp import Bound, DeepGP, Predictive, RandomFeatureGP, predict
    from calgp.methods import METHODS
    from calgp.methods.own_loop import gp_classifier
    from calgp.nets.wrap import wrap
    from calgp.runs import Classifier, Run, load
    from calgp.sklearn import ConvGPClassifier
    from calgp.training import train
    from calgp.upgraded import upgrade

_ROOMS = {
    "calgp.errors": ("CalgpError",),
    "calgp.sklearn": ("ConvGPClassifier",),
    "calgp.gp": ("Bound", "DeepGP", "Predictive", "RandomFeatureGP", "predict"),
    "calgp.embeddings": ("GPClassifier",),
    "calgp.methods": ("METHODS",),
    "calgp.methods.own_loop": ("gp_classifier",),
    "calgp.nets.wrap": ("wrap",),
    "calgp.runs": ("Classifier", "Run", "load"),
    "calgp.training": ("train",),
    "calgp.upgraded": ("upgrade",),
}

__all__ = [
    "METHODS", "Bound", "CalgpError", "Classifier", "ConvGPClassifier", "DeepGP", "GPClassifier", "Predictive",
    "RandomFeatureGP", "Run", "gp_classifier", "load", "predict", "train", "upgrade", "wrap",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(room), name)
    raise AttributeError(f"module 'calgp' has no attribute {name!r}")
