import json
import shutil

import pytest

from calgp.errors import CalgpError
from calgp.runs import RunFolder, compare


@pytest.fixture
def two_seeds(trained, tmp_path):
    """The same run twice, the second with another seed and other scores."""
    folders = []
    for seed, shift in ((0, 0.0), (1, 0.2)):
        path = tmp_path / f"seed{seed}"
        shutil.copytree(trained.path, path)
        card = json.loads((path / "run.json").read_text())
        card["run"]["seed"] = seed
        (path / "run.json").write_text(json.dumps(card))
        scores = json.loads((path / "scores-digits.json").read_text())
        scores["scores"]["err"] = 0.3 + shift
        (path / "scores-digits.json").write_text(json.dumps(scores))
        folders.append(RunFolder(path))
    return folders


def test_seeds_of_one_setting_make_one_row_with_mean_and_standard_error(two_seeds):
    (row,) = compare(two_seeds)
    assert row.seeds == (0, 1)
    # mean of 0.3 and 0.5; standard deviation √0.02 over √2
    assert row.metrics["err"] == pytest.approx((0.4, 0.1))
    assert row.metrics["mnll"][1] == 0
    assert set(row.auroc) == {"letters"}


def test_a_single_seed_has_no_standard_error(trained):
    (row,) = compare([trained])
    assert row.metrics["err"][1] is None


def test_a_run_without_scores_says_how_to_make_them(two_seeds):
    (two_seeds[0].path / "scores-digits.json").unlink()
    with pytest.raises(CalgpError, match="calgp evaluate"):
        compare(two_seeds)
