"""Methods, one file a family; this is the only place where they are listed."""

from calgp.methods.base import Method
from calgp.methods.cgp import Cgp
from calgp.methods.cnn import Cnn
from calgp.methods.cnn_gp import CnnGp
from calgp.methods.gpdnn import Gpdnn

METHODS: dict[str, Method] = {
    "cnn-gp-rf": CnnGp(frequencies="variational"),
    "cnn-gp-sorf": CnnGp(frequencies="sorf"),
    "cnn-dgp": CnnGp(frequencies="sorf", depth=2, width=64),
    "cnn-gp-rf-paper": CnnGp(frequencies="variational", lengthscale=1.0),
    "cnn-gp-sorf-paper": CnnGp(frequencies="sorf", lengthscale=1.0),
    "cnn": Cnn(),
    "gpdnn": Gpdnn(),
    "gpdnn-mcd": Gpdnn(keep_filters=0.5),
    "cgp": Cgp(),
}

__all__ = ["METHODS", "Cgp", "Cnn", "CnnGp", "Gpdnn", "Method"]
