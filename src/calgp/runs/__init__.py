"""Doing: from the description of a run to files, and from files to predictions and scores."""

from calgp.runs.calibrating import calibrate
from calgp.runs.comparison import Row, compare, own_scores
from calgp.runs.deciding import decide
from calgp.runs.devices import open_device, restarted
from calgp.runs.ensembles import ensemble
from calgp.runs.evaluation import Evaluation, Predictor, decide_files, evaluate, predict_files, score
from calgp.runs.export import Exported, export, export_model
from calgp.runs.folder import Card, RunFolder, shipped_run
from calgp.runs.process import flush_denormals, keep_freed_memory, tune_process
from calgp.runs.ranks import gathered, on_first, together
from calgp.runs.run import Run, from_json, identity, to_json
from calgp.runs.training import Interrupted, Step, fit, train
from calgp.runs.training_data import TrainingData
from calgp.runs.verification import Check, verify

__all__ = [
    "Card",
    "Check",
    "Evaluation",
    "Exported",
    "Interrupted",
    "Predictor",
    "Row",
    "Run",
    "RunFolder",
    "Step",
    "TrainingData",
    "calibrate",
    "compare",
    "decide",
    "decide_files",
    "ensemble",
    "evaluate",
    "export",
    "export_model",
    "fit",
    "flush_denormals",
    "from_json",
    "gathered",
    "identity",
    "keep_freed_memory",
    "on_first",
    "open_device",
    "own_scores",
    "predict_files",
    "restarted",
    "score",
    "shipped_run",
    "to_json",
    "together",
    "train",
    "tune_process",
    "verify",
]
