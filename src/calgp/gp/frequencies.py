"""The spectral frequencies Ω: how CΩ is formed, and the KL of q(Ω) where Ω is inferred, Eq. (16), (17).

p(ω) = N(0, Λ⁻¹) depends on ℓ, which belongs to the kernel; so ℓ is an argument here, not a copy.
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.gp.hadamard import alternating_product
from calgp.gp.masks import Mask, Masking
from calgp.gp.noise import Noise
from calgp.gp.posteriors import Frequencies, Posterior

Generator = torch.Generator | None


class Fixed(Frequencies):
    """Ω = Λ^-½ ε with ε drawn once, Eq. (17): ℓ can be learned through it."""

    def __init__(self, epsilon: Float[Tensor, "d n_rf"]) -> None:
        super().__init__()
        self.register_buffer("epsilon", epsilon)
        self.epsilon: Tensor

    def forward(self, c: Tensor, lengthscale: Tensor, noise: Noise | None = None) -> Tensor:
        return divided(c, lengthscale) @ self.epsilon

    def kl(self) -> Float[Tensor, ""]:
        return self.epsilon.new_zeros(())


class Sorf(Frequencies):
    """Structured orthogonal random features (Yu et al. 2016): ε ≈ √d' · H D₁ H D₂ H D₃ in blocks of d' columns.

    d is padded with zeros to the next power of two d'. Time O(N_RF log d), storage O(N_RF + d): neither Ω nor H exists.
    """

    def __init__(self, d: int, n_rf: int, *, generator: Generator = None) -> None:
        super().__init__()
        self.n_rf = n_rf
        padded = 1 << (d - 1).bit_length()
        signs = torch.randint(0, 2, (3, -(-n_rf // padded), padded), generator=generator) * 2 - 1
        self.register_buffer("signs", signs.to(torch.int8))
        self.signs: Int8[Tensor, "3 blocks d_padded"]

    def forward(self, c: Tensor, lengthscale: Tensor, noise: Noise | None = None) -> Tensor:
        padded = self.signs.shape[-1]
        missing = padded - c.shape[-1]
        if missing:
            c = F.pad(c, (0, missing))
            lengthscale = F.pad(lengthscale, (0, missing), value=1) if lengthscale.shape[-1] > 1 else lengthscale
        # with the ±1 matrix H̃ = √d' H:  √d' · H D₁ H D₂ H D₃ = (1/d') · H̃ D₁ H̃ D₂ H̃ D₃
        d1, d2, d3 = self.signs.to(c.dtype)
        d3 = d3 / (padded * lengthscale.unsqueeze(-2))  # [*outputs, blocks, d']
        x = c.reshape(-1, *(1,) * (d3.dim() - 1), padded).expand(-1, *d3.shape)
        x = alternating_product(x, d3, d2, d1, None)
        return x.reshape(*c.shape[:-1], *d3.shape[:-2], -1)[..., : self.n_rf]

    def kl(self) -> Float[Tensor, ""]:
        return torch.zeros((), device=self.signs.device)


class Variational(Frequencies):
    """Ω = Λ^-½ ε, ε = diag(z) M_ε, z ~ Bernoulli(π_Ω) over the entries of c: Ω inferred along with W (CNN+GP(RF)).

    What is stored and trained is M_ε, whose prior is N(0, 1) whatever ℓ: an optimiser's steps have the scale of what
    they change. (M_Ω has entries of the size of 1/ℓ; at ℓ = √d = 64 three steps of Adam cross its prior's whole width.)
    """

    def __init__(self, start: Float[Tensor, "d n_rf"], *, masking: Masking = Masking()) -> None:
        super().__init__()
        self.mask = Mask(masking)
        self.epsilon = nn.Parameter(start)

    def forward(self, c: Tensor, lengthscale: Tensor, noise: Noise | None = None) -> Tensor:
        return self.mask(divided(c, lengthscale), noise) @ self.epsilon

    def kl(self) -> Float[Tensor, ""]:
        # π_Ω/2 ‖M_ε‖²: Eq. (16) in ε, where its log ℓ is part of the change of variables (docs/paper.md)
        return self.mask.masking.kl(self.epsilon)


def gaussian(d: int, n_rf: int, *, generator: Generator = None) -> Float[Tensor, "d n_rf"]:
    """ε_ij ~ N(0, 1)."""
    return torch.randn(d, n_rf, generator=generator)


def orthogonal(d: int, n_rf: int, *, generator: Generator = None) -> Float[Tensor, "d n_rf"]:
    """Orthogonal columns with the lengths of Gaussian ones, ε = Q S in blocks of d columns: unbiased, of less variance.

    Q is Haar-distributed (QR with the signs of R's diagonal taken out), S diagonal with χ_d entries.
    """
    blocks = []
    for _ in range(-(-n_rf // d)):
        q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        lengths = torch.randn(d, d, generator=generator, dtype=torch.float64).norm(dim=0)  # χ_d
        blocks.append(q * r.diagonal().sign() * lengths)
    return torch.cat(blocks, 1)[:, :n_rf].to(torch.get_default_dtype())


def divided(c: Tensor, lengthscale: Tensor) -> Tensor:
    """Λ^-½ c; with an ℓ per output, one row for each: [..., outputs, d]."""
    return c / lengthscale if lengthscale.dim() == 1 else c.unsqueeze(-2) / lengthscale


FREQUENCIES = ("sorf", "gaussian", "orthogonal", "variational")


def draw_frequencies(kind: str, d: int, n_rf: int, *, masking: Posterior, generator: Generator = None) -> Frequencies:
    """Ω by name. A variational Ω starts at a draw from its prior."""
    match kind:
        case "sorf":
            return Sorf(d, n_rf, generator=generator)
        case "gaussian":
            return Fixed(gaussian(d, n_rf, generator=generator))
        case "orthogonal":
            return Fixed(orthogonal(d, n_rf, generator=generator))
        case "variational":
            return masking.frequencies(gaussian(d, n_rf, generator=generator))
    raise ValueError(f"frequencies are one of {', '.join(FREQUENCIES)}, not {kind!r}")
