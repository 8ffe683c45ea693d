"""The numbers of docs/guides/pretrained-network.md: a folder of real images, embedded, fitted and compared.

python tools/pretrained_table.py images FOLDER     # FOLDER/photos/{train,test}/class/*.png: six classes of CIFAR-10
calgp embed --network network.py:lite0 --source folder:FOLDER/photos --split train --out FOLDER/train    # and test
calgp fit FOLDER/train --test FOLDER/test --out FOLDER/model.safetensors --predictions FOLDER/gp.npz
python tools/pretrained_table.py linear FOLDER     # FOLDER/linear.npz: logistic regression on the same embeddings
calgp judge FOLDER/gp.npz FOLDER/linear.npz
"""

import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.linear_model import LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from calgp.data import load
from calgp.embeddings import load_embeddings

ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")
EACH = 100  # images of a class in each part


def write_images(folder: Path) -> None:
    """The first images of each class, as PNG files."""
    for part in ("train", "test"):
        images = load("cifar10", part)
        for name in ANIMALS:
            place = folder / "photos" / part / name
            place.mkdir(parents=True)
            for row in (images.y == images.classes.index(name)).nonzero()[:EACH, 0].tolist():
                Image.fromarray(images.x[row].permute(1, 2, 0).numpy()).save(place / f"{row}.png")


def fit_linear(folder: Path) -> None:
    """Logistic regression, its C by cross-validated likelihood."""
    train, test = (load_embeddings(folder / part) for part in ("train", "test"))
    begun = time.perf_counter()
    search = LogisticRegressionCV(
        Cs=10 ** np.linspace(-5, 1, 13), cv=5, scoring="neg_log_loss", max_iter=2000, use_legacy_attributes=False,
        l1_ratios=(0.0,),
    )  # fmt: skip
    linear = make_pipeline(StandardScaler(), search).fit(train.X, train.y)
    np.savez(folder / "linear.npz", probs=linear.predict_proba(test.X), y=test.y)
    print(f"logistic regression: {time.perf_counter() - begun:.0f} s, C = {search.C_}")


if __name__ == "__main__":
    {"images": write_images, "linear": fit_linear}[sys.argv[1]](Path(sys.argv[2]))
