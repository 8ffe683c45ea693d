"""The spectral frequencies Ω: how CΩ is formed, and the KL of q(Ω) where Ω is inferred, Eq. (16), (17).

p(ω) = N(0, Λ⁻¹) depends on ℓ, which belongs to the kernel; so ℓ is an argument here, not a copy.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from calgp.gp.constants import is_traced
from calgp.gp.hadamard import WIDTH, alternating_product, dense_width, padded_size
from calgp.gp.masks import Mask, Masking
from calgp.gp.noise import Noise
from calgp.gp.posteriors import Frequencies, Generator, Posterior

DENSE = 2**20  # numbers of an Ω that may exist
WORK = 2**22  # multiplications with Ω in the time of a transform's calls
SMALL = 2**12  # numbers that are divided in the time of a call


class Fixed(Frequencies):
    """Ω = Λ^-½ ε with ε drawn once, Eq. (17): ℓ can be learned through it.

    >>> Fixed(torch.eye(2))(torch.tensor([[1.0, 2.0]]), torch.tensor([2.0]))
    tensor([[0.5000, 1.0000]])
    """

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

    d is padded with zeros to the next size d' of a Hadamard matrix (`padded_size`). Time O(N_RF log d), storage
    O(N_RF + d): neither Ω nor H exists, but for sizes so small that a product with Ω is faster.

    >>> Sorf(5, 100)(torch.ones(2, 5), torch.ones(1)).shape
    torch.Size([2, 100])
    """

    def __init__(self, d: int, n_rf: int, *, generator: Generator = None) -> None:
        super().__init__()
        self.d, self.n_rf = d, n_rf
        shape = self._shape(padded_size(d))
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        self.register_buffer("signs", signs.to(torch.int8))
        self.signs: Int8[Tensor, "3 blocks d_padded"]
        self._made: _Made | None = None

    def forward(self, c: Tensor, lengthscale: Tensor, noise: Noise | None = None) -> Tensor:
        if self._prefers_dense(c, lengthscale):
            return self._dense(c, lengthscale if lengthscale.dtype == c.dtype else lengthscale.to(c.dtype))
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
        x = x.reshape(*c.shape[:-1], *d3.shape[:-2], -1)
        return x if x.shape[-1] == self.n_rf else x[..., : self.n_rf]

    def kl(self) -> Float[Tensor, ""]:
        return torch.zeros((), device=self.signs.device)

    @property
    def former_shape(self) -> tuple[int, int, int]:
        """The shape of signs that earlier versions stored: until 2026-11-17 d' was always a power of two."""
        return self._shape(1 << (self.d - 1).bit_length())

    def _shape(self, padded: int) -> tuple[int, int, int]:
        return 3, -(-self.n_rf // padded), padded

    def _prefers_dense(self, c: Tensor, lengthscale: Tensor) -> bool:
        if self.d * self.n_rf > DENSE or torch.compiler.is_compiling():
            return False
        numbers = c.numel() // self.d * self.n_rf * (len(lengthscale) if lengthscale.dim() > 1 else 1)
        if numbers * (self.d - WIDTH) <= WORK:  # whatever the transform is done by
            return True
        return numbers * (self.d - dense_width(c, self.signs.shape[-1])) <= WORK

    def _dense(self, c: Tensor, lengthscale: Tensor) -> Tensor:
        omega = self._omega(c.dtype)
        if lengthscale.requires_grad or lengthscale.dim() > 1 or c.numel() < omega.numel() > SMALL:
            return divided(c, lengthscale) @ omega
        return c @ (omega / lengthscale.unsqueeze(-1))  # nothing more in the backward pass

    def _omega(self, dtype: torch.dtype) -> Float[Tensor, "d n_rf"]:
        """Ω at ℓ = 1, kept as long as the signs stay."""
        signs, made = self.signs, self._made
        if made is not None and made.signs is signs and made.version == signs._version and made.omega.dtype == dtype:
            return made.omega
        with torch.inference_mode(False):
            # (1/d') · (H̃ D₁ H̃ D₂ H̃ D₃)ᵀ of unit vectors, [j of d', blocks, i of d']; by doubles, which autocast lets be
            d1, d2, d3 = (signs if signs.is_meta else signs.cpu()).double()
            padded = signs.shape[-1]
            unit = torch.eye(min(self.n_rf, padded), padded, dtype=d1.dtype, device=d1.device)
            x = alternating_product(unit.unsqueeze(1).expand(-1, *d3.shape), None, d1, d2, d3 / padded)
            omega = x.permute(2, 1, 0).flatten(1)[: self.d, : self.n_rf].to(signs.device, dtype).contiguous()
        if not (is_traced() or signs.is_inference()):  # tensors born in inference mode have no version
            self._made = _Made(signs, signs._version, omega)
        return omega

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_made": None}  # a copy's signs have versions of their own

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        stored = state_dict.get(f"{prefix}signs")
        if stored is not None and stored.shape == self.former_shape:  # such signs keep their size
            self.signs = self.signs.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Made(NamedTuple):
    """Ω, and of which signs it was made: these, as long as their version stays."""

    signs: Tensor
    version: int
    omega: Tensor


class Variational(Frequencies):
    """Ω = Λ^-½ ε, ε = diag(z) M_ε, z ~ Bernoulli(π_Ω) over the entries of c, Eq. (14): Ω inferred (CNN+GP(RF)).

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
    """ε_ij ~ N(0, 1).

    >>> gaussian(3, 100).shape
    torch.Size([3, 100])
    """
    return torch.randn(d, n_rf, generator=generator)


def orthogonal(d: int, n_rf: int, *, generator: Generator = None) -> Float[Tensor, "d n_rf"]:
    """Orthogonal columns with the lengths of Gaussian ones, ε = Q S in blocks of d columns: unbiased, of less variance.

    Q is Haar-distributed (QR with the signs of R's diagonal taken out), S diagonal with χ_d entries.

    >>> e = orthogonal(2, 2)
    >>> abs((e[:, 0] @ e[:, 1]).item()) < 1e-5
    True
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
    """Ω by name. A variational Ω starts at a draw from its prior.

    >>> from calgp.gp import Masking
    >>> draw_frequencies("sorf", 4, 10, masking=Masking())(torch.ones(3, 4), torch.ones(1)).shape
    torch.Size([3, 10])
    """
    match kind:
        case "sorf":
            return Sorf(d, n_rf, generator=generator)
        case "gaussian":
            return Fixed(gaussian(d, n_rf, generator=generator))
        case "orthogonal":
            return Fixed(orthogonal(d, n_rf, generator=generator))
        case "variational":
            return masking.frequencies(gaussian(d, n_rf, generator=generator))
    raise ValueError(f"Invalid frequencies={kind!r}: must be one of {', '.join(FREQUENCIES)}")
