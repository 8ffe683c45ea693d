"""Naive NumPy versions of the mathematics: slow, literal, float64. The tests' second source of truth."""

import itertools
import math

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


# The Gaussian processes and networks (calgp.gp, calgp.nets): double loops over NumPy arrays.


def scaled(c, lengthscale):
    """u = Λ^-½ c."""
    return np.asarray(c, float) / np.asarray(lengthscale, float)


def arc_cosine(c1, c2, order, sigma, lengthscale):
    """k = (σ²/π) ‖u‖ᵖ ‖v‖ᵖ J_p(α) (Cho & Saul 2009)."""
    k = np.zeros((len(c1), len(c2)))
    for i, u in enumerate(scaled(c1, lengthscale)):
        for j, v in enumerate(scaled(c2, lengthscale)):
            norms = np.sqrt(u @ u) * np.sqrt(v @ v)
            alpha = np.arccos(np.clip(u @ v / norms, -1, 1))
            angular = (
                np.pi - alpha,
                np.sin(alpha) + (np.pi - alpha) * np.cos(alpha),
                3 * np.sin(alpha) * np.cos(alpha) + (np.pi - alpha) * (1 + 2 * np.cos(alpha) ** 2),
            )[order]
            k[i, j] = sigma**2 / np.pi * norms**order * angular
    return k


def arc_cosine_integral(alpha, order, steps=200_000):
    """2 E_ω[Θ(ω·u) Θ(ω·v) (ω·u)ᵖ (ω·v)ᵖ] for unit vectors at the angle α, by the midpoint rule over the angle of ω.

    In polar coordinates of the plane of u and v the radius integrates to ∫ r^(2p+1) e^(−r²/2) dr = 2ᵖ p!.
    """
    theta = (np.arange(steps) + 0.5) / steps * 2 * np.pi
    a, b = np.cos(theta), np.cos(theta - alpha)
    integrand = np.where((a > 0) & (b > 0), (a * b) ** order, 0.0)
    radial = 2**order * math.factorial(order)
    return 2 * radial / (2 * np.pi) * integrand.mean() * 2 * np.pi


def rbf(c1, c2, sigma, lengthscale):
    """k = σ² exp(−½ ‖u − v‖²)."""
    k = np.zeros((len(c1), len(c2)))
    for i, u in enumerate(scaled(c1, lengthscale)):
        for j, v in enumerate(scaled(c2, lengthscale)):
            k[i, j] = sigma**2 * np.exp(-0.5 * sum((u - v) ** 2))
    return k


def patches_of(image, side, channels):
    """Windows of one image [C, H, W] as vectors: of all colours together, or of each channel after the other."""
    depth, height, width = image.shape
    groups = [list(range(depth))] if channels == "joint" else [[c] for c in range(depth)]
    return [
        np.array([image[c, i + a, j + b] for c in group for a in range(side) for b in range(side)])
        for group in groups
        for i in range(height - side + 1)
        for j in range(width - side + 1)
    ]


def patch_covariance(image1, image2, w, side, channels, sigma, lengthscale):
    """Σ_pp' w_p w_p' k_g(x^[p], x'^[p'])."""
    total = 0.0
    for w1, u in zip(w, patches_of(image1, side, channels), strict=True):
        for w2, v in zip(w, patches_of(image2, side, channels), strict=True):
            total += w1 * w2 * rbf([u], [v], sigma, lengthscale)[0, 0]
    return total


def patch_cross_covariance(image, z, w, side, channels, sigma, lengthscale):
    """Σ_p w_p k_g(x^[p], z)."""
    patches = patches_of(image, side, channels)
    return sum(w_p * rbf([u], [z], sigma, lengthscale)[0, 0] for w_p, u in zip(w, patches, strict=True))


def hadamard(d):
    """The symmetric ±1 matrix: Paley's of order m = 1, 12, 20 or 28, times Sylvester's of order d / m."""
    m = next(m for m in (1, 12, 20, 28) if d % m == 0 and (d // m).bit_count() == 1)
    h = np.ones((1, 1))
    while len(h) < d // m:
        h = np.block([[h, h], [h, -h]])
    return np.kron(paley(m), h)


def paley(m):
    """Paley's Hadamard matrices; the Legendre symbol by Euler's criterion, a^((q−1)/2) mod q."""
    if m == 1:
        return np.ones((1, 1))
    q = 13 if m == 28 else m - 1
    legendre = np.array([0, *(1 if pow(a, (q - 1) // 2, q) == 1 else -1 for a in range(1, q))])
    a = np.arange(q)
    if m < 28:
        core = legendre[(a[:, None] + a) % q] - (a[:, None] == -a % q)
        return np.pad(core, ((1, 0), (1, 0)), constant_values=1)
    conference = np.pad(legendre[(a[:, None] - a) % q], ((1, 0), (1, 0)), constant_values=1)
    conference[0, 0] = 0
    one = np.eye(q + 1)
    return np.block([[conference + one, conference - one], [conference - one, -conference - one]])


def sorf(signs, n_rf):
    """The dense d' × N_RF matrix whose blocks are (√d' · H D₁ H D₂ H D₃)ᵀ with orthonormal H."""
    _, blocks, d = signs.shape
    h = hadamard(d) / np.sqrt(d)
    dense = []
    for block in range(blocks):
        d1, d2, d3 = (np.diag(signs[i, block].astype(float)) for i in range(3))
        dense.append((np.sqrt(d) * h @ d1 @ h @ d2 @ h @ d3).T)
    return np.concatenate(dense, 1)[:, :n_rf]


def all_masks(m, keep):
    """Every z in {0, 1}^m with its probability under Bernoulli(keep)."""
    masks = np.array(list(itertools.product([0.0, 1.0], repeat=m)))
    return masks, np.prod(np.where(masks == 1, keep, 1 - keep), 1)


def minus_log_normal(w, std):
    """−log N(w; 0, std²), summed over all entries."""
    std = np.broadcast_to(std, w.shape)
    return sum(0.5 * (x / s) ** 2 + np.log(s) + 0.5 * np.log(2 * np.pi) for x, s in zip(w.flat, std.flat, strict=True))


def expected_minus_log_prior(m, keep, inverted=False, std=1.0):
    """E_q[−log p(W)], W = diag(z) M with z over the first axis, by enumerating every z."""
    total = 0.0
    for z, probability in zip(*all_masks(len(m), keep), strict=True):
        z = z / keep if inverted else z
        total += probability * minus_log_normal(z.reshape(-1, *[1] * (m.ndim - 1)) * m, std)
    return total


def same_pads(size, window, stride):
    """TensorFlow's SAME: ceil(size / stride) outputs; the odd zero goes last."""
    outputs = math.ceil(size / stride)
    total = max((outputs - 1) * stride + window - size, 0)
    return outputs, total // 2


def conv_same(x, weight, bias, stride):
    """Convolution of [N, C, H, W] with [D, C, K, K], TensorFlow's SAME padding."""
    n, _, height, width = x.shape
    filters, _, window, _ = weight.shape
    (out_h, top), (out_w, left) = same_pads(height, window, stride), same_pads(width, window, stride)
    out = np.zeros((n, filters, out_h, out_w))
    for i, j in itertools.product(range(out_h), range(out_w)):
        for a, b in itertools.product(range(window), range(window)):
            row, column = i * stride - top + a, j * stride - left + b
            if 0 <= row < height and 0 <= column < width:
                out[:, :, i, j] += x[:, :, row, column] @ weight[:, :, a, b].T
    return out if bias is None else out + bias[:, None, None]


def max_pool_same(x, window, stride):
    """Max-pooling of [N, C, H, W]; what lies outside the image does not count."""
    n, channels, height, width = x.shape
    (out_h, top), (out_w, left) = same_pads(height, window, stride), same_pads(width, window, stride)
    out = np.zeros((n, channels, out_h, out_w))
    for i, j in itertools.product(range(out_h), range(out_w)):
        rows = [r for r in range(i * stride - top, i * stride - top + window) if 0 <= r < height]
        columns = [c for c in range(j * stride - left, j * stride - left + window) if 0 <= c < width]
        out[:, :, i, j] = x[:, :, rows][:, :, :, columns].max((2, 3))
    return out


def local_response_norm(x, radius=4, bias=1.0, alpha=0.001 / 9, beta=0.75):
    """tf.nn.lrn over the channels of [N, C, H, W]."""
    out = np.zeros_like(x)
    for c in range(x.shape[1]):
        near = x[:, max(c - radius, 0) : c + radius + 1]
        out[:, c] = x[:, c] / (bias + alpha * (near**2).sum(1)) ** beta
    return out


def softmax(f):
    exponentials = np.exp(f - f.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def splitmix64(z):
    """SplitMix64's finaliser, in Python's whole numbers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def mask_element(seed, site, sample, row, element, *, size, keep, shared=False):
    """One z of calgp.gp.noise: bit by bit from the binary digits of `keep`."""
    stride = 0x9E3779B97F4A7C15
    key = splitmix64(splitmix64(seed % 2**64) ^ (site % 2**64))
    key = splitmix64((key + sample * stride) % 2**64)
    key = splitmix64((key + (0 if shared else row + 1) * stride) % 2**64)
    digits = f"{round(keep * 2**16):016b}".rstrip("0")
    z = 0
    for plane, digit in enumerate(reversed(digits)):
        word = splitmix64((key + (plane * math.ceil(size / 64) + element // 64) * stride) % 2**64)
        bit = word >> (element % 64) & 1
        z = z | bit if digit == "1" else z & bit
    return z


def gp_regression(k, k_new, k_new_new, y, noise):
    """Mean and variance of a Gaussian process at new inputs, given y = f + N(0, noise)."""
    inverse = np.linalg.inv(k + noise * np.eye(len(k)))
    return k_new @ inverse @ y, np.diag(k_new_new - k_new @ inverse @ k_new.T)


def laplace_variance(phi, curvature, phi_new):
    """φ*ᵀ (I + Σ_i h_i φ_i φ_iᵀ)⁻¹ φ* for each row of phi_new."""
    precision = np.eye(phi.shape[1])
    for row, h in zip(phi, curvature, strict=True):
        precision = precision + h * np.outer(row, row)
    covariance = np.linalg.inv(precision)
    return np.array([row @ covariance @ row for row in phi_new])


def fixed_mean_variance(c, curvature, c_new, centre, omega, variance):
    """φ*ᵀ (Σ_i h_i φ_i φ_iᵀ + I/σ²)⁻¹ φ* with φ = [cos, sin] / √n of (c − centre) Ω; a row at a time."""

    def phi(row):
        angles = [sum(row[j] * omega[j, k] for j in range(len(row))) for k in range(omega.shape[1])]
        return np.array([*np.cos(angles), *np.sin(angles)]) / np.sqrt(len(angles))

    precision = np.eye(2 * omega.shape[1]) / variance
    for row, h in zip(c - centre, curvature, strict=True):
        precision = precision + h * np.outer(phi(row), phi(row))
    covariance = np.linalg.inv(precision)
    return np.array([phi(row) @ covariance @ phi(row) for row in c_new - centre])


def cubic_interpolation(x, grid):
    """Keys's (1981) cubic convolution from an even grid to x: the matrix V, a double loop."""
    v = np.zeros((len(x), len(grid)))
    for i, place in enumerate((x - grid[0]) / (grid[1] - grid[0])):
        for j in range(len(grid)):
            s = abs(place - j)
            if s < 1:
                v[i, j] = 1.5 * s**3 - 2.5 * s**2 + 1
            elif s < 2:
                v[i, j] = -0.5 * s**3 + 2.5 * s**2 - 4 * s + 2
    return v


def gaussian_kl(mean, lower, prior):
    """KL[N(mean, L Lᵀ) ‖ N(0, prior)]; the determinant of L Lᵀ by L's diagonal, for it may be near to singular."""
    inverse = np.linalg.inv(prior)
    log_dets = np.linalg.slogdet(prior)[1] - 2 * np.log(abs(np.diag(lower))).sum()
    return 0.5 * (np.trace(inverse @ lower @ lower.T) + mean @ inverse @ mean - len(mean) + log_dets)


# Decisions (calgp.posthoc.decisions): loops over images and classes.


def risk_coverage(uncertainty, wrong):
    """The error among the k least uncertain, for every k; no two equally uncertain."""
    order = sorted(range(len(uncertainty)), key=lambda i: uncertainty[i])
    return [sum(wrong[i] for i in order[: k + 1]) / (k + 1) for k in range(len(order))]


def lac_score(probs, label):
    return 1 - probs[label]


def aps_score(probs, label, u):
    """The sum of what is more probable than the label, and u times its own; equal ones in the order of the classes."""
    more = [p for k, p in enumerate(probs) if p > probs[label] or (p == probs[label] and k < label)]
    return sum(more) + u * probs[label]


def conformal_rank(n, numerator, denominator):
    """⌈(n + 1) (numerator / denominator)⌉ in whole numbers."""
    return -(-(n + 1) * numerator // denominator)


def combined_outlier_score(unsure, *unusual, noticed):
    """Of shares of ordinary inputs beyond: of the entropy, and of scores that notice a share of the outliers."""
    return -np.log(unsure) + sum(np.log(1 - noticed + noticed / p) for p in unusual)
