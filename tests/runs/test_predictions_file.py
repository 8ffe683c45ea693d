"""Predictions made anywhere: read, refused, scored, compared."""

import json
import math
import re

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError
from calgp.metrics import outcomes, scores
from calgp.posthoc.calibration import Temperature
from calgp.report.judge import judge_page
from calgp.runs.predictions_file import Predictions, calibrate_on_half, compare_predictions, judge, read_predictions

NAMES = ("cat", "dog", "emu")


def made(n=400, seed=0, sharpness=1.0):
    """Probabilities that labels are drawn from, and told `sharpness` times too sharply."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, 3))
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (probs.cumsum(1) < rng.uniform(size=(n, 1))).sum(1)
    return sharpness * logits, y


def softmax(logits):
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def write_csv(path, values, labels, names, label="y"):
    lines = [",".join([label, *names])]
    lines += [",".join([str(y), *(f"{value:.10g}" for value in row)]) for y, row in zip(labels, values, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def files(tmp_path):
    """The same predictions in every form."""
    logits, y = made()
    probs = softmax(logits)
    for name, arrays in {
        "probs": {"probs": probs, "y": y},
        "logits": {"logits": logits + 7, "labels": y.astype(np.int16)},
        "log": {"log_probs": np.log(probs).astype(np.float32), "target": y},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    write_csv(tmp_path / "numbers.csv", probs, y, NAMES)
    write_csv(tmp_path / "words.csv", probs, np.array(NAMES)[y], [f"p_{name}" for name in NAMES], "label")
    write_csv(tmp_path / "logits.csv", logits, np.array(NAMES)[y], [f"logit_{name}" for name in NAMES])
    return tmp_path


@pytest.mark.parametrize("name", ["probs.npz", "logits.npz", "log.npz", "numbers.csv", "words.csv", "logits.csv"])
def test_every_form_says_the_same(files, name):
    logits, y = made()
    read = read_predictions(files / name)
    np.testing.assert_allclose(read.log_probs.exp(), softmax(logits), atol=1e-6)  # log-probabilities in float32
    assert read.y.tolist() == y.tolist() and read.zeros == 0


@pytest.mark.parametrize(
    "text",
    [
        "y,a,b,c\n0,.5,.2,.3\n2,.1,.1,.8\n",
        "\ufeffLabel;a;b;c\r\na;0,5;0,2;0,3\r\nc;0,1;0,1;0,8\r\n",  # as Excel writes it in most of Europe
        "a\tb\tc\ttrue\n.5\t.2\t.3\t0.0\n\n.1\t.1\t.8\t2.0\n\n",
        ",y,a,b,c\n0,0,.5,.2,.3\n1,2,.1,.1,.8\n",  # as pandas writes it
        "id,y,pred,a,b,c\nx.png,a,a,.5,.2,.3\ny.png,c,c,.1,.1,.8\n",
        "y,3,2,1\n3,.5,.2,.3\n1,.1,.1,.8\n",
    ],
    ids=["plain", "excel", "tabs and blank lines", "index", "file names", "numbers as names"],
)
def test_tables_of_other_programs_say_the_same(tmp_path, text):
    (tmp_path / "it.csv").write_text(text, newline="", encoding="utf-8")
    read = read_predictions(tmp_path / "it.csv")
    expected = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(read.log_probs.exp(), expected)
    assert read.y.tolist() == [0, 2]
    assert [each for each in read.notes if "left out" in each] == [
        f"it.csv: columns that are no class were left out: {names}."
        for start, names in {",y": "''", "id": "'id', 'pred'"}.items() if text.startswith(start)
    ]  # fmt: skip


def test_an_index_is_no_logit(tmp_path):
    (tmp_path / "it.csv").write_text("index,y,a,b\n0,0,1.5,2\n1,1,1,3\n")
    assert read_predictions(tmp_path / "it.csv", "logits").log_probs.shape == (2, 2)


@pytest.mark.parametrize(
    "arrays",
    [
        {"probs": np.array([0.2, 0.9])}, {"probs": np.array([[0.2], [0.9]])},
        {"logits": np.log(np.array([0.25, 9.0]))}, {"log_probs": np.log(np.array([0.2, 0.9]))},
    ],
    ids=["probs", "a column", "logits", "log-probs"],
)  # fmt: skip
def test_one_column_is_class_1_of_two(tmp_path, arrays):
    np.savez(tmp_path / "it.npz", **arrays, y=np.array([[False], [True]]))
    read = read_predictions(tmp_path / "it.npz")
    torch.testing.assert_close(read.log_probs.exp(), torch.tensor([[0.8, 0.2], [0.1, 0.9]]).double())
    assert read.y.tolist() == [0, 1]


def test_arrays_of_other_names_and_labels_by_name(tmp_path):
    arrays = {"predictions": np.array([[0.0, 1.0], [2.0, 0.0]]), "label_ids": np.array([1.0, 0.0])}
    np.savez(tmp_path / "it.npz", **arrays)
    assert read_predictions(tmp_path / "it.npz", "logits").y.tolist() == [1, 0]
    with pytest.raises(CalgpError, match="with --kind"):
        read_predictions(tmp_path / "it.npz")
    np.savez(tmp_path / "it.npz", probs=np.eye(2), y=np.array(["dog", "cat"]), classes=np.array(["cat", "dog"]))
    assert read_predictions(tmp_path / "it.npz").y.tolist() == [1, 0]


def test_rounded_probabilities_are_divided_by_their_sum_and_it_is_said(tmp_path):
    probs = np.array([[0.333, 0.333, 0.333], [0.25, 0.25, 0.5]])
    np.savez(tmp_path / "three.npz", probs=probs, y=np.array([0, 1]))
    assert not read_predictions(tmp_path / "three.npz").notes
    np.savez(tmp_path / "two.npz", probs=probs.round(2), y=np.array([0, 1]))
    read = read_predictions(tmp_path / "two.npz")
    assert read.notes == ("The probabilities of a row sum to 1 within 0.01 only, and were divided by their sum.",)
    torch.testing.assert_close(read.log_probs[0].exp(), torch.full((3,), 1 / 3).double())
    assert judge(read).notes == read.notes


def test_scores_are_those_of_the_metrics_and_of_scikit_learn(files):
    logits, y = made()
    found = judge(read_predictions(files / "probs.npz"))
    expected = scores(outcomes(torch.from_numpy(logits).log_softmax(1), torch.from_numpy(y)))
    assert found.own.scores.mnll == pytest.approx(log_loss(y, softmax(logits)), rel=1e-9)
    assert found.own.scores.err == expected.err and found.own.scores.ece == pytest.approx(expected.ece, abs=1e-9)
    low, high = found.own.intervals.mnll
    assert low < found.own.scores.mnll < high
    assert found.n == 400 and found.classes == 3 and not found.notes


def test_half_of_the_rows_find_the_temperature():
    logits, y = made(n=4000, sharpness=3.0)
    predictions = Predictions("sharp", torch.from_numpy(logits).log_softmax(1), torch.from_numpy(y))
    before, after, note = calibrate_on_half(predictions, "temperature")
    assert len(before.y) == len(after.y) == 2000 and "fitted on 2,000 rows" in note
    assert judge(after).own.scores.ece < 0.03 < judge(before).own.scores.ece
    # what is scored was not fitted on: the temperature is that of the other half
    rest = {tuple(row) for row in before.log_probs.tolist()}
    other = torch.tensor([tuple(row) not in rest for row in predictions.log_probs.tolist()])
    temperature = Temperature.fit(predictions.log_probs[other], predictions.y[other])
    torch.testing.assert_close(after.log_probs, temperature.apply(before.log_probs))


def test_pairs_tell_which_is_better():
    (logits, y), labels = made(), torch.from_numpy(made()[1])
    good = Predictions("good", torch.from_numpy(logits).log_softmax(1), labels)
    bad = Predictions("bad", torch.from_numpy(3 * logits).log_softmax(1), labels)
    found = compare_predictions(good, bad)
    expected = log_loss(y, softmax(logits)) - log_loss(y, softmax(3 * logits))
    assert found["mnll"].value == pytest.approx(expected, rel=1e-9) and found["mnll"].is_clear
    assert found["err"].value == 0
    page = judge_page([judge(good), judge(bad)], found)
    assert "good is better" in page and "undecided" in page and page.count("<svg") == 4
    assert not re.search(r"<script|https?://(?!www\.w3\.org|creativecommons|purl)", page)
    with pytest.raises(CalgpError, match="they have 400 and 10 rows"):
        compare_predictions(good, good.take(torch.arange(10)))
    with pytest.raises(CalgpError, match="labels differ"):
        compare_predictions(good, Predictions("other", good.log_probs, (labels + 1) % 3))


def test_a_probability_of_zero_is_counted_and_reported(tmp_path):
    np.savez(tmp_path / "sure.npz", probs=np.array([[1.0, 0.0], [1.0, 0.0]]), y=np.array([0, 1]))
    found = judge(read_predictions(tmp_path / "sure.npz"))
    assert found.own.scores.mnll == pytest.approx(-math.log(1e-12) / 2, rel=1e-6)
    assert "1 rows give their label a probability of 0" in found.notes[0]


GOOD = {"probs": np.full((4, 2), 0.5), "y": np.array([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"probs": np.full((4, 2), 0.4)}, r"row 0: the probabilities sum to 0.8.*--kind logits"),
        ({"probs": np.array([[1.2, -0.2]] * 4)}, "the least is -0.2"),
        ({"probs": np.full((4, 2), np.nan)}, "no finite number in row 0"),
        ({"probs": np.full((4, 1, 2), 1.0)}, "at least two classes"),
        ({"probs": np.full((4, 2), "a")}, "at least two classes"),
        ({"y": np.array([0, 1, 2, 0])}, "labels from 0 to 2; its 2 classes are 0 … 1"),
        ({"y": np.array([0, -1, 1, 0])}, "labels from -1 to 1"),
        ({"y": np.array([0.5, 1, 1, 0])}, "a whole number as label for each of 4 rows, not float64"),
        ({"y": np.array(["cat", "dog"] * 2)}, "an array classes .Q. of all names"),
        ({"y": np.array(["cat", "dog"] * 2, dtype=object)}, r"write names as array\.astype\(str\)"),
        ({"y": np.array([0, 1])}, "each of 4 rows"),
        ({"y": np.zeros((4, 2), dtype=int)}, r"labels \[4, 2\]"),
        ({"logits": np.zeros((4, 2))}, "must hold one of probs"),
        ({"probs": np.zeros((0, 2)), "y": np.zeros(0, dtype=int)}, "each of 0 rows"),
    ],
)
def test_arrays_that_cannot_be_are_refused(tmp_path, arrays, says):
    np.savez(tmp_path / "it.npz", **(GOOD | arrays))
    with pytest.raises(CalgpError, match=says):
        read_predictions(tmp_path / "it.npz")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must have a header"),
        ("a,b\n0.5,0.5\n", r"must have a header with one column y or labels or label; it has others: \['a', 'b'\]"),
        ("0,0.5,0.5\n", "it has no header"),
        ("y,label,a,b\n0,0,0.5,0.5\n", "several columns of labels"),
        ("y,a,a\n0,0.5,0.5\n", "two columns of the same name"),
        ("y,row,a,b\n0,7,0.5,0.5\n", "sum to 8.*a column may be no class"),
        ("y,a,b\n0,0.5\n", "line 2: 2 values, but the header names 3 columns"),
        ("y,a,b\n0,0.5,x\n", "line 2: 'x' in column 3 is no number"),
        ("y,a,b\nfox,0.5,0.5\n", "the label 'fox', which is neither a number nor one of its columns"),
        ("y,a,b\n0,3,-3\n", "If these are logits, say so"),
        ("y,a,b\n", "each of 0 rows"),
        ("y,a,b\n0,inf,0\n", "no finite number"),
        ("y\n0\n", "its 0 classes"),
    ],
)
def test_tables_that_cannot_be_are_refused(tmp_path, text, says):
    (tmp_path / "it.csv").write_text(text)
    with pytest.raises(CalgpError, match=says):
        read_predictions(tmp_path / "it.csv")


def test_files_that_cannot_be_are_refused(tmp_path):
    (tmp_path / "it.npz").write_bytes(b"no zip")
    with pytest.raises(CalgpError, match=r"no \.npz file of plain arrays"):
        read_predictions(tmp_path / "it.npz")
    np.savez(tmp_path / "pickled.npz", y=np.array([{}], dtype=object))
    with pytest.raises(CalgpError, match=r"no \.npz file of plain arrays"):
        read_predictions(tmp_path / "pickled.npz")
    (tmp_path / "it.txt").write_text("")
    with pytest.raises(CalgpError, match=r"must be \.npz, \.csv or \.tsv"):
        read_predictions(tmp_path / "it.txt")
    with pytest.raises(CalgpError, match=r"did you mean .*it\.npz"):
        read_predictions(tmp_path / "its.npz")


# --- the command -----------------------------------------------------------------------------------------------------


def run(*words):
    return CliRunner().invoke(cli.app, ["judge", *map(str, words)])


@pytest.mark.slow
def test_the_command_prints_tables_json_and_a_page(files):
    shown = run(files / "probs.npz")
    assert shown.exit_code == 0 and "MNLL" in shown.output and "400 rows" in shown.output
    told = json.loads(run(files / "probs.npz", files / "logits.csv", "--json", "--html", files / "p.html").stdout)
    assert [each["name"] for each in told["predictions"]] == ["probs", "logits"]
    assert told["differences"]["mnll"]["value"] == pytest.approx(0, abs=1e-6)
    assert "probs less logits" in (files / "p.html").read_text()
    calibrated = json.loads(run(files / "probs.npz", "--calibrate", "temperature", "--json").stdout)
    assert [each["name"] for each in calibrated["predictions"]] == ["probs + temperature", "probs"]
    assert calibrated["predictions"][0]["n"] == 200


def test_the_command_refuses_what_it_cannot_do(files):
    one = files / "probs.npz"
    for words, says in (
        ((one, one, one), "must be one, or two"),
        ((one, one, "--calibrate", "temperature"), "must be one file"),
        ((one, "--calibrate", "warmth"), "warmth"),
        ((one, "--kind", "log_probs"), "the probabilities sum to"),
    ):
        result = run(*words)
        assert result.exit_code == 1 and isinstance(result.exception, CalgpError)
        assert says in str(result.exception)
