"""Modules that take seconds to import, torch with them: each is fetched when a command first uses it.

So `calgp --help` and the answer to a mistyped flag appear at once.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "calgp": "data gp hub methods metrics nets paper report runs trackers training",
    "calgp.cli": "bars embedding_work job_tables tables",
    "calgp.data": "original",
    "calgp.embeddings": "cache embed",
    "calgp.nets": "pretrained",
    "calgp.report": "advice words",
    "calgp.runs": "predictions_file record results",
    "calgp.search": "engines halving image_scores jobs predict_shards sweep tune tune_methods",
}
_MODULES = {name: f"{place}.{name}" for place, names in _PLACES.items() for name in names.split()}
_MODULES |= {"folders": "calgp.runs.folder", "vector_runs": "calgp.embeddings.run"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(_MODULES[name])
