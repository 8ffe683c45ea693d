"""A run folder of an upgraded classifier: the network as a program, and all that was fitted, read without pickle."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp.data import Images
from calgp.errors import CalgpError
from calgp.gp import Batch, Passes, Predictive
from calgp.methods import METHODS
from calgp.nets import Task, Wrapped
from calgp.nets.last_layer import LastLayer
from calgp.nets.program import Program, ProgramNetwork, describe
from calgp.posthoc.outliers import Threshold
from calgp.run import Run
from calgp.runs import Calibration, Card, Classifier, Evaluation, FittedDecisions, RunFolder
from calgp.runs.environment import environment
from calgp.runs.evaluation import on_cpu
from calgp.runs.export import Exportable, outputs_of
from calgp.runs.folder import check_new
from calgp.runs.reading import read_header, read_tensors, wrap_read_errors
from calgp.runs.record import parse, to_json
from calgp.runs.run_outliers import ONE_PASS
from calgp.upgraded.classifier import Kept, Upgrade, UpgradedClassifier

MODEL = "model.safetensors"
UNKNOWN = "unknown"
NETWORK = "network."


class UpgradedRun(Classifier):
    """An upgraded classifier with its folder: a `Classifier` whose one pass is the network's own.

    It takes images, as all classifiers of run folders do. `upgraded` is what takes tensors.
    """

    maskless = "An upgraded classifier"

    def __init__(self, upgraded: UpgradedClassifier, card: Card, **options: Any) -> None:
        super().__init__(upgraded.network.network, card, **options)  # type: ignore[arg-type]  (it predicts itself)
        self.upgraded, self.outlier_names = upgraded, upgraded.outlier_names

    @staticmethod
    def read(folder: RunFolder, card: Card, *, decided: bool = True, fabric: Fabric | None = None) -> "UpgradedRun":
        """From the files of a folder, whose card has been read."""
        path, task = folder.path / MODEL, card.task
        header = read_header(path)
        tensors = read_tensors(path, header)
        with wrap_read_errors(path):
            fitted = parse(Upgrade, header.metadata["upgrade"])
            if (fitted.classes, fitted.shape) != (card.classes, (task.channels, task.height, task.width)):
                raise ValueError("it is not of the classes and images that run.json describes")
            own = {name.removeprefix(NETWORK): each for name, each in tensors.items() if name.startswith(NETWORK)}
            program = Program(header.metadata["program"], own)
            network = ProgramNetwork(program, fitted.layer, tensors["weight"], tensors.get("bias"))
            upgraded = UpgradedClassifier.of(network, fitted, tensors)
        decisions = folder.decisions() if decided else None
        return UpgradedRun(upgraded, card, folder=folder, decisions=decisions, fabric=fabric)

    @property
    def outlier_threshold(self) -> Threshold | None:
        return super().outlier_threshold or self.upgraded.fitted.threshold

    def predict_as_trained(self, data: Iterable[Batch], how: Passes, *, seed: int) -> Iterator[Predictive]:
        for x, _ in data:
            c, f = self.upgraded.network(x)
            yield on_cpu(self.upgraded.scored(c.cpu(), f.cpu()))

    def sample_cost(self, x: Tensor, how: Passes) -> tuple[int, bool]:
        return 4 * 16 * x.numel(), False

    def calibrate(self, calibrator: str = "temperature", **options: Any) -> Calibration:
        raise CalgpError(f"{self.folder.path} is calibrated already: upgrade it again with other held-out images.")

    def evaluate(self, source: str | None = None, **options: Any) -> Evaluation:
        """As of any classifier; a folder that was saved without a source takes the first one that has its classes."""
        found = super().evaluate(source, **options)
        if self.card.run.source == UNKNOWN and not found.outside and found.corruption is None:
            self.card = replace(self.card, run=replace(self.card.run, source=found.source))
            self.folder.create(self.card)
        return found

    def test_images(
        self, source: str, *, directory: Path | None = None, convert: bool = False, skip_unreadable: bool = False
    ) -> Images:
        """The test part of a source; a folder that was saved without one needs one to be named."""
        if source == UNKNOWN:
            raise CalgpError(
                f"{self.folder.path} does not know its test images: give a source, such as --source folder:photos, or "
                "save it with save(path, source='folder:photos')."
            )
        return super().test_images(source, directory=directory, convert=convert, skip_unreadable=skip_unreadable)

    def decide(self, *, held_out: Any = None, **options: Any) -> FittedDecisions:
        """As of any classifier, but it must be given held-out images: its folder knows of none."""
        if held_out is None:
            raise CalgpError(
                f"{self.folder.path} was upgraded and keeps no hold-out: give coverage or error to `calgp.upgrade`, or "
                "held_out to decide in Python."
            )
        return super().decide(held_out=held_out, **options)

    def deployable(self, how: Passes, seed: int) -> "DeployableUpgrade":
        return DeployableUpgrade(self.upgraded).eval()


class DeployableUpgrade(Exportable):
    """Images in [0, 1] ↦ what `UpgradedClassifier.predict` says of them, in one pass."""

    def __init__(self, upgraded: UpgradedClassifier) -> None:
        super().__init__()
        self.network, self.upgraded, self.kept = upgraded.network.network, upgraded, Kept()
        self.how, self.step, classes = ONE_PASS, upgraded.outlier.step, len(upgraded.classes)
        upgraded.predictive_at_once(torch.zeros(1, classes), torch.eye(classes)[None], self.kept)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        c, f = self.network(images)
        covariance = self.upgraded.posterior.logit_covariance_at_once(c)
        predictive = self.upgraded.predictive_at_once(f, covariance, self.kept)
        score = self.upgraded.outlier.elementary(c, self.upgraded.as_decided(predictive))
        return tuple(each.to(images.dtype) for each in (*outputs_of(predictive).values(), score))


def write_folder(
    upgraded: UpgradedClassifier,
    path: Path,
    *,
    source: str | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> None:
    """Make a run folder: run.json, model.safetensors (with the network as a program), decisions.json."""
    fitted, last, shape = upgraded.fitted, upgraded.network, upgraded.fitted.shape
    if not isinstance(last, LastLayer) or len(shape) != 3 or shape[0] > 4:
        raise CalgpError(
            "A run folder is for networks that take images [N, channels, height, width]; this one was upgraded with "
            f"inputs of {list(shape) or 'an unknown form'}. Save a .safetensors file instead."
        )
    for name, each in (("mean", mean), ("std", std)):
        if each is not None and len(each) != shape[0]:
            raise CalgpError(f"Invalid {name}={list(each)}: must have a number for each of {shape[0]} channels.")
    described, network = describe(last, shape, mean=mean, std=std)
    folder = RunFolder(path)
    check_new(path)
    name, task = type(last.network).__name__, Task(*shape, classes=len(fitted.classes))
    run = Run(METHODS["cnn"], Wrapped(name), source=UNKNOWN if source is None else source)
    folder.create(Card(run, task, fitted.classes, fitted.train, UNKNOWN, (), environment(), upgraded=name))
    with folder.owned():
        if fitted.decisions is not None:
            folder.write_decisions(fitted.decisions)
        tensors = upgraded.tensors() | {f"{NETWORK}{name}": each for name, each in network.items()}
        folder.write_tensors(MODEL, tensors, {"upgrade": to_json(fitted), "program": described})
