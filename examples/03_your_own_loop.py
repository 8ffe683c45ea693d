# %% [markdown]
# # A Gaussian process head in your own network and your own loop
# `RandomFeatureGP` is a plain module. Two things to know: add `kl() / n` to the loss, and average the probabilities of
# several calls to predict, since every call draws new masks.

# %%
import torch
from torch import nn

from calgp import RandomFeatureGP
from calgp.data import load

torch.manual_seed(0)
images = load("digits", "train")
x, y = images.pixels(), images.y
network = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), RandomFeatureGP(128, 10, n_rf=512))
optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)

# %%
for _ in range(400):
    batch = torch.randint(len(x), (100,))
    loss = nn.functional.cross_entropy(network(x[batch]), y[batch]) + network[-1].kl() / len(x)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

# %%
test = load("digits", "test")
with torch.no_grad():
    probs = torch.stack([network(test.pixels()).softmax(-1) for _ in range(50)]).mean(0)
accuracy = (probs.argmax(-1) == test.y).float().mean().item()
print(f"accuracy {accuracy:.3f}, mean confidence {probs.amax(-1).mean():.3f}")
assert accuracy > 0.85
