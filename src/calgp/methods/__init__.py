"""Methods, one file a family; this is the only place where they are listed."""

from calgp.methods.base import Method
from calgp.methods.cgp import Cgp
from calgp.methods.cnn import Cnn, CnnMcd
from calgp.methods.cnn_gp import CnnGp, MeanFieldGp
from calgp.methods.gpdnn import Gpdnn
from calgp.methods.laplace import CnnLaplace
from calgp.methods.svdkl import Svdkl

METHODS: dict[str, Method] = {
    "cnn-gp-rf": CnnGp(frequencies="variational", keep_filters=0.9),
    "cnn-gp-sorf": CnnGp(frequencies="sorf", keep_filters=0.9),
    "cnn-dgp": CnnGp(frequencies="sorf", depth=2, width=64, keep_filters=0.9),
    "cnn-gp-rf-paper": CnnGp(frequencies="variational", lengthscale=1.0, scale=None, integrate=False),
    "cnn-gp-sorf-paper": CnnGp(frequencies="sorf", lengthscale=1.0, scale=None, integrate=False),
    "cnn-gp-mf": MeanFieldGp(),
    "cnn-laplace": CnnLaplace(),
    "svdkl": Svdkl(),
    "cnn": Cnn(),
    "cnn-cal": Cnn(calibrator="temperature"),
    "cnn-mcd": CnnMcd(),
    "gpdnn": Gpdnn(),
    "gpdnn-mcd": Gpdnn(keep_filters=0.5),
    "cgp": Cgp(),
}

__all__ = [
    "METHODS", "Cgp", "Cnn", "CnnGp", "CnnLaplace", "CnnMcd", "Gpdnn", "MeanFieldGp", "Method", "Svdkl",
]  # fmt: skip
