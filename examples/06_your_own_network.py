# %% [markdown]
# # Your own network
# `calgp.wrap` makes a backbone of any module that takes images: masks in front of its layers, its features found, its
# weights kept. Every method takes it, and so do your own heads and loops.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import calgp
from calgp import METHODS, Bound, RandomFeatureGP, predict, wrap
from calgp.data import load
from calgp.gp import Masking
from calgp.nets import FeaturesWithHead, Task

torch.manual_seed(0)


class Residual(nn.Module):
    """Somebody's network: batch norm, a residual connection, a layer that is used twice, a classifier of 26 letters."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.wider = nn.Conv2d(16, 48, 3, stride=2)
        self.classifier = nn.Linear(48, 26)

    def forward(self, x):
        h = self.first(x)
        h = h + self.block(h)
        h = h + self.block(h)
        return self.classifier(self.wider(h).relu().amax((2, 3)))


network = Residual()  # a pretrained one keeps its weights

# %% [markdown]
# The first layer has no mask, and the classifier is replaced by the head of the method. Masks are those for pretrained
# weights (inverted, keep 0.9), and the statistics of batch norm are estimated anew, with the masks on, before the first
# step. The layer that is called twice is one site with two calls.

# %%
backbone = wrap(network, name="residual")
features = backbone.build(Task(1, 28, 28, classes=10), Masking())
print("masked layers and their calls:", features.sites)
print("features:", features.out_features, "stem:", features.stem_module)
assert features.sites == {"block.0": 2, "wider": 1}

# %%
out = Path(tempfile.mkdtemp()) / "run"
method = replace(METHODS["cnn-gp-sorf"], n_rf=512)
classifier = calgp.train(
    "digits", out=out, method=method, backbone=backbone, steps=400, learning_rate=1e-2, schedule="one-cycle"
)
scores = classifier.evaluate().scores
print(scores)
assert scores.err < 0.3

# %% [markdown]
# A run folder holds the name "residual", and no code. Where it is loaded, give a network of the same kind first:
# `wrap(Residual(), name="residual")`, on the command line `calgp --network residual=nets.py:Residual evaluate RUN`.
#
# The same in your own loop. Frozen and without masks the network runs once, and only the head is random: fifty samples
# cost little more than one. The names of the parameters are still those of the network.

# %%
network.load_state_dict(classifier.model.features.network.state_dict(), strict=False)  # all but the classifier
frozen = wrap(network, mask="none", freeze=True).build(Task(1, 28, 28, classes=10), Masking())
images, test = load("digits", "train"), load("digits", "test")
model = FeaturesWithHead(frozen, RandomFeatureGP(frozen.out_features, 10, n_rf=512))
bound = Bound(model, n=len(images))
optimiser = torch.optim.Adam(model.head.parameters(), lr=1e-2)
for _ in range(150):
    batch = torch.randint(len(images), (100,))
    nll, kl = bound(images.pixels(batch), images.y[batch])
    optimiser.zero_grad()
    (nll + kl).backward()
    optimiser.step()
predictive = predict(model, test.pixels(), passes=50, seed=0)
accuracy = (predictive.labels == test.y).float().mean().item()
print(f"accuracy {accuracy:.3f}, mean entropy {predictive.entropy.mean():.3f}")
assert accuracy > 0.7
