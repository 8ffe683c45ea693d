"""Doing: from the description of a run to files, and from files to predictions and scores."""

from calgp.runs.calibrating import calibrate
from calgp.runs.comparison import Row, compare, own_scores
from calgp.runs.ensembles import ensemble
from calgp.runs.evaluation import Evaluation, evaluate, predict_files, score
from calgp.runs.export import Exported, export, export_model
from calgp.runs.folder import Card, RunFolder, shipped_run
from calgp.runs.memory import keep_freed_memory
from calgp.runs.run import Run, from_json, to_json
from calgp.runs.training import Interrupted, Step, fit, train
from calgp.runs.training_data import TrainingData

__all__ = [
    "Card",
    "Evaluation",
    "Exported",
    "Interrupted",
    "Row",
    "Run",
    "RunFolder",
    "Step",
    "TrainingData",
    "calibrate",
    "compare",
    "ensemble",
    "evaluate",
    "export",
    "export_model",
    "fit",
    "from_json",
    "keep_freed_memory",
    "own_scores",
    "predict_files",
    "score",
    "shipped_run",
    "to_json",
    "train",
]
