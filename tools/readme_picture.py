"""Draw README's picture from the two runs of `calgp demo`: reliability on digits, and confidence in letters.

usage: python tools/readme_picture.py demo docs/picture.png
"""

import sys
from pathlib import Path

import matplotlib
import torch
from torch import Tensor

from calgp.cli.demo import NAMES
from calgp.report.figures import PALETTE, wilson
from calgp.runs import RunFolder
from calgp.runs.reading import read_tensors

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

EDGES = torch.tensor([0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0])
SURE = 0.9  # a confidence from here on counts as sure


def main(demo: str, out: str) -> None:
    plt.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    for (method, name), colour in zip(reversed(NAMES.items()), (PALETTE[1], PALETTE[0]), strict=True):
        folder = RunFolder(Path(demo) / method)
        inside, letters = (
            read_tensors(folder.path / folder.predictions_name(source)) for source in ("digits-large", "letters")
        )
        found = folder.evaluation("digits-large")
        label = "plain CNN" if name == "CNN" else "calgp"
        draw_reliability(left, inside["log_probs"], inside["y"], colour, f"{label}: ECE {found.own.scores.ece:.4f}")
        draw_confidence(right, letters["log_probs"].amax(1).exp(), colour, label)
    left.plot([0, 1], [0, 1], color="0.5", linestyle="--", linewidth=1)
    left.set(xlabel="confidence", ylabel="share that is right", title="8,000 digits: is it as right as it says?")
    right.set(xlabel="confidence", ylabel="share of letters", title="1,000 letters, which it has never seen")
    left.set(xlim=(0.3, 1.02), ylim=(0.2, 1.03))
    right.set(xlim=(0.2, 1.0))
    left.legend(frameon=False, loc="lower right")
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.title.set_fontweight("bold")
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.yaxis.set_major_formatter("{x:.0%}")
    figure.tight_layout()
    figure.savefig(out, dpi=160)


def draw_reliability(axes: Axes, log_probs: Tensor, y: Tensor, colour: str, label: str) -> None:
    """Accuracy against mean confidence of images of similar confidence, with intervals."""
    confidence, right = log_probs.amax(1).exp().double(), (log_probs.argmax(1) == y).double()
    place = torch.bucketize(confidence, EDGES, right=False)
    points = []
    for each in place.unique():
        chosen = place == each
        share, n = right[chosen].mean().item(), int(chosen.sum())
        points.append((confidence[chosen].mean().item(), share, *wilson(share, n)))
    x, mid, low, high = map(list, zip(*points, strict=True))
    bars = [[a - b for a, b in zip(mid, low, strict=True)], [b - a for a, b in zip(mid, high, strict=True)]]
    axes.errorbar(x, mid, yerr=bars, color=colour, marker="o", capsize=2, label=label)


def draw_confidence(axes: Axes, confidence: Tensor, colour: str, label: str) -> None:
    """How sure it is of each letter."""
    sure = (confidence >= SURE).double().mean().item()
    text = f"{label}: sure (≥ {SURE:.0%}) of {sure:.0%}"
    weights = [1 / len(confidence)] * len(confidence)
    axes.hist(confidence.tolist(), bins=20, range=(0, 1), weights=weights, color=colour, alpha=0.35)
    axes.hist(confidence.tolist(), bins=20, range=(0, 1), weights=weights, color=colour, histtype="step", label=text)


if __name__ == "__main__":
    main(*sys.argv[1:])
