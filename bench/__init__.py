"""Benchmarks: one file a question, everything side by side in one process. `make bench`, or `python -m bench --help`."""
