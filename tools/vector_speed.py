"""Seconds and memory of GPClassifier().fit on a synthetic mixture: three Gaussians a class, 64 directions in common.

python tools/vector_speed.py 50000 1280 10     # rows, columns, classes
"""

import resource
import sys
import time

import numpy as np
import torch

from calgp import GPClassifier


def mixture(n: int, d: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    y, part = rng.integers(classes, size=n), rng.integers(3, size=n)
    means, directions = normal(classes, 1, d) + normal(classes, 3, d), normal(64, d) / 8
    x = np.empty((n, d), np.float32)
    for first in range(0, n, 5000):
        rows = slice(first, first + 5000)
        m = len(y[rows])
        x[rows] = 0.15 * means[y[rows], part[rows]] + normal(m, 64) @ directions + 0.5 * normal(m, d)
    return x, y


def main() -> None:
    x, y = mixture(*map(int, sys.argv[1:4]))
    begun = time.perf_counter()
    fitted = GPClassifier().fit(x, y)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{x.shape}, {len(fitted.classes_)} classes, {torch.get_num_threads()} threads: {seconds:.1f} s, {peak:.0f} MB"
    )
    print(fitted.choice_)


if __name__ == "__main__":
    main()
