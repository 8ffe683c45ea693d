"""Doing: from the description of a run to files, and from files to predictions and scores."""

import calgp.runs.quick_start  # noqa: F401 (before anything else imports lightning-fabric)
from calgp.run import Run
from calgp.runs.card import Card
from calgp.runs.classifier import Classifier, load
from calgp.runs.comparison import Row, compare, own_scores
from calgp.runs.defaults import resolved
from calgp.runs.description import from_json, identity, to_json
from calgp.runs.devices import open_device, restarted
from calgp.runs.ensembles import ensemble
from calgp.runs.evaluation import score
from calgp.runs.export import Exported
from calgp.runs.failures import Interrupted
from calgp.runs.folder import RunFolder, open_folder, shipped_run
from calgp.runs.loop import Step, fit
from calgp.runs.prediction import Prediction
from calgp.runs.process import flush_denormals, keep_freed_memory, tune_process
from calgp.runs.ranks import gathered, on_first, together
from calgp.runs.results import Calibration, Evaluation, FittedDecisions
from calgp.runs.training import new_folder, train, train_run
from calgp.runs.training_data import TrainingData, cautions
from calgp.runs.upgraded import UpgradedClassifier, UpgradedEvaluation
from calgp.runs.upgrading import upgrade
from calgp.runs.verification import Check

__all__ = [
    "Calibration",
    "Card",
    "Check",
    "Classifier",
    "Evaluation",
    "Exported",
    "FittedDecisions",
    "Interrupted",
    "Prediction",
    "Row",
    "Run",
    "RunFolder",
    "Step",
    "TrainingData",
    "UpgradedClassifier",
    "UpgradedEvaluation",
    "cautions",
    "compare",
    "ensemble",
    "fit",
    "flush_denormals",
    "from_json",
    "gathered",
    "identity",
    "keep_freed_memory",
    "load",
    "new_folder",
    "on_first",
    "open_device",
    "open_folder",
    "own_scores",
    "resolved",
    "restarted",
    "score",
    "shipped_run",
    "to_json",
    "together",
    "train",
    "train_run",
    "tune_process",
    "upgrade",
]
