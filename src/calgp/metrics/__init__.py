"""How good are predicted probabilities? Errors, likelihoods, calibration (1)-(3), out-of-distribution detection.

Predictions come in as *log-probabilities* (natural logarithm, rows that sum to one: what `log_softmax` gives).
`outcomes` reduces each batch to a few numbers per example, and everything else is computed from those columns, so a
million predictions of a thousand classes fit, and batches or ranks are joined without loss by `Outcomes.cat`. All
results are accumulated in float64.

>>> import torch
>>> log_probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]).log()
>>> scores(outcomes(log_probs, torch.tensor([0, 1, 1]))).err
0.3333333333333333
"""

from ._bootstrap import Difference as Difference
from ._bootstrap import Interval as Interval
from ._bootstrap import bootstrap as bootstrap
from ._bootstrap import bootstrap_ood as bootstrap_ood
from ._bootstrap import bootstrap_scores as bootstrap_scores
from ._bootstrap import paired_ood as paired_ood
from ._bootstrap import paired_scores as paired_scores
from ._bootstrap import resample_weights as resample_weights
from ._bootstrap import resampled_ood as resampled_ood
from ._bootstrap import resampled_scores as resampled_scores
from ._calibration import ECE_PRESETS as ECE_PRESETS
from ._calibration import EcePreset as EcePreset
from ._calibration import Reliability as Reliability
from ._calibration import bin_excess as bin_excess
from ._calibration import classwise_ece as classwise_ece
from ._calibration import classwise_reliability as classwise_reliability
from ._calibration import ece as ece
from ._calibration import mce as mce
from ._calibration import preset_ece as preset_ece
from ._calibration import reliability as reliability
from ._confusion import ClassScores as ClassScores
from ._confusion import Confusion as Confusion
from ._confusion import confusion as confusion
from ._ood import OutOfDistribution as OutOfDistribution
from ._ood import ood as ood
from ._outcomes import Outcomes as Outcomes
from ._outcomes import brier as brier
from ._outcomes import entropy as entropy
from ._outcomes import error_rate as error_rate
from ._outcomes import mnll as mnll
from ._outcomes import outcomes as outcomes
from ._scores import Scores as Scores
from ._scores import scores as scores
