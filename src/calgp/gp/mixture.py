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
                f"Invalid mixture of {len(members)} {kinds}: must be different models with one kind of likelihood"
            )
        if any(isinstance(member, Mixture) for member in members):
            raise ValueError("a mixture of mixtures would weigh its models unequally: list all models in one")
        self.members: list[Model] = nn.ModuleList(members)  # pyright: ignore[reportAttributeAccessIssue]
        self.likelihood = members[0].likelihood
        integrated = [member.integrate for member in members if member.sites()]
        self.integrate = bool(integrated) and all(integrated)

    def sample(self, h: Tensor, noise: Noise | None) -> Latent:
        found = [member(h, noise) for member in self.members]
        if any(len(latent.mean) > 1 or not latent.is_points for latent in found):
            # one that has fewer components is repeated, so that all members weigh the same
            most = max([1 if noise is None else len(noise.samples), *(len(latent.mean) for latent in found)])
            found = [_repeated(latent, most) for latent in found]
        mean = torch.cat([latent.mean for latent in found])
        if any(latent.covariance is not None for latent in found):
            covariances = (
                torch.diag_embed(latent.marginal_variance) if latent.covariance is None else latent.covariance
                for latent in found
            )
            return Latent(mean, covariance=torch.cat(list(covariances)))
        if all(latent.is_points for latent in found):
            return Latent(mean)
        return Latent(mean, torch.cat([latent.marginal_variance for latent in found]))

    def kl(self) -> Float[Tensor, ""]:
        """(1/K) Σ_k KL[q_k ‖ p], which is no less than KL[q ‖ p]: the mixture's bound is the mean of its members'."""
        return torch.stack([member.kl() for member in self.members]).mean()


def _repeated(latent: Latent, components: int) -> Latent:
    times = components // len(latent.mean)
    mean, *rest = (None if part is None else part.repeat_interleave(times, 0) for part in latent)
    assert mean is not None  # noqa: S101 (for the type checker)
    return Latent(mean, *rest)
