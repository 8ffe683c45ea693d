# %% [markdown]
# # A kernel and its random features
# ΦΦᵀ approximates K; the error falls as N_RF^(-½). SORF does it without ever holding Ω.

# %%
import torch

from calgp.gp import ArcCosine, RandomFeatureGP

generator = torch.Generator().manual_seed(0)
c = torch.randn(20, 100, generator=generator)  # features of 20 images
exact = ArcCosine(100).covariance(c, c)  # Eq. (4)

# %%
print("N_RF    Gaussian  SORF     (largest error of an entry of K)")
for n_rf in (128, 1024, 8192):
    errors = []
    for frequencies in ("gaussian", "sorf"):
        gp = RandomFeatureGP(100, 10, n_rf=n_rf, frequencies=frequencies, generator=generator)
        phi = gp.phi(c)  # Eq. (5)
        errors.append((phi @ phi.T - exact).abs().max().item())
    print(f"{n_rf:5d}   {errors[0]:.4f}    {errors[1]:.4f}")

# %% [markdown]
# What SORF stores for 8192 frequencies of 100 features: signs, one byte each.

# %%
print(f"SORF: {gp.frequencies.signs.numel():,} bytes of signs; a dense Ω would be {4 * 100 * 8192:,} bytes")
assert errors[0] < 0.2 and errors[1] < 0.2
