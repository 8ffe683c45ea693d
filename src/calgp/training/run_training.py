"""A training from a Run to files."""

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from lightning_fabric import Fabric

from calgp.data import SOURCES, Images
from calgp.errors import CalgpError
from calgp.gp import Model, Passes
from calgp.json_values import Json
from calgp.methods import Method
from calgp.nets import Backbone
from calgp.run import Run, default_name
from calgp.runs import Calibration, Card, Classifier, RunFolder, TrainingData, from_json, on_first, to_json, together
from calgp.runs.build import build
from calgp.runs.description import flat
from calgp.runs.devices import one_device
from calgp.runs.environment import training_arithmetic
from calgp.runs.fit_calibrator import fit_temperature, fitted_on, held_out_log_probs, prior_of
from calgp.runs.folder import CHECKPOINT, slug
from calgp.runs.ranks import check_same, owned, wrap_lost_ranks
from calgp.runs.results import NoteRecord
from calgp.runs.run_outliers import fit_outliers, write_outliers
from calgp.training.defaults import default_precision, resolved, with_steps
from calgp.training.fine_tune import fine_tuning_run
from calgp.training.loop import Step
from calgp.training.resumable import ResumableTraining, explain_numbers

CHECKPOINT_SECONDS = 60.0  # between checkpoints, unless given


def train_run(
    run: Run,
    folder: RunFolder,
    fabric: Fabric | None = None,
    *,
    data: TrainingData | None = None,
    directory: Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = None,
    accumulate: int = 1,
    watch: Callable[[Step], None] = lambda step: None,
) -> Classifier:
    """Train a run into its folder. Ctrl-C, or SIGTERM, saves after the step at hand and raises Interrupted.

    A training that was killed at any moment and resumed ends with the same bits. One that had not come to its first
    checkpoint (one every `checkpoint_seconds`, 60 unless given) starts again, with `resume` or without.
    Where the numbers fail in too many steps in a row, the last good state is kept as the checkpoint, and a CalgpError
    tells which number and which images. Without a `fabric` it is the best device of this machine, and
    `default_precision`.

    Of several ranks (a Fabric with a DDP strategy, launched) each calls this with the same arguments; rank 0 writes.
    `accumulate`: in how many parts a rank takes its share of a batch, for memory's sake.
    """
    chosen, fabric, given = fabric is None, one_device(fabric), data
    folder = RunFolder(folder.path, writes=fabric.is_global_zero)
    with wrap_lost_ranks(fabric):
        made_by = training_arithmetic(fabric, accumulate).shared()
        check_same(fabric, made_by | flat(to_json(run)) | {"resume": resume, "data given": given is not None})
        data = together(fabric, lambda: given or TrainingData.of(run, directory))
        check_same(fabric, {"the training images": together(fabric, data.train.checksum)})
    run = resolved(run, data)
    _check_given(run, data, accumulate)
    if chosen:
        precision = default_precision(run, data, fabric.device)
        fabric = Fabric(accelerator="auto", devices=1, precision=precision)  # pyright: ignore[reportArgumentType]
    with wrap_lost_ranks(fabric), owned(fabric, folder):
        if on_first(fabric, lambda: resume and folder.finished and folder.interrupted):  # killed before the very end
            folder.remove(CHECKPOINT)
            return Classifier.load(folder, fabric=fabric)
        run = with_steps(run, folder, data, fabric, accumulate=accumulate)
        training = ResumableTraining(run, folder, fabric, data, resume=resume, accumulate=accumulate)
        every = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
        model, card = training.make_steps(every=every, watch=watch)
        del training  # its optimiser takes more memory than the model
        return _finished(run, model, card, data, folder, fabric)


def _check_given(run: Run, data: TrainingData, accumulate: int) -> None:
    """Refuse a run that needs other images than were given."""
    if run.method.calibrator and data.held_out is None:
        raise CalgpError(f"{run.label} fits its {run.method.calibrator} on held-out images; give some with the data.")
    if run.calibration and data.held_out is None:
        raise CalgpError("Invalid calibration=True: it needs held-out images; give some with the data.")
    if run.patience and data.stopping is None:
        raise CalgpError(f"patience={run.patience} needs images to stop by: TrainingData(train, held_out, stopping).")
    if not 0 < accumulate <= run.batch_size:
        raise CalgpError(f"Invalid accumulate={accumulate}: must be 1 to {run.batch_size}, the images of a batch.")


def _finished(run: Run, model: Model, card: Card, data: TrainingData, folder: RunFolder, fabric: Fabric) -> Classifier:
    """What comes after the last step: the method's own end, a calibrator, an outlier score; the model's file last."""
    with explain_numbers(run, "cannot be finished"):
        run.method.finish(model, data.train)
    calibration = on_first(fabric, lambda: _calibration(run, model, data.held_out, folder, card))
    if calibration is not None:
        folder.write_calibration(calibration)
    outliers = None
    if run.method.is_calibrated:  # others are as they were published
        outliers = on_first(fabric, lambda: fit_outliers(model, data.train, data.held_out, seed=run.seed))
    if outliers is not None:
        write_outliers(folder, outliers)
    folder.flush_log()
    folder.write_tensors("model.safetensors", model.state_dict())
    folder.remove(CHECKPOINT)
    fabric.barrier()  # no rank is done before the model is there
    fitted = {"calibration": calibration, "outliers": outliers}
    return Classifier(_as_loaded(model, card), card, folder=folder, fabric=fabric, **fitted)


def _calibration(run: Run, model: Model, held_out: Images | None, folder: RunFolder, card: Card) -> Calibration | None:
    """The method's own calibrator; or a temperature, if the run wants one; if there is none, the log says why."""
    if held_out is None or not (run.method.calibrator or run.calibration):
        return None
    how = Passes.of(model)
    if run.method.calibrator:
        before = held_out_log_probs(model, held_out, how, seed=0)
        return fitted_on(before, held_out, run.method.calibrator, how, seed=0)
    found, why = fit_temperature(model, held_out, how, prior_of(run), seed=0)
    if why is not None:
        folder.append_log(NoteRecord("uncalibrated", run.total_steps(card.train_images), why))
    return found


def _as_loaded(model: Model, card: Card) -> Model:
    """The model as it will be loaded from its file: in single precision, whatever it was trained in."""
    if next(model.parameters()).dtype == torch.get_default_dtype():
        return model
    loaded = build(card.run, card.task)
    loaded.load_state_dict(model.state_dict())
    return loaded


def train(
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    method: str | Method = default_name("method"),
    backbone: str | Backbone | Mapping[str, Json] = default_name("backbone"),
    network: str | None = None,
    weights: str | None = None,
    fabric: Fabric | None = None,
    directory: Path | None = None,
    watch: Callable[[Step], None] = lambda step: None,
    **options: Json,
) -> Classifier:
    """Train a classifier on an image set or a folder of images, into a run folder.

    >>> import tempfile, torch, calgp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = calgp.train("digits", out=f"{folder}/run", train_size=100, epochs=1)
    ...     run.predict(torch.zeros(1, 1, 28, 28)).probs.shape
    torch.Size([1, 10])

    Args:
        source: a data set by name, such as digits or mnist, or a folder with one folder of images for each class.
        out: the run folder; runs/… unless given.
        method, backbone: by name (METHODS, BACKBONES), or the objects themselves; of a backbone also a table with its
            name and other options.
        network, weights: a pretrained network by its name, such as timm:resnet18, and its file of weights, instead of a
            backbone; images get its size.
        fabric: where it runs; None: the best device of this machine.
        directory: where data sets lie.
        watch: is called after each step.
        options: any other field of `Run`, such as epochs=20, seed=1, holdout=0.1.
    """
    name = os.fspath(source)
    named = f"folder:{name}" if name not in SOURCES and Path(name).is_dir() else name
    run = described_run({"source": named, "method": method, "backbone": backbone, **options}, network, weights)
    return train_run(run, new_folder(run) if out is None else RunFolder(out), fabric, directory=directory, watch=watch)


def described_run(
    options: Mapping[str, Json | Method | Backbone], network: str | None, weights: str | None = None
) -> Run:
    """The run of plain options, and of a pretrained network, if one is named."""
    return from_json(options) if network is None else fine_tuning_run(options, network, weights)


def new_folder(run: Run) -> RunFolder:
    """A folder below runs/ that does not exist yet, named after the run.

    >>> from calgp.runs import from_json
    >>> new_folder(from_json({"source": "digits", "seed": 7})).name
    'cnn-gp-sorf-digits-seed7'
    """
    path = Path("runs") / slug(f"{run.label}-{run.source}-seed{run.seed}")
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return RunFolder(next(name for name in names if not name.exists()))
