"""Classifier: a trained run as one object. Everything that predicts, predicts through it."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from lightning_fabric import Fabric
from torch import Tensor

from calgp.data import Corruption, Images
from calgp.errors import CalgpError
from calgp.gp import Batch, Engine, Model, Passes, Predictive, Sampling, sample_cost
from calgp.posthoc import calibration
from calgp.posthoc.calibration import FLAT
from calgp.posthoc.decisions import Wanted
from calgp.posthoc.outliers import Threshold
from calgp.run import SEED
from calgp.runs import evaluation as evaluations
from calgp.runs.card import Card
from calgp.runs.decision_metrics import decide_on
from calgp.runs.description import to_json
from calgp.runs.devices import one_device
from calgp.runs.environment import arithmetic
from calgp.runs.evaluation import batches, columns_of, over_ranks, predict_on_cpu, test_images
from calgp.runs.export import Deployable, Exportable, Exported, Target, export_model
from calgp.runs.fit_calibrator import calibrated_share, check_held_out, fitted_on, prior_of, with_caution
from calgp.runs.fit_decisions import fit_decisions, not_calibrated_on, uniform_of, warning
from calgp.runs.folder import RunFolder, open_folder
from calgp.runs.inputs import ImageLike, to_pixels
from calgp.runs.prediction import OneShot, Prediction
from calgp.runs.ranks import check_same, owned, wrap_lost_ranks
from calgp.runs.results import Calibration, Evaluation, FittedDecisions
from calgp.runs.run_outliers import ONE_PASS, RunOutliers, read_outliers
from calgp.runs.training_data import held_out_images
from calgp.runs.verification import Check, verify_run


class Classifier:
    """A trained run: its model, calibrator, decisions and card, loaded and checked once.

    >>> import calgp
    >>> shipped = calgp.load("shipped")
    >>> shipped.classes[:3]
    ('0', '1', '2')
    >>> len(shipped.predict(torch.zeros(2, 1, 28, 28)))
    2

    Args:
        model, card: what was trained, and its description.
        folder: where results are kept; None: the run is in memory only.
        calibration, decisions, outliers: what was fitted on its hold-out, if anything.
        fabric: where it runs; None: the best device of this machine.
    """

    maskless = ""  # what it is, if it can predict in one pass only

    def __init__(
        self,
        model: Model,
        card: Card,
        *,
        folder: RunFolder | None = None,
        calibration: Calibration | None = None,
        decisions: FittedDecisions | None = None,
        outliers: RunOutliers | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        self.fabric = one_device(fabric)
        self.model, self.card = model.to(self.fabric.device).eval(), card
        self.fitted_decisions, self.outliers = decisions, outliers
        # of the columns of `Predictive.outlier_scores`
        self.outlier_names: tuple[str, ...] = () if outliers is None else outliers.names
        self._folder = folder and RunFolder(folder.path, writes=folder.writes and self.fabric.is_global_zero)
        self.calibration = calibration  # what probabilities go through; None: they are as trained

    @staticmethod
    def load(
        folder: RunFolder, *, fabric: Fabric | None = None, calibrated: bool = True, decided: bool = True
    ) -> "Classifier":
        """A finished run of a folder; each of its files is read once.

        With `calibrated` or `decided` false, calibration.json or decisions.json is not read, and may be damaged.
        """
        card = folder.card()
        if card.upgraded is not None:
            from calgp.upgraded.run import UpgradedRun  # it is a Classifier

            return UpgradedRun.read(folder, card, decided=decided, fabric=fabric)
        if card.vectors is not None:
            from calgp.embeddings.run import VectorRun

            return VectorRun.read(folder, card, calibrated=calibrated, decided=decided, fabric=fabric)
        return Classifier(
            folder.model(card), card, folder=folder, calibration=folder.calibration() if calibrated else None,
            decisions=folder.decisions() if decided else None, outliers=read_outliers(folder), fabric=fabric,
        )  # fmt: skip

    @property
    def calibrator(self) -> calibration.Calibrator | None:
        return None if self.calibration is None else self.calibration.fitted

    @property
    def folder(self) -> RunFolder:
        if self._folder is None:
            raise CalgpError("This classifier is in memory only: it has no run folder to keep or find results in.")
        return self._folder

    @property
    def classes(self) -> tuple[str, ...]:
        return self.card.classes

    @property
    def active_decisions(self) -> FittedDecisions | None:
        """The run's decisions, if they were fitted to such probabilities as it gives now."""
        fitted = self.fitted_decisions
        now = None if self.calibration is None else self.calibration.probabilities
        return fitted if fitted is not None and fitted.calibration == now else None

    @property
    def outlier_threshold(self) -> Threshold | None:
        """Beyond which the first of `outlier_names` calls an image an outlier; None: that was not decided."""
        decided = None if self.fitted_decisions is None else self.fitted_decisions.outliers
        return self.outliers.threshold if decided is None and self.outliers is not None else decided

    def passes(self, count: int | None = None, engine: Engine | None = None, seed: int = 0) -> Passes:
        """How predictions are computed: as asked for, or the model's own way. Refuses what cannot be."""
        if self.maskless and (count not in (None, 1) or engine not in (None, "moments")):
            raise CalgpError(f"{self.maskless} has no masks to draw: one pass is all. Leave out passes and engine.")
        if count is not None and count < 1:
            raise CalgpError(f"Invalid passes={count}: must be at least 1, such as 50.")
        if engine not in (None, *get_args(Engine)):
            raise CalgpError(f"Invalid engine={engine!r}: must be {' or '.join(get_args(Engine))}.")
        if seed not in SEED:
            raise CalgpError(f"Invalid seed={seed}: must be a whole number {SEED}, such as 0.")
        return ONE_PASS if self.maskless else Passes.of(self.model, count, engine)

    def calibrated_by(self, calibration: Calibration | None) -> "Classifier":
        """The same run with another calibrator, or with none; nothing is loaded again."""
        other = copy.copy(self)
        other.calibration = calibration
        return other

    def _identity(self, *asked: object) -> dict[str, object]:
        """What all ranks that predict together must share."""
        run = {"the run": to_json(self.card.run), "its calibrator": self.calibration, "what is asked": asked}
        return arithmetic(self.fabric).shared() | run

    def predict(
        self,
        images: ImageLike | Sequence[ImageLike],
        *,
        passes: int | None = None,
        engine: Engine | None = None,
        seed: int = 0,
        skip_unreadable: bool = False,
    ) -> Prediction:
        """What images show, and how certain that is.

        Args:
            images: a file, a folder of files, a Pillow image, an array or tensor of images, or a list of these.
            passes, engine, seed: as for `calgp.predict`.
            skip_unreadable: leave out files that cannot be read; the result's `unreadable` says why.

        The same image always gets the same answer, whatever stands beside it.
        """
        names, x, unreadable = to_pixels(images, self.card.task, skip_unreadable=skip_unreadable)
        how, parameter = self.passes(passes, engine, seed), next(self.model.parameters())

        def predicted(parts: list[slice]) -> Iterator[Predictive]:
            rows = torch.zeros(len(x), dtype=torch.long, device=parameter.device)  # the same masks for all
            data = ((x[part].to(parameter), rows[part]) for part in parts)
            return self.predict_batches(data, how, seed=seed)

        with wrap_lost_ranks(self.fabric):
            check_same(self.fabric, self._identity(passes, engine, seed, len(x), names))
            predictive = Predictive.cat(over_ranks(self.fabric, len(x), predicted))
        decided = self.decide_on(predictive, (255 * x).round().to(torch.uint8))
        threshold = self.outlier_threshold
        return Prediction.of(
            predictive, how, self.classes, decided=decided, threshold=threshold, names=names, unreadable=unreadable
        )

    def predict_batches(
        self, data: Iterable[Batch], how: Passes | None = None, *, seed: int = 0
    ) -> Iterator[Predictive]:
        """The predictive of each batch of (images, rows), on the CPU, calibrated."""
        calibrator = self.calibrator  # one for all batches, though another thread may calibrate meanwhile
        for part in self.predict_as_trained(data, self.passes() if how is None else how, seed=seed):
            yield part if calibrator is None else part.calibrated(calibrator.apply(part.log_probs))

    def predict_as_trained(self, data: Iterable[Batch], how: Passes, *, seed: int) -> Iterator[Predictive]:
        """`predict_batches` before calibration."""
        if self.outliers is not None and how == ONE_PASS:
            return self.outliers.predict(self.model, data, seed=seed)
        return predict_on_cpu(self.model, data, how, seed=seed)

    def decide_on(self, part: Predictive, x: Tensor) -> dict[str, Tensor]:
        """What the run decides on predicted images `x` (uint8): `abstained`, `sets`, as far as it has decisions."""
        fitted = self.active_decisions
        return {} if fitted is None else decide_on(fitted.decisions, columns_of(part), part.log_probs, x)

    def sampling(self, x: Tensor, seed: int) -> Sampling | OneShot:
        """Begin to predict images that are where the model is, all with the masks of row 0."""
        rows = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if self.outlier_names:  # which one pass alone gives
            return OneShot(Predictive.cat(self.predict_as_trained([(x, rows)], ONE_PASS, seed=seed)))
        return Sampling(self.model, x, rows, seed=seed)

    def sample_cost(self, x: Tensor, how: Passes) -> tuple[int, bool]:
        """Bytes that one sample of these images takes, and whether samples differ at all."""
        return sample_cost(self.model, self.model.stem(x), how)

    def evaluate(
        self,
        source: str | None = None,
        *,
        images: Images | None = None,
        directory: Path | None = None,
        passes: int | None = None,
        engine: Engine | None = None,
        seed: int = 0,
        convert: bool = False,
        skip_unreadable: bool = False,
        corruption: Corruption | None = None,
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> Evaluation:
        """Predict test images, score them, and keep both in the folder.

        The images are those of a source, the run's own by default; or `images`, which `source` then only names. With a
        `corruption` they are corrupted first. Results of calibrated probabilities and of those as trained are kept side
        by side, and so are those of corrupted images.
        """
        source = self.card.run.source if source is None else source
        with wrap_lost_ranks(self.fabric), owned(self.fabric, self.folder):
            check_same(self.fabric, self._identity(source, passes, engine, seed, convert, skip_unreadable, corruption))
            found, predicted = evaluations.evaluate_images(
                self, source, images=images, directory=directory, passes=passes, engine=engine, seed=seed,
                convert=convert, skip_unreadable=skip_unreadable, corruption=corruption, watch=watch,
            )  # fmt: skip
            found = evaluations.write_results(self.folder, self.classes, found, predicted)
            self.fabric.barrier()
        return found

    def own_predictions(self) -> dict[str, Tensor] | None:
        """What was predicted of the run's own test images, as it predicts now; None if that was not kept."""
        calibrator = None if self.calibration is None else self.calibration.calibrator
        return self._folder and self._folder.predictions(self.card.run.source, calibrator, len(self.classes))

    def test_images(
        self, source: str, *, directory: Path | None = None, convert: bool = False, skip_unreadable: bool = False
    ) -> Images:
        """The test part of a source, in the form that the run takes; `convert` brings any other into it."""
        return test_images(self.card, source, directory=directory, convert=convert, skip_unreadable=skip_unreadable)

    def held_out_images(self, directory: Path | None = None) -> Images:
        """The images of the run's source that it was not trained on."""
        return held_out_images(self.folder.path, self.card, directory)

    def verify(self, *, directory: Path | None = None, watch: Callable[[str], None] = lambda what: None) -> list[Check]:
        """Compare the training images with their checksum, and every evaluation with one made now."""
        return verify_run(self, directory, watch)

    def calibrate(
        self,
        calibrator: str = "temperature",
        *,
        held_out: Images | None = None,
        share: float = 1.0,
        directory: Path | None = None,
        passes: int | None = None,
        engine: Engine | None = None,
        seed: int = 0,
    ) -> Calibration:
        """Fit a calibrator on the hold-out and use it from now on; it is kept in calibration.json.

        The images are the run's hold-out, or `held_out`: images that it was not trained on; or a `share` of them, the
        same of each class, chosen by the seed: then `decide` has the others for itself.
        """
        calibration.find(calibrator)
        if not 0 < share <= 1:
            raise CalgpError(f"Invalid share={share:g}: must be above 0 and at most 1, such as 0.5.")
        how = self.passes(passes, engine, seed)
        images = self.held_out_images(directory) if held_out is None else held_out
        check_held_out(images, self.card)
        with self.folder.owned():
            checksum, (_, images) = images.checksum(), calibrated_share(images, share, seed)
            predicted = self.predict_as_trained(batches(images, self.model), how, seed=seed)
            before = torch.cat([part.log_probs for part in predicted])
            prior = prior_of(self.card.run)
            found = fitted_on(before, images, calibrator, how, seed=seed, prior=prior, share=share, of=checksum)
            if prior == FLAT or calibrator != "temperature":
                found = with_caution(found)
            self.folder.write_calibration(found)
        self.calibration = found
        return found

    def decide(
        self,
        *,
        error: float | None = None,
        confidence: float | None = 0.95,
        score: str = "confidence",
        coverage: float | None = None,
        sets: str = "aps",
        by_class: bool = False,
        empty: bool = False,
        false_alarm: float | None = None,
        held_out: Images | None = None,
        directory: Path | None = None,
        passes: int | None = None,
        engine: Engine | None = None,
        seed: int = 0,
    ) -> FittedDecisions:
        """Fit decisions on the hold-out and use them from now on; they are kept in decisions.json.

        `error` (with `confidence`, `score`) fits a threshold, `coverage` (with `sets`, `by_class`, `empty`) prediction
        sets, `false_alarm` a threshold of the outlier score: see `Wanted`. Images that the calibrator was fitted on
        are left out, since the promises would not hold with them. If those are all, it is fitted again on half first.
        """
        wanted = Wanted(error, confidence, score, coverage, sets, by_class, empty, false_alarm)
        how = self.passes(passes, engine, seed)
        images = self.held_out_images(directory) if held_out is None else held_out
        check_held_out(images, self.card)
        images, refitted = self._images_to_decide_on(images)
        predictive = Predictive.cat(self.predict_batches(batches(images, self.model), how, seed=seed))
        found = fit_decisions(
            wanted, predictive, images.y, lambda: uniform_of(images), how, seed=seed, calibration=self.calibration
        )
        found = replace(found, warning=warning(found.warning, images, refitted))
        with self.folder.owned():
            self.folder.write_decisions(found)
        self.fitted_decisions = found
        return found

    def _images_to_decide_on(self, images: Images) -> tuple[Images, Calibration | None]:
        """Those that the calibrator was not fitted on; if there are none, it is fitted again on half, and returned."""
        left, fitted = not_calibrated_on(images, self.calibration), self.calibration
        if left is not None or fitted is None:
            return images if left is None else left, None
        how_fitted = {"passes": fitted.samples, "engine": fitted.engine, "seed": fitted.seed}
        refitted = self.calibrate(fitted.calibrator, held_out=images, share=0.5, **how_fitted)
        return not_calibrated_on(images, refitted) or images, refitted

    def export(
        self,
        path: Path | None = None,
        *,
        to: Target = "onnx",
        passes: int | None = None,
        engine: Engine | None = None,
        seed: int = 0,
    ) -> Exported:
        """Write the run as one file that needs no calgp, and check that it gives what torch gives."""
        return self._export(path, to, self.passes(passes, engine, seed), seed)

    def _export(self, path: Path | None, to: Target, how: Passes, seed: int) -> Exported:
        return export_model(self, path, to=to, how=how, seed=seed)

    def deployable(self, how: Passes, seed: int) -> Exportable:
        """The run as a module that can be exported."""
        image = (self.card.task.channels, self.card.task.height, self.card.task.width)
        outliers = self.outliers if how == ONE_PASS else None  # as `predict_as_trained` has it
        return Deployable(self.model, image, how=how, seed=seed, calibrator=self.calibrator, outliers=outliers)

    def report(self, out: Path | None = None, *, directory: Path | None = None) -> Path:
        """Write an HTML page about the run's evaluations."""
        from calgp.report import write_report

        return write_report([self.folder], out or self.folder.path / "report.html", directory=directory)

    def serve(self, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Serve predictions over HTTP until the process is stopped."""
        from calgp.serve import serve

        serve(self, host=host, port=port)


def load(path: str | os.PathLike[str], *, fabric: Fabric | None = None) -> Classifier:
    """Load a trained classifier from its run folder; "shipped" is the small model that comes with the package.

    >>> load("shipped").predict(torch.zeros(1, 1, 28, 28)).probs.shape
    torch.Size([1, 10])
    """
    return Classifier.load(open_folder(path), fabric=fabric)
