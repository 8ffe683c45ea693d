"""Benchmarks: one file a question, all side by side in one process. `make bench`, or `python -m bench --help`."""
