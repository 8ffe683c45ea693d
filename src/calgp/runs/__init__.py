"""A trained run: its folder, and a `Classifier` that predicts, is scored, calibrated and exported.

How a run is trained is next door, in `training`; nothing here draws a figure or knows the command line.
"""

import calgp.runs.quick_start  # noqa: F401 (before anything else imports lightning-fabric)
from calgp.run import Run
from calgp.runs.card import Card
from calgp.runs.classifier import Classifier, load
from calgp.runs.comparison import Row, compare
from calgp.runs.description import from_json, identity, to_json
from calgp.runs.devices import open_device, restarted
from calgp.runs.ensembles import ensemble
from calgp.runs.evaluation import score
from calgp.runs.export import Exported
from calgp.runs.failures import Interrupted
from calgp.runs.folder import RunFolder, open_folder, shipped_run
from calgp.runs.prediction import Prediction
from calgp.runs.process import flush_denormals, keep_freed_memory, tune_process
from calgp.runs.ranks import gathered, on_first, together
from calgp.runs.results import Calibration, Evaluation, FittedDecisions
from calgp.runs.training_data import TrainingData, cautions
from calgp.runs.verification import Check

__all__ = [
    "Calibration", "Card", "Check", "Classifier", "Evaluation", "Exported", "FittedDecisions", "Interrupted",
    "Prediction", "Row", "Run", "RunFolder", "TrainingData", "cautions", "compare", "ensemble", "flush_denormals",
    "from_json", "gathered", "identity", "keep_freed_memory", "load", "on_first", "open_device", "open_folder",
    "restarted", "score", "shipped_run", "to_json", "together", "tune_process",
]  # fmt: skip
