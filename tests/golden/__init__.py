"""Run folders that older versions have left."""

from pathlib import Path

from calgp.runs import RunFolder


def sampled_run() -> RunFolder:
    """What the package shipped until 2026-11-17: CNN+GP(SORF) on digits, trained and predicted by sampled masks."""
    return RunFolder(Path(__file__).parent / "sampled")
