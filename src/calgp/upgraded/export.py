"""An upgraded classifier as one file that needs no calgp: images in, probabilities, uncertainty, outlier score out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from calgp.posthoc.outliers import OutlierScore
from calgp.runs.export import (
    OUTPUTS,
    PROGRAM,
    SUFFIXES,
    Exported,
    Target,
    _probes,
    described,
    outlier_output,
    outputs_of,
    verified,
)
from calgp.runs.record import to_json
from calgp.runs.writing import wrap_os_errors, write_whole
from calgp.upgraded.classifier import Kept, UpgradedClassifier

if TYPE_CHECKING:
    from calgp.upgraded.run import UpgradedRun


class DeployableUpgrade(nn.Module):
    """Images in [0, 1] ↦ what `UpgradedClassifier.predict` says of them, in one pass."""

    def __init__(self, upgraded: UpgradedClassifier) -> None:
        super().__init__()
        self.network, self.upgraded, self.kept = upgraded.network.network, upgraded, Kept()
        classes = len(upgraded.classes)
        upgraded.predictive_at_once(torch.zeros(1, classes), torch.eye(classes)[None], self.kept)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        c, f = self.network(images)
        covariance = self.upgraded.posterior.logit_covariance_at_once(c)
        predictive = self.upgraded.predictive_at_once(f, covariance, self.kept)
        outlier: OutlierScore = self.upgraded.outlier
        score = outlier.elementary(c, self.upgraded.as_decided(predictive))
        found = (*outputs_of(predictive).values(), score)
        return tuple(each.to(images.dtype) for each in found)


def export_upgraded(run: UpgradedRun, path: Path | None, *, to: Target) -> Exported:
    """Write it, and check that it gives what torch gives."""
    card, fitted, how = run.card, run.upgraded.fitted, run.passes()
    path = run.folder.path / f"model{SUFFIXES.get(to, '')}" if path is None else path
    x = _probes(card.task)
    found = run.upgraded.predict(x)
    expected = outputs_of(found.predictive) | {"outlier_score": found.outlier_score}
    metadata = described(card, how, 0, OUTPUTS | outlier_output(fitted.outlier)) | {
        "calibrator": None, "outlier_threshold": fitted.threshold and to_json(fitted.threshold),
        "decisions": run.fitted_decisions and to_json(run.fitted_decisions),
    }  # fmt: skip
    wanted = {name: each.float() for name, each in expected.items() if each is not None}
    device = next(run.model.parameters()).device
    try:
        run.model.cpu()
        module, step = DeployableUpgrade(run.upgraded).eval(), run.upgraded.outlier.step
        data, worst = verified(module, x, wanted, to=to, metadata=metadata, step=step)
    finally:
        run.model.to(device)
    program = path.with_name(f"{path.stem}_predict.py")
    with wrap_os_errors(path.parent):
        write_whole(path, data)
        write_whole(program, PROGRAM.read_bytes())
    return Exported(path, program, len(data), worst, len(x), how, 0, metadata)
