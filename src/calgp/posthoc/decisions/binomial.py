"""The binomial distribution of errors among answers, exactly."""

from scipy.special import bdtr, betaincinv

from calgp.posthoc.decisions.checks import check_share


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) ≤ k), exactly.

    >>> round(binomial_cdf(1, 3, 0.5), 6)
    0.5
    """
    return float(bdtr(min(k, n), n, p))


def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a share of which k in n were seen (Clopper & Pearson 1934); (0, 1) where n is 0.

    >>> [round(end, 4) for end in clopper_pearson(0, 10)]
    [0.0, 0.3085]
    """
    tail = (1 - check_share("confidence", confidence)) / 2
    low = 0.0 if k <= 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k >= n else float(betaincinv(k + 1, n - k, 1 - tail))
    return low, high
