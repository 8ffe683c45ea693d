"""Run folders made by an enemy."""

import json
import os
import shutil
import struct
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calgp.errors import CalgpError
from calgp.methods import METHODS
from calgp.nets import BACKBONES, Task
from calgp.posthoc import calibration
from calgp.report import write_report
from calgp.runs import Classifier, Run, RunFolder, compare, ensemble, from_json
from calgp.runs.build import build
from calgp.runs.reading import LARGEST_JSON, Stored, model_without_memory, read_header, read_json, read_tensors
from calgp.runs.results import Checkpoint
from folders import evaluate, tensors

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def copy(trained, tmp_path) -> RunFolder:
    shutil.copytree(trained.path, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def change(folder: RunFolder, name: str, *place: str, to: object) -> None:
    """One value of a JSON file."""
    path = folder.path / name
    data = value = json.loads(path.read_text())
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = to
    path.write_text(json.dumps(data))


# descriptions that ask for too much ----------------------------------------------------------------------------------

HUGE = [
    ("method", {"kind": "CnnGp", "n_rf": 10**12}),
    ("method", {"kind": "CnnGp", "frequencies": "sorf", "n_rf": 2**31}),
    ("method", {"kind": "CnnGp", "ratio": 2**31}),
    ("method", {"kind": "CnnGp", "depth": 10**9}),
    ("method", {"kind": "CnnGp", "depth": 1000, "width": 10**6}),
    ("method", {"kind": "Gpdnn", "inducing": 10**8}),
    ("method", {"kind": "Cgp", "inducing": 10**7}),
    ("method", {"kind": "Svdkl", "reduced": 10**9, "grid": 800}),
    ("method", {"kind": "CnnLaplace", "n_rf": 20_000}),
    ("backbone", {"kind": "LeNet", "channels": [10**9, 10**9]}),
    ("backbone", {"kind": "LeNet", "channels": [10**30]}),
    ("backbone", {"kind": "LeNet", "channels": [1] * 100_000}),
    ("backbone", {"kind": "ResNet", "n": 10**9}),
    ("backbone", {"kind": "ResNet", "widths": [10**9]}),
    ("backbone", {"kind": "ResNet", "pad_to": 10**9}),
]


@pytest.mark.parametrize(("part", "described"), HUGE, ids=str)
def test_a_description_of_a_huge_model_is_refused_before_memory_is_taken(copy, part, described):
    change(copy, "run.json", "run", part, to=described)
    before, clock = peak(), time.process_time()
    with pytest.raises(CalgpError):
        copy.model()
    assert peak() - before < 200 * 2**20  # GPyTorch, where it is imported first, takes some of them
    assert time.process_time() - clock < 10  # and some seconds


def peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", ["channels", "height", "width", "classes"])
def test_a_huge_task_is_refused(copy, name):
    change(copy, "run.json", "task", name, to=10**9)
    with pytest.raises(CalgpError, match=f"run.json is damaged.*{name}"):
        copy.model()


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_memory_has_the_shapes_of_the_real_one(method):
    run = Run(METHODS[method], BACKBONES["lenet-3"])
    task = Task(1, 28, 28, 3)
    found = model_without_memory(run, task, most=1000).state_dict()
    real = build(run, task).state_dict()
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {k: (v.shape, v.dtype) for k, v in real.items()}
    assert {value.device.type for value in found.values()} == {"meta"}


# files of tensors ----------------------------------------------------------------------------------------------------


def tensors_file(header: object, content: bytes = b"", claimed: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + content


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        tensors_file({"a": F32}, bytes(8), claimed=2**63),
        tensors_file({"a": F32}, bytes(8), claimed=0),
        tensors_file({"a": F32}, bytes(4)),
        tensors_file({"a": F32}, bytes(80)),
        tensors_file({"a": F32 | {"shape": [2**62, 8]}}, bytes(8)),
        tensors_file({"a": F32 | {"shape": [10**12]}}, bytes(8)),
        tensors_file({"a": F32 | {"shape": [-2]}}, bytes(8)),
        tensors_file({"a": F32 | {"shape": "2"}}, bytes(8)),
        tensors_file({"a": F32 | {"dtype": "F8_E4M3"}}, bytes(2)),
        tensors_file({"a": F32 | {"dtype": ["F32"]}}, bytes(8)),
        tensors_file({"a": F32 | {"data_offsets": [8, 16]}}, bytes(8)),
        tensors_file({"a": F32, "b": F32}, bytes(16)),  # both in one place
        tensors_file({"a": F32, "__metadata__": []}, bytes(8)),
        tensors_file({"a": F32, "__metadata__": {"calgp": "[" * 10**5}}, bytes(8)),
        tensors_file({"a": F32, "__metadata__": {"calgp": "[]"}}, bytes(8)),
        tensors_file({"a": F32, "__metadata__": {"sha256": "0"}}, bytes(8)),
        tensors_file([]),
        tensors_file({"a": None}),
        struct.pack("<Q", 10**5) + b"[" * 10**5,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, data):
    path = tmp_path / "it.safetensors"
    path.write_bytes(data)
    with pytest.raises(CalgpError, match=r"it\.safetensors cannot be read"):
        read_tensors(path)


def test_a_true_header_is_read(tmp_path):
    path = tmp_path / "it.safetensors"
    path.write_bytes(tensors_file({"a": F32}, struct.pack("<2f", 1, 2)))
    assert read_header(path).tensors == {"a": Stored(torch.float32, (2,))}
    assert read_tensors(path)["a"].tolist() == [1, 2]


def test_every_flipped_bit_in_a_weight_is_seen(copy):
    path = copy.path / "model.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole) - 1, len(whole) - 2000, -97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CalgpError, match="checksum differs"):
            copy.model()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_weights_of_another_type_are_refused(copy, dtype):
    whole = tensors(copy, "model.safetensors")
    name = next(name for name, value in whole.items() if value.is_floating_point())
    copy.write_tensors("model.safetensors", whole | {name: whole[name].to(dtype)})
    with pytest.raises(CalgpError, match=f"is of {dtype}"):
        copy.model()


@pytest.mark.parametrize(
    "strange",
    [
        {"optimiser.9999.exp_avg": torch.zeros(1)},
        {"optimiser.x.step": torch.zeros(())},
        {"optimiser.0.exp_avg": torch.zeros(3, 3, 3)},
        {"optimiser.0.step": torch.zeros(5)},
        {"optimiser.0.momentum": torch.zeros(())},
        {"../escaped": torch.zeros(1)},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_optimiser_is_refused(copy, strange):
    whole = checkpoint(copy)
    copy.write_tensors("checkpoint.safetensors", whole, {"step": 3})
    found, state = copy.checkpoint(copy.card())
    assert found.keys() == whole.keys() and state == Checkpoint(3)
    copy.write_tensors("checkpoint.safetensors", whole | strange, {"step": 3})
    with pytest.raises(CalgpError, match="does not fit"):
        copy.checkpoint(copy.card())


def checkpoint(folder):
    """The tensors of a model, and what Adam keeps of its first parameter."""
    model = folder.model()
    moments = {name: torch.zeros_like(next(model.parameters())) for name in ("exp_avg", "exp_avg_sq")}
    optimiser = {f"optimiser.0.{name}": value for name, value in (moments | {"step": torch.zeros(())}).items()}
    return {f"model.{name}": value for name, value in model.state_dict().items()} | optimiser


@pytest.mark.parametrize("absent", ["", "step", "exp_avg"], ids=["all", "step", "exp_avg"])
def test_a_checkpoint_without_the_state_of_its_optimiser_is_refused(copy, absent):
    """Adam would begin anew with moments of zero, and the run would end with other weights, silently."""
    lacking = {name: v for name, v in checkpoint(copy).items() if not name.startswith(f"optimiser.0.{absent}")}
    copy.write_tensors("checkpoint.safetensors", lacking, {"step": 3})
    with pytest.raises(CalgpError, match="does not hold the state of the optimiser adam"):
        copy.checkpoint(copy.card())
    if not absent:  # before the first step that does not fail there is none
        copy.write_tensors("checkpoint.safetensors", lacking, {"step": 3, "failed": 3})
        assert copy.checkpoint(copy.card())[1].failed == 3


def test_a_checkpoint_beyond_the_last_step_is_refused(copy):
    """Its run would be finished without another step, and without the steps that it lacks."""
    card = copy.card()
    steps = card.run.total_steps(card.train_images)
    for state, fits in (({"step": steps}, True), ({"step": steps + 1}, False), ({"step": 2, "failed": 3}, False)):
        copy.write_tensors("checkpoint.safetensors", checkpoint(copy), state)
        if fits:
            assert copy.check_checkpoint(card).step == steps
            continue
        with pytest.raises(CalgpError, match=rf"it is at step {state['step']} of {steps}, "):
            copy.check_checkpoint(card)


@pytest.mark.parametrize("state", [{}, {"step": -1}, {"step": "3"}, {"step": 10**30}, {"step": 1, "totals": "x"}])
def test_a_checkpoint_without_its_step_is_refused(copy, state):
    whole = {f"model.{name}": value for name, value in tensors(copy, "model.safetensors").items()}
    copy.write_tensors("checkpoint.safetensors", whole, state)
    with pytest.raises(CalgpError, match=r"checkpoint\.safetensors cannot be read \((step|totals): "):
        copy.checkpoint(copy.card())


@pytest.mark.parametrize(
    "strange",
    [
        {"label": torch.full((1000,), 10)},
        {"label": torch.full((1000,), -1)},
        {"label": torch.zeros(1000)},
        {"entropy": torch.full((1000,), float("nan"))},
        {"entropy": torch.zeros(3)},
        {"y": torch.zeros(1000, 2, dtype=torch.int64)},
        {"log_probs": torch.zeros(1000, 9)},
        {"more": torch.zeros(())},
    ],
    ids=lambda strange: next(iter(strange)),
)
def test_predictions_that_do_not_fit_together_are_refused(copy, strange):
    name = copy.predictions_name("digits")
    copy.write_tensors(name, tensors(copy, name) | strange)
    with pytest.raises(CalgpError, match="cannot be read"):
        copy.columns(name, classes=10)


# JSON ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@QUICK
@given(JSON)
def test_any_json_is_a_run_or_refused(value):
    try:
        from_json(value)
    except CalgpError as error:
        assert 0 < len(str(error)) < 1000


@QUICK
@given(JSON, st.sampled_from(["run", "task", "classes", "train_images", "holdout_rows", "environment", "members"]))
def test_any_value_in_run_json_is_read_or_refused(copy, value, name):
    change(copy, "run.json", name, to=value)
    try:
        assert copy.card().label
    except CalgpError as error:
        assert "run.json" in str(error)


@QUICK
@given(JSON, st.sampled_from(["source", "outside", "n", "scores", "intervals", "reliability", "calibrator", "ood"]))
def test_any_value_in_scores_is_compared_or_refused(copy, value, name):
    change(copy, "scores-digits.json", name, to=value)
    try:
        compare([copy])
    except CalgpError as error:
        assert str(copy.path) in str(error)


@QUICK
@given(JSON)
def test_any_json_is_a_calibrator_or_refused(value):
    for data in (value, {"calibrator": "temperature", "temperature": value}, {"calibrator": "platt", "slope": value}):
        try:
            calibration.from_json(data)
        except CalgpError as error:
            assert 0 < len(str(error)) < 1000


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_in_the_log_are_left_out(copy, data):
    (copy.path / "log.jsonl").write_bytes(b'{"kind": "train", "step": 1, "nll": 1, "kl": 0, "rate": 1}\n' + data)
    assert [record for record in copy.log() if record.kind == "train"]


@pytest.mark.parametrize(
    "text",
    [b"[" * 10**6, b'{"a":' * 10**5, b'"\\ud800"', b"\xff", b"1" * 5000, b"", b" " * (LARGEST_JSON + 1)],
    ids=["deep list", "deep table", "half a pair", "no UTF-8", "huge number", "empty", "large"],
)
def test_json_that_cannot_be_used_is_refused(tmp_path, text):
    (tmp_path / "it.json").write_bytes(text)
    with pytest.raises(CalgpError, match=r"it\.json cannot be read"):
        read_json(tmp_path / "it.json")


def test_a_pipe_or_a_device_is_no_file(copy):
    for name in ("run.json", "model.safetensors", "log.jsonl", "scores-digits.json"):
        (copy.path / name).unlink()
        os.mkfifo(copy.path / name)  # opened, it would wait for ever
    with pytest.raises(CalgpError):
        copy.card()
    assert copy.log() == []
    with pytest.raises(CalgpError, match="no regular file"):
        copy.evaluations()
    with pytest.raises(CalgpError, match="no regular file"):
        read_json(type(copy.path)("/dev/zero"))


@pytest.mark.parametrize("path", ["/etc", "", "a\x00b", "x" * 300, 3, "../" * 2000])
def test_a_member_that_is_nowhere_or_not_relative_is_refused(trained, copy, tmp_path, path):
    folder = RunFolder(tmp_path / "both")
    ensemble([trained, copy], folder)
    change(folder, "run.json", "members", to=[{"path": path, "label": "", "network": "", "seed": 0}])
    with pytest.raises(CalgpError):
        folder.model()


def test_a_member_counts_once(trained, copy, tmp_path):
    folder = RunFolder(tmp_path / "both")
    ensemble([trained, copy], folder)
    members = json.loads((folder.path / "run.json").read_text())["members"]
    change(folder, "run.json", "members", to=[members[0]] * 500)
    with pytest.raises(CalgpError, match="twice"):
        folder.model()


def test_a_calibrator_cannot_name_a_path(copy):
    change(copy, "scores-digits.json", "calibrator", to="../../escaped")
    with pytest.raises(CalgpError, match=r"scores-digits\.json is damaged \(calibrator"):
        copy.evaluations()


@pytest.mark.parametrize("value", [10**400, [[1]] * 3, float("inf"), True, None, "1"])
def test_a_temperature_that_is_no_number_is_refused(value):
    with pytest.raises(CalgpError):
        calibration.from_json({"calibrator": "temperature", "temperature": value})


def test_control_codes_are_not_printed(copy, capsys, monkeypatch):
    from calgp import cli

    change(copy, "run.json", "run", "source", to="\x1b[2Jgone")
    monkeypatch.setattr("sys.argv", ["calgp", "evaluate", str(copy.path)])
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr()
    assert "gone" in printed.err and "\x1b[2J" not in printed.err


def test_equal_tensors_give_equal_bytes(copy):
    """safetensors writes what stands beside them in any order."""
    written = set()
    for _ in range(20):
        copy.write_tensors("again.safetensors", {"a": torch.arange(3), "b": torch.ones(2)}, {"name": "Löwe", "n": 1})
        written.add((copy.path / "again.safetensors").read_bytes())
    assert len(written) == 1
    header = read_header(copy.path / "again.safetensors")
    assert header.metadata == {"name": "Löwe", "n": 1} and header.digest == copy.checksum("again.safetensors")
    assert read_tensors(copy.path / "again.safetensors")["a"].equal(torch.arange(3))


@pytest.mark.slow
def test_predictions_of_another_evaluation_than_the_scores_are_refused(copy, fabric):
    """A kill between the two files leaves new predictions beside old scores."""
    evaluate(copy, fabric, passes=1, engine="samples")
    scores = (copy.path / copy.scores_name("digits")).read_bytes()
    assert copy.predictions("digits", None, classes=10) is not None
    evaluate(copy, fabric, passes=1, engine="samples", seed=1)
    (copy.path / copy.scores_name("digits")).write_bytes(scores)
    with pytest.raises(CalgpError, match="are of two evaluations, of which one was not finished"):
        copy.predictions("digits", None, classes=10)
    page = write_report([copy], copy.path / "report.html").read_text()
    assert "is not of the evaluation that gave these scores: evaluate again" in page
    states = {check.what: check.state for check in Classifier.load(copy, fabric=fabric).verify()}
    assert states["digits"] == "differs"
