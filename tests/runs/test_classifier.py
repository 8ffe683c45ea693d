"""One object for a trained run: what it takes, what it answers, what it reads and what it refuses."""

import io
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from PIL import Image
from typer.testing import CliRunner

import calgp
from calgp import cli
from calgp.data import load
from calgp.errors import CalgpError
from calgp.gp import predict
from calgp.runs import Classifier, RunFolder, ensemble, shipped_run
from calgp.runs import folder as folder_module
from calgp.runs import reading as reading_module
from calgp.runs.evaluation import evaluate_images
from calgp.training import train_run
from small_run import small

CLOSE = {"rtol": 0, "atol": 1e-5}  # batches of other sizes: float32, added in another order


@pytest.fixture
def copy(trained, tmp_path) -> RunFolder:
    """A run with a hold-out of 40 images, evaluated inside and outside, not calibrated."""
    return RunFolder(shutil.copytree(trained.path, tmp_path / "copy"))


@pytest.fixture(scope="module")
def calibrated(trained, tmp_path_factory, fabric) -> Classifier:
    """A run with a temperature, and decisions for its probabilities. Not changed by tests."""
    folder = RunFolder(shutil.copytree(trained.path, tmp_path_factory.mktemp("classifier") / "run"))
    found = Classifier.load(folder, fabric=fabric)
    found.calibrate(share=0.5)
    found.decide(error=0.4, confidence=0.8, coverage=0.8)
    return found


@pytest.fixture(scope="module")
def in_memory(calibrated) -> Classifier:
    """The same run without its folder."""
    return Classifier(
        calibrated.model, calibrated.card, calibration=calibrated.calibration,
        decisions=calibrated.fitted_decisions, fabric=calibrated.fabric,
    )  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    """Five test digits, uint8 [5, 1, 28, 28]."""
    return load("digits", "test").x[:5]


@pytest.fixture(scope="module")
def files(digits, tmp_path_factory) -> Path:
    """A folder of the same, as 0.png … 4.png."""
    root = tmp_path_factory.mktemp("digits")
    for number, digit in enumerate(digits):
        Image.fromarray(digit[0].numpy()).save(root / f"{number}.png")
    return root


def unit(x: torch.Tensor) -> torch.Tensor:
    return x.float() / 255


# what it takes -------------------------------------------------------------------------------------------------------


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.setflags(write=False)
    return array


FORMS = {  # the five digits x, or their files in a folder, in every form
    "a folder": lambda x, folder: folder,
    "a folder by name": lambda x, folder: str(folder),
    "paths": lambda x, folder: sorted(folder.iterdir()),
    "names": lambda x, folder: tuple(map(str, sorted(folder.iterdir()))),
    "Pillow images": lambda x, folder: [Image.open(path) for path in sorted(folder.iterdir())],
    "Pillow images in colour": lambda x, folder: [Image.open(path).convert("RGB") for path in sorted(folder.iterdir())],
    "a tensor of bytes": lambda x, folder: x,
    "a tensor of floats": lambda x, folder: unit(x),
    "a tensor with a gradient": lambda x, folder: unit(x).requires_grad_(),
    "an array of bytes": lambda x, folder: x.numpy(),
    "an array of doubles": lambda x, folder: x.double().numpy() / 255,
    "an array, channels last": lambda x, folder: x.movedim(1, -1).numpy(),
    "an array without channels": lambda x, folder: x[:, 0].numpy(),
    "an array that is read-only": lambda x, folder: read_only(x.numpy()),
    "an array that runs backwards": lambda x, folder: x.flip(0).numpy()[::-1],
    "a list of images": lambda x, folder: list(x),
    "a list of batches": lambda x, folder: [x[:2], unit(x[2:]).numpy()],
    "a list of all": lambda x, folder: [folder / "0.png", Image.open(folder / "1.png"), x[2].numpy(), x[3:]],
}


@pytest.mark.parametrize("form", FORMS)
def test_images_in_every_form_get_the_same_answers(calibrated, digits, files, form):
    expected = predict(calibrated.model, [(unit(digits), torch.zeros(5, dtype=torch.long))])
    found = calibrated.predict(FORMS[form](digits, files))
    assert len(found) == 5
    torch.testing.assert_close(found.predictive.log_probs, calibrated.calibrator.apply(expected.log_probs), **CLOSE)


def test_one_image_is_a_batch_of_one(calibrated, digits, files):
    expected = calibrated.predict(digits[:1]).probs
    for one in (
        files / "0.png",
        Image.open(files / "0.png"),
        digits[0],
        digits[0].numpy(),
        digits[0, 0],
        unit(digits[0]),
    ):
        found = calibrated.predict(one)
        assert len(found) == 1
        torch.testing.assert_close(found.probs, expected, **CLOSE)


def test_names_are_those_of_files_where_all_are_files(calibrated, digits, files):
    assert calibrated.predict([files, files / "0.png"]).names == (
        *(str(files / f"{number}.png") for number in range(5)),
        str(files / "0.png"),
    )
    assert calibrated.predict(digits).names is calibrated.predict([files, digits]).names is None


def test_pillow_images_are_turned_resized_and_recoloured_as_their_files_are(calibrated, tmp_path):
    """A photograph of another size, lying on its side by its EXIF tag, and one with transparent pixels."""
    rng, exif = np.random.default_rng(0), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(rng.integers(0, 256, (30, 30, 4), np.uint8)).save(tmp_path / "b.png")
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    assert calibrated.predict([Image.open(path) for path in paths]).probs.equal(calibrated.predict(paths).probs)


# what it answers -----------------------------------------------------------------------------------------------------


def test_answers_are_calibrated_by_default(calibrated, digits):
    plain, scaled = calibrated.calibrated_by(None).predict(digits), calibrated.predict(digits)
    temperature = calibrated.calibration.parameters["temperature"]
    assert temperature != 1
    expected = (plain.predictive.log_probs / temperature).log_softmax(-1)
    torch.testing.assert_close(scaled.predictive.log_probs, expected)
    assert scaled.mutual_information.equal(plain.mutual_information)  # it compares samples
    assert not torch.allclose(scaled.entropy, plain.entropy, rtol=1e-3)


def test_uncalibrated_is_the_same_model_and_leaves_the_other_as_it_was(calibrated):
    plain = calibrated.calibrated_by(None)
    assert plain.model is calibrated.model and plain.folder.path == calibrated.folder.path
    assert plain.calibration is plain.calibrator is None
    assert calibrated.calibration is not None
    assert plain.calibrated_by(calibrated.calibration).calibrator == calibrated.calibrator


@pytest.mark.parametrize(("passes", "engine"), [(3, "samples"), (3, "moments"), (None, None)])
def test_an_image_gets_the_same_answer_whatever_stands_beside_it(calibrated, digits, passes, engine):
    """Alone, in the middle of more images than a batch has, and more than once."""
    how = {"passes": passes, "engine": engine, "seed": 4}
    alone = calibrated.predict(digits[0], **how)
    crowd = torch.cat([load("digits", "test").x[100:230], digits[:1], load("digits", "test").x[230:260], digits[:1]])
    beside = calibrated.predict(crowd, **how)
    for place in (130, len(crowd) - 1):
        torch.testing.assert_close(beside.probs[place], alone.probs[0], **CLOSE)
        torch.testing.assert_close(beside.mutual_information[place], alone.mutual_information[0], **CLOSE)
        assert beside.abstains[place] == alone.abstains[0] and beside.sets[place].equal(alone.sets[0])


def test_another_seed_has_other_masks(calibrated, digits):
    one, same, other = (calibrated.predict(digits, passes=3, engine="samples", seed=seed).probs for seed in (0, 0, 1))
    assert one.equal(same) and not torch.allclose(one, other, atol=1e-4)


def test_a_prediction_names_classes_and_says_how_it_was_computed(calibrated, digits):
    found = calibrated.predict(digits, passes=3, engine="samples")
    places = found.probs.argmax(-1).tolist()
    assert found.labels == [calibrated.classes[place] for place in places]
    assert found.confidence.equal(found.probs.amax(-1))
    assert (found.entropy >= found.mutual_information).all()
    assert found.class_sets == [[str(q) for q in range(10) if row[q]] for row in found.sets.tolist()]
    assert (found.passes.count, found.passes.engine) == (3, "samples")


def test_decisions_are_made_on_the_probabilities_that_they_are_for(calibrated, digits):
    assert calibrated.predict(digits).abstains.dtype == torch.bool
    plain = calibrated.calibrated_by(None).predict(digits)
    assert plain.abstains is plain.sets is plain.class_sets is None


def test_what_is_fitted_is_used_from_then_on_and_is_what_is_loaded(copy, fabric, digits):
    classifier = Classifier.load(copy, fabric=fabric)
    first = classifier.predict(digits)
    found = classifier.calibrate("vector", share=0.5)
    assert classifier.calibration is found and not classifier.predict(digits).probs.equal(first.probs)
    assert classifier.predict(digits).sets is None
    decided = classifier.decide(coverage=0.8)
    assert classifier.active_decisions is decided and classifier.predict(digits).sets is not None
    again = Classifier.load(copy, fabric=fabric)
    assert (again.calibration, again.fitted_decisions) == (found, decided)
    assert again.predict(digits).probs.equal(classifier.predict(digits).probs)


def test_a_trained_classifier_is_the_one_that_is_loaded(tmp_path, fabric, digits):
    trained = train_run(small(method="cnn-cal", steps=4), RunFolder(tmp_path / "run"), fabric)
    loaded = calgp.load(tmp_path / "run", fabric=fabric)
    assert trained.card == loaded.card and trained.calibration == loaded.calibration is not None
    assert trained.predict(digits).probs.equal(loaded.predict(digits).probs)


def test_a_run_trained_in_double_precision_predicts_as_it_does_when_it_is_loaded(tmp_path, fabric, digits):
    double = Fabric(accelerator="cpu", devices=1, precision="64-true")
    trained = train_run(small(steps=3, holdout=0.2), folder := RunFolder(tmp_path / "run"), double)
    assert trained.predict(digits).probs.equal(Classifier.load(folder, fabric=fabric).predict(digits).probs)
    trained.evaluate(passes=1)
    assert {check.state for check in Classifier.load(folder, fabric=double).verify()} == {"same bits"}


def test_load_takes_names_paths_and_shipped(trained, digits):
    by_name, by_path = calgp.load(str(trained.path)), calgp.load(trained.path)
    assert by_name.predict(digits).probs.equal(by_path.predict(digits).probs)
    assert calgp.load("shipped").folder.path == shipped_run().path
    with pytest.raises(CalgpError, match=r"no run folder: it has no run\.json"):
        calgp.load(trained.path / "nowhere")


# what it reads and writes --------------------------------------------------------------------------------------------


class Reads:
    """Counts, by name, how often files below a folder are opened for reading, and how often models are built.

    Of a file of tensors the header is read first, by Python; safetensors then maps the rest (`mapped`).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: Counter[str] = Counter()
        self.mapped: Counter[str] = Counter()
        self.built = 0
        self.root = ""
        load_file, build = reading_module.load_file, folder_module.build

        def counting_load(path):
            self.mapped[os.path.relpath(path, self.root)] += 1
            return load_file(path)

        def counting_build(run, task):
            self.built += 1
            return build(run, task)

        monkeypatch.setattr(reading_module, "load_file", counting_load)
        monkeypatch.setattr(folder_module, "build", counting_build)
        sys.addaudithook(self._opened)  # there is no way to remove it; without a root it does nothing

    def _opened(self, event: str, arguments: tuple) -> None:
        if self.root and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, mode = os.fsdecode(arguments[0]), arguments[1]
            if path.startswith(self.root) and mode is not None and "r" in mode:  # None: os.open, by an opener of these
                self.opened[os.path.relpath(path, self.root)] += 1

    @contextmanager
    def below(self, root: Path) -> Iterator[None]:
        self.root = str(root)
        try:
            yield
        finally:
            self.root = ""


@pytest.fixture
def reads(monkeypatch) -> Reads:
    return Reads(monkeypatch)


def test_reads_are_counted(copy, reads):
    with reads.below(copy.path):
        for _ in range(2):
            copy.card()
        (copy.path / "log.jsonl").read_text()
        with (copy.path / "scores-digits.json").open("rb") as file:
            file.read()
        copy.model()
    assert reads.opened == {"run.json": 3, "log.jsonl": 1, "scores-digits.json": 1, "model.safetensors": 1}
    assert reads.mapped == {"model.safetensors": 1} and reads.built == 1


def once(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 1)


FITTED = ("calibration.json", "decisions.json", "outliers.safetensors")
TENSORS = ("model.safetensors", "outliers.safetensors")


def test_evaluate_reads_each_file_once_and_builds_the_model_once(calibrated, tmp_path, fabric, reads):
    folder = RunFolder(shutil.copytree(calibrated.folder.path, tmp_path / "run"))
    with reads.below(folder.path):
        Classifier.load(folder, fabric=fabric).evaluate(passes=1)
    assert reads.opened == once("run.json", "model.safetensors", *FITTED)
    assert reads.mapped == once(*TENSORS) and reads.built == 1


def test_images_of_other_classes_also_need_the_predictions_of_the_run_s_own_once(calibrated, tmp_path, fabric, reads):
    folder = RunFolder(shutil.copytree(calibrated.folder.path, tmp_path / "run"))
    own = "predictions-digits.temperature.safetensors"
    with reads.below(folder.path):
        classifier = Classifier.load(folder, fabric=fabric)
        classifier.evaluate(passes=1)
        classifier.evaluate("letters", passes=1)
    scores = "scores-digits.temperature.json"  # which say whether the predictions are theirs
    assert reads.opened == once("run.json", "model.safetensors", *FITTED, own, scores)
    assert reads.mapped == once(*TENSORS, own) and reads.built == 1


def test_the_command_reads_each_file_once_too(calibrated, tmp_path, reads):
    folder = RunFolder(shutil.copytree(calibrated.folder.path, tmp_path / "run"))
    with reads.below(folder.path):
        done = CliRunner().invoke(cli.app, ["evaluate", str(folder.path), "-S", "1"])
    assert done.exit_code == 0, done.output
    assert reads.opened == once("run.json", "model.safetensors", *FITTED)
    assert reads.mapped == once(*TENSORS) and reads.built == 1


def test_an_ensemble_reads_each_file_of_its_members_once(trained, tmp_path, fabric, reads):
    members = [RunFolder(shutil.copytree(trained.path, tmp_path / name)) for name in ("a", "b")]
    ensemble(members, both := RunFolder(tmp_path / "both"))
    reads.built = 0
    reads.mapped.clear()
    with reads.below(tmp_path):
        Classifier.load(both, fabric=fabric).evaluate(passes=1)
    models = ("a/model.safetensors", "b/model.safetensors")
    assert reads.opened == once("both/run.json", "a/run.json", "b/run.json", *models)
    assert reads.mapped == once(*models) and reads.built == 2


def test_predicting_reads_nothing(calibrated, digits, reads):
    with reads.below(calibrated.folder.path):
        calibrated.predict(digits)
        calibrated.calibrated_by(None).predict(digits)
    assert not reads.opened and not reads.mapped and not reads.built


def test_evaluating_unsaved_writes_nothing(copy, fabric):
    before = {path: path.stat().st_mtime_ns for path in copy.path.iterdir()}
    found, predicted = evaluate_images(Classifier.load(copy, fabric=fabric), "digits", passes=4)
    assert {path: path.stat().st_mtime_ns for path in copy.path.iterdir()} == before
    assert found.own.scores == copy.evaluation("digits").own.scores
    assert predicted.columns["label"].shape == (1000,) and predicted.stored["log_probs"].shape == (1000, 10)


# what it refuses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda classifier: classifier.evaluate(),
        lambda classifier: classifier.calibrate(),
        lambda classifier: classifier.decide(coverage=0.8),
        lambda classifier: classifier.verify(),
        lambda classifier: classifier.report(),
        lambda classifier: classifier.export(),
    ],
)
def test_a_classifier_in_memory_has_no_folder_to_work_in(in_memory, use):
    with pytest.raises(CalgpError, match="This classifier is in memory only: it has no run folder"):
        use(in_memory)


def test_a_classifier_in_memory_predicts_and_scores(in_memory, calibrated, digits, tmp_path):
    assert in_memory.predict(digits).probs.equal(calibrated.predict(digits).probs)
    images = load("digits", "test").take(torch.arange(50))
    found, _ = evaluate_images(in_memory, "mine", images=images)
    assert found.own.scores.n == 50 and found.decisions is not None
    outside, _ = evaluate_images(in_memory, "letters", images=load("letters", "test").take(torch.arange(50)))
    assert outside.outside and outside.ood is None


@pytest.mark.parametrize(
    "shape", [(), (28,), (27, 28), (3, 28, 28), (5, 28, 27), (2, 3, 28, 28), (2, 28, 28, 3), (1, 1, 1, 28, 28), (0, 5)]
)
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_images_of_another_shape_are_refused(calibrated, shape, kind):
    x = torch.zeros(shape, dtype=torch.uint8)
    x = x if kind == "tensor" else x.numpy()
    if shape == (3, 28, 28):  # three grey images
        assert len(calibrated.predict(x)) == 3
        return
    with pytest.raises(
        CalgpError, match=r"Invalid images of shape \[.*\]: must be \[N, 1, 28, 28\], since the run was"
    ):
        calibrated.predict(x)


@pytest.mark.parametrize(
    "dtype",
    [bool, np.int8, np.int64, np.uint16, np.complex64, object, "U3", "S3", ">f4", np.longdouble, "datetime64[s]"],
    ids=str,
)
def test_pixels_of_another_type_are_refused(calibrated, dtype):
    with pytest.raises(CalgpError, match=r"Invalid pixels of .*: must be uint8 from 0 to 255, or floats from 0 to 1\."):
        calibrated.predict(np.zeros((1, 1, 28, 28), dtype))


@pytest.mark.parametrize("value", [-0.1, 1.01, 255.0, float("nan"), float("inf")])
def test_pixels_out_of_range_are_refused(calibrated, value):
    x = torch.zeros(2, 1, 28, 28)
    x[1, 0, 3, 4] = value
    for images in (x, x.numpy(), [x[0], x[1]]):
        with pytest.raises(
            CalgpError, match=r"Invalid pixels from .* to .*: floats must lie in \[0, 1\]; give 0 to 255"
        ):
            calibrated.predict(images)


@pytest.mark.parametrize("nothing", [[], (), torch.zeros(0, 1, 28, 28), np.zeros((0, 28, 28), np.uint8)])
def test_no_image_is_refused(calibrated, nothing):
    with pytest.raises(CalgpError, match="Invalid images: must be at least one"):
        calibrated.predict(nothing)


@pytest.mark.parametrize("strange", [None, 3, b"png", {"a": 1}, [[0.0] * 28] * 28, (path for path in ()), io.BytesIO()])
def test_what_is_no_image_is_refused_by_name(calibrated, strange):
    with pytest.raises(CalgpError, match=r"Invalid image .*: must be a file, a folder, a Pillow image, an array"):
        calibrated.predict(strange)


def test_files_that_are_no_images_are_refused_by_name(calibrated, tmp_path, files):
    (tmp_path / "broken.png").write_bytes((files / "0.png").read_bytes()[:60])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalgpError, match=r"broken\.png is not a readable image"):
        calibrated.predict([files, tmp_path / "broken.png"])
    with pytest.raises(CalgpError, match=r"1 of the images cannot be read: .*leave them out with --skip-unreadable"):
        calibrated.predict([files, tmp_path / "broken.png"])
    found = calibrated.predict([tmp_path / "broken.png", files], skip_unreadable=True)
    assert found.probs.equal(calibrated.predict(files).probs) and len(found.unreadable) == 1
    with pytest.raises(CalgpError, match=r"broken\.png is not a readable image"):
        calibrated.predict(tmp_path / "broken.png", skip_unreadable=True)
    with pytest.raises(CalgpError, match="empty has no images"):
        calibrated.predict(tmp_path / "empty")
    with pytest.raises(CalgpError, match=r"missing\.png does not exist"):
        calibrated.predict(tmp_path / "missing.png")


def test_a_pillow_image_that_cannot_be_decoded_is_refused(calibrated, files):
    cut = io.BytesIO((files / "0.png").read_bytes()[:100])
    with pytest.raises(CalgpError, match=r"Invalid image <.*>: it is not readable"):
        calibrated.predict(Image.open(cut))
    with pytest.raises(CalgpError, match="its pixels are floats"):
        calibrated.predict(Image.new("F", (28, 28)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"passes": 0}, "Invalid passes=0: must be at least 1, such as 50."),
        ({"engine": "guess"}, "Invalid engine='guess': must be moments or samples."),
        ({"seed": -1}, "Invalid seed=-1: must be a whole number from 0 to"),  # negative seeds are those of training
        ({"seed": 2**63}, "Invalid seed=9223372036854775808: must be a whole number"),
    ],
)
def test_a_way_to_predict_that_cannot_be_is_refused(calibrated, digits, tmp_path, options, says):
    for use in (
        lambda: calibrated.predict(digits, **options),
        lambda: calibrated.evaluate(**options),
        lambda: calibrated.calibrate(**options),
        lambda: calibrated.decide(coverage=0.8, **options),
        lambda: calibrated.export(tmp_path / "it.onnx", **options),
    ):
        with pytest.raises(CalgpError) as caught:
            use()
        assert str(caught.value).startswith(says)
