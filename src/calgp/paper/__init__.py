"""The paper as data: its experiments, their scales, the published numbers; run, judged and shown.

It may use every room below; how many runs are made at a time, and where, is `search.jobs` and `search.engines`.
"""

from .costs import known_costs, measured_costs, priced
from .experiments import EXPERIMENTS, Experiment, chosen
from .page import write_experiment
from .queue import Coverage, Plan, coverage, make_plan, run_queue, stale
from .reproduce import jobs_of, missing, rows_of, run_missing
from .rows import Cell, Row
from .scales import SCALES, Scale, find_scale

__all__ = [
    "EXPERIMENTS", "SCALES", "Cell", "Coverage", "Experiment", "Plan", "Row", "Scale", "chosen", "coverage",
    "find_scale", "jobs_of", "known_costs", "make_plan", "measured_costs", "missing", "priced", "rows_of",
    "run_missing", "run_queue", "stale", "write_experiment",
]  # fmt: skip
