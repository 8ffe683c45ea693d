# %% [markdown]
# # Your own method
# A method is a frozen dataclass with `build`; a model says what it knows of f (`sample`) and what that costs (`kl`).
# Training, prediction, scores and reports then work as for all others. This one is a linear Gaussian process: masked
# weights on the convolutional features, no random features.

# %%
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import calgp
from calgp import METHODS
from calgp.gp import Latent, MaskedLinear, Masking, Model, Softmax
from calgp.methods import Method


@dataclass(frozen=True)
class CnnLinear(Method):
    """Masked linear head on masked convolutional features."""

    summary: ClassVar[str] = "masked linear head"
    keep: float = 0.5

    def build(self, task, backbone, *, generator=None):
        features = backbone.build(task, Masking(self.keep), generator=generator)
        head = MaskedLinear(features.out_features, task.classes, masking=Masking(self.keep), generator=generator)
        return CnnLinearModel(features, head)


class CnnLinearModel(Model):
    def __init__(self, features, head):
        super().__init__()
        self.features, self.head, self.likelihood = features, head, Softmax()

    def stem(self, x):
        return self.features.stem(x)

    def sample(self, h, noise):
        f = self.head(self.features(h, noise), noise)
        return Latent(f.unflatten(0, (-1, len(h))))

    def kl(self):
        return self.features.kl() + self.head.kl()


# %% [markdown]
# Registered under a name, run folders can name it too.

# %%
METHODS["cnn-linear"] = CnnLinear()
out = Path(tempfile.mkdtemp()) / "run"
classifier = calgp.train("digits", out=out, method="cnn-linear", backbone="lenet", steps=100, learning_rate=3e-3)
scores = classifier.evaluate(passes=4).scores
print(scores)
assert scores.err < 0.5
