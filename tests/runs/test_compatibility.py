"""Run folders that older versions have left: tests/golden/format-N, made by the first version that wrote format N."""

import shutil
from pathlib import Path

import pytest
import torch

from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.runs import RunFolder
from calgp.runs.card import FORMAT
from calgp.training import train_run
from folders import metadata, predictions, tensors
from golden import make, sampled_run

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("format-*"))
# another machine, another torch: float32, added in another order
ROUNDING = {"atol": 1e-4, "rtol": 0.0}

every_format = pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)


def test_the_format_that_is_written_has_a_golden_folder():
    assert f"format-{FORMAT}" in [path.name for path in GOLDEN]


@every_format
def test_a_golden_run_loads_and_predicts_as_it_did(golden):
    folder = RunFolder(golden / "run")
    card, images = folder.card(), make.images()
    assert card.run.method.n_rf == 8 and card.classes == tuple("0123456789")  # type: ignore[attr-defined]
    assert [record.step for record in folder.log() if record.kind == "holdout"] == [4, 6]
    predicted = predict(folder.model(), [(images.pixels(), images.rows)], passes=4, seed=0)
    stored = predictions(folder, make.SOURCE)
    torch.testing.assert_close(predicted.probs, stored["log_probs"].exp(), **ROUNDING)
    calibration = folder.calibration()
    assert calibration is not None
    calibrated = calibration.fitted.apply(predicted.log_probs)
    stored = predictions(folder, make.SOURCE, "temperature")
    torch.testing.assert_close(calibrated.exp(), stored["log_probs"].exp(), **ROUNDING)
    assert {evaluation.calibrator for evaluation in folder.evaluations()} == {None, "temperature"}


def test_the_run_that_was_shipped_before_predicts_as_it_did():
    """It knows no `integrate`: its masks are sampled."""
    folder, images = sampled_run(), load("digits", "test").take(torch.arange(20))
    assert not folder.model().integrate
    predicted = predict(folder.model(), [(images.pixels(), images.rows)], seed=0)
    assert predicted.samples == 50
    torch.testing.assert_close(predicted.probs, predictions(folder, "digits")["log_probs"][:20].exp(), **ROUNDING)


@every_format
def test_a_golden_checkpoint_is_gone_on_with(golden, tmp_path, fabric):
    """To the weights of the golden run, which went on from the same checkpoint when it was made."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(golden / "interrupted", folder.path)
    assert metadata(folder, "checkpoint.safetensors")["step"] == 3
    resumed = train_run(folder.card().run, folder, fabric, resume=True).model.state_dict()
    for name, value in RunFolder(golden / "run").model().state_dict().items():
        torch.testing.assert_close(resumed[name], value, **ROUNDING)


def test_a_checkpoint_without_sums_is_gone_on_with(tmp_path, fabric):
    """As calgp wrote them before 2026-11-16: the step alone. Only one line of the log averages fewer steps."""
    golden, folder = GOLDEN[0], RunFolder(tmp_path / "run")
    shutil.copytree(golden / "interrupted", folder.path)
    folder.write_tensors("checkpoint.safetensors", tensors(folder, "checkpoint.safetensors"), {"step": 3})
    resumed = train_run(folder.card().run, folder, fabric, resume=True).model.state_dict()
    for name, value in RunFolder(golden / "run").model().state_dict().items():
        torch.testing.assert_close(resumed[name], value, **ROUNDING)


@every_format
def test_golden_folders_are_small(golden):
    assert sum(file.stat().st_size for file in golden.rglob("*")) < 100_000


UNWHITENED = Path(__file__).parents[1] / "golden" / "unwhitened"  # Ω stored as ε/ℓ, by calgp before 2026-11-17


@pytest.mark.parametrize("name", ["masks", "ard", "mean-field"])
def test_frequencies_stored_as_omega_predict_as_they_did(name):
    folder, images = RunFolder(UNWHITENED / name), make.images()
    assert "gp.layers.0.frequencies.weight" in tensors(folder, "model.safetensors")
    predicted = predict(folder.model(), [(images.pixels(), images.rows)], passes=4, seed=0)
    stored = predictions(folder, make.SOURCE)
    torch.testing.assert_close(predicted.probs, stored["log_probs"].exp(), **ROUNDING)


def test_a_checkpoint_with_frequencies_stored_as_omega_is_refused(tmp_path, fabric):
    """Its optimiser's moments are those of another parameter."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(UNWHITENED / "interrupted", folder.path)
    with pytest.raises(CalgpError, match="earlier version, which stored the frequencies"):
        train_run(folder.card().run, folder, fabric, resume=True)
