"""The paper's mathematics: plain modules and functions that need torch alone."""

from calgp.gp.cholesky import NumericalError
from calgp.gp.frequencies import FREQUENCIES, Fixed, Frequencies, Sorf, Variational, draw_frequencies
from calgp.gp.frequencies import gaussian as gaussian
from calgp.gp.frequencies import orthogonal as orthogonal
from calgp.gp.hadamard import hadamard_transform
from calgp.gp.inference import Batch, Bound, Model, Predictive, evaluating, predict, predict_batches
from calgp.gp.kernels import RBF, ArcCosine, Kernel, Theta
from calgp.gp.layers import KERNELS, DeepGP, RandomFeatureGP, make_kernel
from calgp.gp.likelihoods import LIKELIHOODS, Gaussian, Latent, Likelihood, RobustMax, Softmax
from calgp.gp.masks import UNMASKED, Mask, MaskedConv2d, MaskedLinear, Masking, name_sites, same_padding
from calgp.gp.noise import Noise
from calgp.gp.patches import CHANNELS, InducingPatches
from calgp.gp.sparse import Covariances, Inducing, InducingPoints, SparseGP

__all__ = [
    "CHANNELS", "FREQUENCIES", "KERNELS", "LIKELIHOODS", "RBF", "UNMASKED", "ArcCosine", "Batch", "Bound",
    "Covariances", "DeepGP", "Fixed", "Frequencies", "Gaussian", "Inducing", "InducingPatches", "InducingPoints",
    "Kernel", "Latent", "Likelihood", "Mask", "MaskedConv2d", "MaskedLinear", "Masking", "Model", "Noise",
    "NumericalError", "Predictive", "RandomFeatureGP", "RobustMax", "Softmax", "Sorf", "SparseGP", "Theta",
    "Variational", "draw_frequencies", "evaluating", "gaussian", "hadamard_transform", "make_kernel", "name_sites",
    "orthogonal", "predict", "predict_batches", "same_padding",
]  # fmt: skip
