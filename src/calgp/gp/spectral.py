"""Filters of bounded spectral norm: they stretch distances of images by a bounded factor (Liu et al. 2020, SNGP)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from calgp.gp.posteriors import convolutions


class SpectralBound(nn.Module):
    """W ↦ W / max(1, ‖W‖₂ / bound), W the D × CK² matrix of the filters (Miyato et al. 2018).

    ‖W‖₂ is exact, the root of the largest eigenvalue of W Wᵀ: a pure function of W, so there is no power iteration's
    state to train, save or resume. The convolution, as a map of images, may stretch up to K times as much.

    >>> SpectralBound(2.0)(torch.diag(torch.tensor([4.0, 1.0])))
    tensor([[2.0000, 0.0000],
            [0.0000, 0.5000]])
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        if not 0 < bound < float("inf"):
            raise ValueError(f"Invalid {bound=}: must be positive and finite")
        self.bound = bound

    def forward(self, weight: Float[Tensor, "D *rest"]) -> Float[Tensor, "D *rest"]:
        norm = spectral_norm(weight.flatten(1))
        return weight / (norm / self.bound).clamp_min(1).to(weight.dtype)


def spectral_norm(matrix: Float[Tensor, "a b"]) -> Float[Tensor, ""]:
    """The largest singular value, by the smaller of the two Gram matrices.

    >>> spectral_norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    tensor(4.)
    """
    with torch.autocast(matrix.device.type, enabled=False):  # half precision has no eigenvalues
        matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
        return torch.linalg.eigvalsh(gram)[-1].clamp_min(torch.finfo(gram.dtype).tiny).sqrt()


def bound_filters(module: nn.Module, bound: float) -> None:
    """Bounds the filters (of Gaussian ones the means) of every convolution in the module, from now on."""
    for convolution in convolutions(module):
        # unsafe: not tried out here, where the filters may have no content yet (the meta device has no autocast)
        parametrize.register_parametrization(convolution, "weight", SpectralBound(bound), unsafe=True)
