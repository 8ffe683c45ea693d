"""From the latent functions of a `GPClassifier` to probabilities."""

from dataclasses import replace

import torch
from torch import Tensor

from calgp.gp import Latent, Noise, Predictive, Softmax

DRAWS, FEWER_DRAWS = 256, 64  # of f; fewer for more than a hundred classes
SOME = 20  # classes


def draws(classes: int) -> int:
    return DRAWS if classes <= 100 else FEWER_DRAWS


def numbers(classes: int) -> int:
    """How many there are of a row, where f is drawn."""
    return 2 * classes * draws(classes)


def log_average(latent: Latent) -> Tensor:
    """log p alone, by fewer draws of many classes: enough to compare, and a fraction of the work of `average`."""
    _, n, classes = latent.mean.shape
    rows, one = torch.zeros(n, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    noise = Noise(0, one, rows, mean=True, draws=DRAWS if classes <= SOME else FEWER_DRAWS)
    probs = latent.points(DRAWS, noise).softmax(-1).mean(0)
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def average(latent: Latent, kept: dict[tuple[int, int], Tensor] | None = None) -> Predictive:
    """softmax(f) over draws of f that all rows share, with the variance of f.

    `kept`: draws by their place, which a first call fills; exports have them as constants.
    """
    rows = torch.zeros_like(latent.mean[0, :, 0], dtype=torch.long)
    one, count = torch.zeros(1, dtype=torch.long), draws(latent.mean.shape[-1])
    noise = Noise(0, one, rows, mean=True, draws=count, kept=kept)
    predictive = Predictive.of(Softmax().log_probs(latent, noise))
    return replace(predictive, latent_variance=latent.marginal_variance[0, :, 0])
