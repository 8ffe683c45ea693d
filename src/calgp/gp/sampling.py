"""Prediction in instalments: samples as they come, and when enough of them have come."""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calgp.gp.inference import Model, Passes
from calgp.gp.predictive import Predictive, SampleMoments

BETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # shares λ of the capital of `label_is_decided`


class Sampling:
    """Images of which some samples have been drawn; `predict` with as many gives the same.

    The model must be in `eval` mode. Of one whose samples do not differ (`sample_cost`), draw one.

    Args:
        model: what was trained.
        x: images.
        rows: their rows, which key the masks.
        seed: of the masks.
        how: the engine, and how many samples there will be at most; None: the model's default.
    """

    def __init__(
        self, model: Model, x: Tensor, rows: Int[Tensor, "N"], *, seed: int, how: Passes | None = None
    ) -> None:
        self.model, self.rows, self.seed, self.drawn = model, rows, seed, 0
        self.how = Passes.of(model) if how is None else how
        model.sites()  # names them
        with torch.inference_mode():
            self._h = model.stem(x)
        self._moments: SampleMoments | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int) -> Float[Tensor, "count N Q"]:
        """The probabilities by each of the next `count` samples, averaged over members and over draws of f."""
        with torch.inference_mode():
            last = self.drawn + count
            noise = self.how.noise(self.seed, self.drawn, last, self.rows)
            latent = self.model.sample(self._h, noise)
            log_probs = self.model.likelihood.log_probs(latent, noise)
            moments = SampleMoments.of(log_probs)
            self._moments = moments if self._moments is None else self._moments + moments
            self.drawn = last
            members = max(1, len(latent.mean) // count)  # then samples, then draws of their Gaussians
            return log_probs.exp().unflatten(0, (members, count, -1)).mean((0, 2))

    def predictive(self) -> Predictive:
        """What is known after the samples drawn so far, of which there must be one."""
        if self._moments is None:
            raise ValueError("no sample has been drawn")
        return self._moments.predictive()

    def keep(self, index: Int[Tensor, "M"]) -> None:
        """Go on with the images at `index` only."""
        self.rows, self._h = self.rows[index], self._h[index]
        if self._moments is not None:
            names = ("log_sum", "entropy", "mean", "deviations")
            self._moments = replace(self._moments, **{name: getattr(self._moments, name)[index] for name in names})


def label_is_decided(probs: Float[Tensor, "S N Q"], error: float) -> Bool[Tensor, "N"]:
    """Whether S samples decide which class is the most probable by all samples there could be, S → ∞.

    Samples are independent, and for classes a and b the difference D_s = p_s(a) − p_s(b) lies in [−1, 1]. If b is at
    least as probable as a, E D ≤ 0, and the capital C_S = (1/L) Σ_λ Π_s (1 + λ D_s) of one who bets on a is a
    nonnegative supermartingale that begins at 1; so P(C_S ≥ 1/α for any S) ≤ α (Ville 1939; betting as in
    Waudby-Smith & Ramdas 2024). The label is decided where the capital of the leading class has reached
    (Q − 1) / `error` against every other. To decide for a wrong class is to win that much against the right one; there
    are Q − 1 wrong ones, so this happens with probability at most `error`, however often and whenever one looks.

    >>> bool(label_is_decided(torch.tensor([[[0.9, 0.1]]]).expand(20, 1, 2), 0.01))
    True
    """
    classes = probs.shape[-1]
    if classes == 1:
        return torch.ones(probs.shape[1], dtype=torch.bool, device=probs.device)
    probs = probs.double()
    leading = probs.mean(0).argmax(-1)  # [N]
    ahead = probs.gather(-1, leading[None, :, None].expand(len(probs), -1, 1)) - probs  # D_s, [S, N, Q]
    capital = torch.stack([torch.log1p(bet * ahead.clamp_min(-1)).sum(0) for bet in BETS])
    won = capital.logsumexp(0) - math.log(len(BETS)) >= math.log((classes - 1) / error)
    return won.scatter(-1, leading[:, None], True).all(-1)
