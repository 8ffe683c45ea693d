"""Training: from the description of a run to its folder, step by step, and the same again after a kill.

What a step minimises is `gp.Bound`; what comes out is a `runs.Classifier`.
"""

import calgp.runs.quick_start  # noqa: F401 (before anything else imports lightning-fabric)
from calgp.training.defaults import default_precision, resolved
from calgp.training.loop import Step, fit
from calgp.training.run_training import described_run, new_folder, train, train_run

__all__ = ["Step", "default_precision", "described_run", "fit", "new_folder", "resolved", "train", "train_run"]
