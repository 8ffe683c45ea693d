"""Naive NumPy versions of the mathematics: slow, literal, float64. The tests' second source of truth."""

import numpy as np


def error_rate(probs, y):
    return np.mean([np.argmax(p) != label for p, label in zip(probs, y, strict=True)])


def mnll(probs, y):
    return -np.mean([np.log(p[label]) for p, label in zip(probs, y, strict=True)])


def brier(probs, y):
    total = 0.0
    for p, label in zip(probs, y, strict=True):
        for k, p_k in enumerate(p):
            total += (float(k == label) - p_k) ** 2
    return total / len(y)


def entropy(probs):
    return np.array([-sum(p_k * np.log(p_k) for p_k in p if p_k > 0) for p in probs])


def bins(confidence, n_bins, closed="right"):
    """Members of each bin; (a, b] with 0 in the first, or [a, b) with 1 in the last."""
    members = []
    for m in range(n_bins):
        low, high = m / n_bins, (m + 1) / n_bins
        if closed == "right":
            inside = (confidence > low) & (confidence <= high) | ((m == 0) & (confidence == 0))
        else:
            inside = (confidence >= low) & (confidence < high) | ((m == n_bins - 1) & (confidence == 1))
        members.append(np.flatnonzero(inside))
    return members


def ece(confidence, correct, n_bins, conf="mean"):
    total = 0.0
    for m, members in enumerate(bins(confidence, n_bins)):
        if len(members):
            expected = confidence[members].mean() if conf == "mean" else (m + 0.5) / n_bins
            total += len(members) / len(confidence) * abs(correct[members].mean() - expected)
    return total


def mce(confidence, correct, n_bins):
    gaps = [abs(correct[b].mean() - confidence[b].mean()) for b in bins(confidence, n_bins) if len(b)]
    return max(gaps)


def classwise_ece(probs, y, n_bins):
    return np.mean([ece(probs[:, k], y == k, n_bins) for k in range(probs.shape[1])])


def authors_ece(confidence, correct, n_bins=20):
    """The authors' loop: [a, b), mean confidence, and p = 1 in no bin."""
    total = 0.0
    for m in range(n_bins):
        members = (confidence >= m / n_bins) & (confidence < (m + 1) / n_bins)
        if members.any():
            total += members.sum() / len(confidence) * abs(correct[members].mean() - confidence[members].mean())
    return total


def auroc(inside, outside):
    """P(outside > inside) + ½ P(equal), over all pairs."""
    return np.mean([(o > i) + 0.5 * (o == i) for o in outside for i in inside])


def fpr95(inside, outside):
    """The smallest share of the inside flagged by a threshold that catches 95 % of the outside."""
    shares = [np.mean(inside >= t) for t in outside if 100 * np.sum(outside >= t) >= 95 * len(outside)]
    return min(shares)
