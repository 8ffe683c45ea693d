"""Prediction in instalments: samples as they come, and when enough of them have come."""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calgp.gp.inference import Model, Predictive, _Moments, draw

BETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # shares λ of the capital of `settled`


class Sampling:
    """Images of which some samples have been drawn; `predict` with as many gives the same.

    The model must be in `eval` mode. Of one whose samples do not differ (`sample_cost`), draw one.

    Args:
        model: what was trained.
        x: images.
        rows: their rows, which key the masks.
        seed: of the masks.
    """

    def __init__(self, model: Model, x: Tensor, rows: Int[Tensor, "N"], *, seed: int) -> None:
        self.model, self.rows, self.seed, self.drawn = model, rows, seed, 0
        model.sites()  # names them
        with torch.inference_mode():
            self._h = model.stem(x)
        self._moments: _Moments | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int) -> Float[Tensor, "count N Q"]:
        """The probabilities by each of the next `count` samples, averaged over the members of an ensemble."""
        with torch.inference_mode():
            last = self.drawn + count
            log_probs = draw(self.model, self._h, self.rows, self.drawn, last, seed=self.seed)
            moments = _Moments.of(log_probs)
            self._moments = moments if self._moments is None else self._moments + moments
            self.drawn = last
            return log_probs.exp().unflatten(0, (-1, count)).mean(0)

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


def settled(probs: Float[Tensor, "S N Q"], error: float) -> Bool[Tensor, "N"]:
    """Whether S samples settle which class is the most probable by all samples there could be, S → ∞.

    Samples are independent, and for classes a and b the difference D_s = p_s(a) − p_s(b) lies in [−1, 1]. If b is at
    least as probable as a, E D ≤ 0, and the capital C_S = (1/L) Σ_λ Π_s (1 + λ D_s) of one who bets on a is a
    nonnegative supermartingale that begins at 1; so P(C_S ≥ 1/α for any S) ≤ α (Ville 1939; betting as in
    Waudby-Smith & Ramdas 2024). The answer is settled where the capital of the leading class has reached
    (Q − 1) / `error` against every other. To settle for a wrong class is to win that much against the right one; there
    are Q − 1 wrong ones, so this happens with probability at most `error`, however often and whenever one looks.

    >>> bool(settled(torch.tensor([[[0.9, 0.1]]]).expand(20, 1, 2), 0.01))
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
