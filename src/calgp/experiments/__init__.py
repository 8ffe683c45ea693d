"""The paper's experiments as data; run, judged and shown."""

from .costs import known_costs, measured_costs, priced
from .page import write_experiment
from .paper import EXPERIMENTS, Experiment, chosen
from .queue import make_plan, run_queue, stale
from .reproduce import Job, Paths, Progress, jobs_of, missing, rows_of, run_missing
from .rows import Cell, Row
from .scales import SCALES, Scale, find_scale

__all__ = [
    "EXPERIMENTS", "SCALES", "Cell", "Experiment", "Job", "Paths", "Progress", "Row", "Scale", "chosen", "find_scale",
    "jobs_of", "known_costs", "make_plan", "measured_costs", "missing", "priced", "rows_of", "run_missing", "run_queue",
    "stale", "write_experiment",
]  # fmt: skip
