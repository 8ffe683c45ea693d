"""Decisions from predictions: when to answer, and which classes to keep, with promises that a hold-out can make.

Two kinds, each a frozen value that `fit` finds on held-out predictions and that is used on any others:

- `Selection` answers where uncertainty is below a threshold and abstains elsewhere: answers err at most so often;
- `PredictionSets` gives a set of classes for each image, which holds the true one at least so often (split conformal).

Both promises are about images that are exchangeable with the hold-out, and need a hold-out that nothing else has been
fitted on: neither the model nor its calibrator. Everything is computed in float64.

>>> import torch
>>> log_probs = torch.tensor([[0.7, 0.2, 0.1]]).log().expand(99, 3)  # 70 of 99 are the first class, as it says
>>> y = torch.tensor([0] * 70 + [1] * 20 + [2] * 9)
>>> sets = PredictionSets.fit(log_probs, y, coverage=0.9, kind="lac")
>>> sets.apply(log_probs[:1])
tensor([[ True,  True, False]])
"""

from calgp.posthoc.decisions.prediction_sets import KINDS, PredictionSets, conformal_quantile, conformity, keyed_uniform
from calgp.posthoc.decisions.risk import SCORES, RiskCoverage, risk_coverage, uncertainty
from calgp.posthoc.decisions.selection import Selection, binomial_cdf, clopper_pearson
from calgp.posthoc.decisions.wanted import Decisions, Wanted

__all__ = [
    "KINDS", "SCORES", "Decisions", "PredictionSets", "RiskCoverage", "Selection", "Wanted", "binomial_cdf",
    "clopper_pearson", "conformal_quantile", "conformity", "keyed_uniform", "risk_coverage", "uncertainty",
]  # fmt: skip
