"""A mixture of models: a deep ensemble, for training's end and for prediction."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from calgp.gp.inference import Model
from calgp.gp.likelihoods import Latent
from calgp.gp.noise import Noise


class Mixture(Model):
    """q = (1/K) Σ_k q_k: what K models know of f, each as likely as the others (Lakshminarayanan et al. 2017).

    S samples give S · K components, those of the first member first; K members without anything random give K. Members
    draw masks of their own, since a mask's name, and so its key, begins with the number of its member.
    """

    def __init__(self, members: Sequence[Model]) -> None:
        super().__init__()
        kinds = {type(member.likelihood).__name__ for member in members}
        if not members or len({id(member) for member in members}) < len(members) or len(kinds) > 1:
            raise ValueError(
                f"a mixture needs different models with one kind of likelihood, not {len(members)} {kinds}"
            )
        if any(isinstance(member, Mixture) for member in members):
            raise ValueError("a mixture of mixtures would weigh its models unequally: list all models in one")
        self.members: list[Model] = nn.ModuleList(members)  # pyright: ignore[reportAttributeAccessIssue]
        self.likelihood = members[0].likelihood

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        found = [member(h, noise) for member in self.members]
        if any(len(latent.mean) > 1 or not latent.is_points for latent in found):
            # one that has fewer components is repeated, so that all members weigh the same
            found = [_repeated(latent, 1 if noise is None else len(noise.samples)) for latent in found]
        mean = torch.cat([latent.mean for latent in found])
        if any(latent.covariance is not None for latent in found):
            return Latent(mean, covariance=torch.cat([_covariance(latent) for latent in found]))
        if all(latent.is_points for latent in found):
            return Latent(mean)
        filled = [torch.zeros_like(each.mean) if each.variance is None else each.variance for each in found]
        return Latent(mean, torch.cat(filled))

    def kl(self) -> Float[Tensor, ""]:
        """(1/K) Σ_k KL[q_k ‖ p], which is no less than KL[q ‖ p]: the mixture's bound is the mean of its members'."""
        return torch.stack([member.kl() for member in self.members]).mean()


def _repeated(latent: Latent, samples: int) -> Latent:
    mean, *rest = (None if part is None else part.expand(samples, *part.shape[1:]) for part in latent)
    assert mean is not None  # noqa: S101 (for the type checker)
    return Latent(mean, *rest)


def _covariance(latent: Latent) -> Float[Tensor, "S N Q Q"]:
    if latent.covariance is not None:
        return latent.covariance
    return torch.diag_embed(torch.zeros_like(latent.mean) if latent.variance is None else latent.variance)
