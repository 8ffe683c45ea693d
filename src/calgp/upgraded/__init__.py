"""A classifier that was trained elsewhere, with what it lacked: temperature, Laplace, outlier scores, decisions.

Its labels stay as they are; its network is run, never trained.
"""

import calgp.runs.quick_start  # noqa: F401 (before anything else imports lightning-fabric)
from calgp.upgraded.classifier import UpgradedClassifier, UpgradedEvaluation
from calgp.upgraded.fit import upgrade

__all__ = ["UpgradedClassifier", "UpgradedEvaluation", "upgrade"]
