"""Image classifiers that know when they don't know: calibrated deep convolutional Gaussian processes.

The shelf: names are fetched from their rooms when first used, so that `calgp --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from calgp._version import __version__ as __version__

if TYPE_CHECKING:
    from calgp.data import Images, from_dataset, load
    from calgp.errors import CalgpError
    from calgp.estimator import ConvGPClassifier
    from calgp.gp import Bound, DeepGP, Masking, Mixture, Model, Noise, Predictive, RandomFeatureGP, Theta, predict
    from calgp.methods import METHODS
    from calgp.nets import BACKBONES, Headed, Task, wrap
    from calgp.report import write_report
    from calgp.runs import (
        Run,
        RunFolder,
        TrainingData,
        calibrate,
        compare,
        decide,
        ensemble,
        evaluate,
        export,
        shipped_run,
        train,
        verify,
    )

_ROOMS = {
    "calgp.data": ("Images", "from_dataset", "load"),
    "calgp.errors": ("CalgpError",),
    "calgp.estimator": ("ConvGPClassifier",),
    "calgp.gp": (
        "Bound", "DeepGP", "Masking", "Mixture", "Model", "Noise", "Predictive", "RandomFeatureGP", "Theta", "predict",
    ),
    "calgp.methods": ("METHODS",),
    "calgp.nets": ("BACKBONES", "Headed", "Task", "wrap"),
    "calgp.report": ("write_report",),
    "calgp.runs": (
        "Run", "RunFolder", "TrainingData", "calibrate", "compare", "decide", "ensemble", "evaluate", "export",
        "shipped_run", "train", "verify",
    ),
}  # fmt: skip

__all__ = [
    "BACKBONES", "METHODS", "Bound", "CalgpError", "ConvGPClassifier", "DeepGP", "Headed", "Images", "Masking",
    "Mixture", "Model", "Noise", "Predictive", "RandomFeatureGP", "Run", "RunFolder", "Task", "Theta", "TrainingData",
    "calibrate", "compare", "decide", "ensemble", "evaluate", "export", "from_dataset", "load", "predict",
    "shipped_run", "train", "verify", "wrap",
    "write_report",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(room), name)
    raise AttributeError(f"module 'calgp' has no attribute {name!r}")
