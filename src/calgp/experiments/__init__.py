"""The paper's experiments as data; run, judged and shown."""

from .costs import costs_of, priced
from .page import write_experiment
from .paper import EXPERIMENTS, Experiment, chosen
from .reproduce import Job, Progress, Where, jobs_of, missing, rows_of, run_missing
from .rows import Cell, Row
from .scales import SCALES, Scale, find_scale

__all__ = [
    "EXPERIMENTS", "SCALES", "Cell", "Experiment", "Job", "Progress", "Row", "Scale", "Where", "chosen", "costs_of",
    "find_scale", "jobs_of", "missing", "priced", "rows_of", "run_missing", "write_experiment",
]  # fmt: skip
