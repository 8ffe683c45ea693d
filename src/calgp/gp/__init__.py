"""The paper's mathematics: plain modules and functions that need torch alone."""

from calgp.gp.cholesky import NumericalError
from calgp.gp.freezing import Freezable, freeze
from calgp.gp.frequencies import FREQUENCIES, Fixed, Sorf, Variational, draw_frequencies
from calgp.gp.frequencies import gaussian as gaussian
from calgp.gp.frequencies import orthogonal as orthogonal
from calgp.gp.hadamard import hadamard_transform
from calgp.gp.inference import (
    Batch,
    Bound,
    Engine,
    MixedLabels,
    Model,
    Passes,
    draw,
    evaluating,
    mixes_rows,
    outputs_seen,
    predict,
    predict_batches,
    sample_cost,
)
from calgp.gp.kernels import RBF, ArcCosine, Kernel, Theta
from calgp.gp.laplace import LaplaceGP
from calgp.gp.layers import KERNELS, DeepGP, RandomFeatureGP, make_kernel
from calgp.gp.likelihoods import LIKELIHOODS, Gaussian, Latent, Likelihood, MixedSoftmax, RobustMax, Softmax
from calgp.gp.masks import UNMASKED, Mask, MaskedConv2d, MaskedLinear, MaskedLinearPerOutput, Masking, same_padding
from calgp.gp.meanfield import (
    GaussianNoise,
    MeanField,
    MeanFieldConv2d,
    MeanFieldFrequencies,
    MeanFieldLinear,
    MeanFieldLinearPerOutput,
)
from calgp.gp.mixture import Mixture
from calgp.gp.noise import Noise, Site, name_sites
from calgp.gp.patches import CHANNELS, InducingPatches
from calgp.gp.posteriors import Convolution, Frequencies, Linear, Posterior, convolutions
from calgp.gp.predictive import Predictive
from calgp.gp.sampling import Sampling, label_is_decided
from calgp.gp.sparse import Covariances, Inducing, InducingPoints, SparseGP
from calgp.gp.spectral import SpectralBound, bound_filters, spectral_norm

__all__ = [
    "CHANNELS", "FREQUENCIES", "KERNELS", "LIKELIHOODS", "RBF", "UNMASKED", "ArcCosine", "Batch", "Bound",
    "Convolution", "Covariances", "DeepGP", "Engine", "Fixed", "Freezable", "Frequencies", "Gaussian", "GaussianNoise",
    "Inducing", "InducingPatches", "InducingPoints", "Kernel", "LaplaceGP", "Latent", "Likelihood", "Linear", "Mask",
    "MaskedConv2d", "MaskedLinear", "MaskedLinearPerOutput", "Masking", "MeanField", "MeanFieldConv2d",
    "MeanFieldFrequencies", "MeanFieldLinear", "MeanFieldLinearPerOutput", "MixedLabels", "MixedSoftmax", "Mixture",
    "Model", "Noise", "NumericalError", "Passes", "Posterior", "Predictive", "RandomFeatureGP", "RobustMax",
    "Sampling", "Site", "Softmax", "Sorf", "SparseGP", "SpectralBound", "Theta", "Variational", "bound_filters",
    "convolutions", "draw", "draw_frequencies", "evaluating", "freeze", "gaussian", "hadamard_transform",
    "label_is_decided", "make_kernel", "mixes_rows", "name_sites", "orthogonal", "outputs_seen", "predict",
    "predict_batches", "same_padding", "sample_cost", "spectral_norm",
]  # fmt: skip
