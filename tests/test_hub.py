"""Runs on the Hub: huggingface_hub's own client talks to a server of this machine (hub_server.py)."""

import os
import re
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import calgp
from calgp import cli
from calgp.errors import CalgpError
from calgp.hub import pull, push
from calgp.report.model_card import model_card
from calgp.runs import RunFolder, shipped_run
from calgp.runs.pack import pack
from hub_server import TOKEN, HubServer

pytest.importorskip("huggingface_hub")
from huggingface_hub import close_session, constants

DIGITS = np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The Hub of this test, with a cache of its own; large files go by LFS, since Xet needs more of a server."""
    hub = HubServer(tmp_path / "hub")
    settings = {"ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": True,
                "HF_TOKEN_PATH": str(tmp_path / "no-token"), "HF_HUB_DISABLE_PROGRESS_BARS": True}  # fmt: skip
    template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in (settings | {"HUGGINGFACE_CO_URL_TEMPLATE": template}).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    close_session()  # a client that another test has made keeps the proxy of that time
    yield hub
    hub.shutdown()
    hub.server_close()


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # of the client's upload by LFS
@pytest.mark.parametrize("lfs", [10**9, 10_000], ids=["regular", "lfs"])
def test_what_is_pulled_is_what_was_pushed(server, tmp_path, lfs):
    server.lfs = lfs
    done = push(shipped_run(), "me/digits")
    folder = pull("me/digits", "new/digits")
    pack(shipped_run(), tmp_path / "run.calgp")
    stored = server.files("me/digits")
    assert (stored / "run.calgp").read_bytes() == (tmp_path / "run.calgp").read_bytes()
    assert (done.address, done.commit, done.size) == (
        f"{server.address}/me/digits", stored.name, (tmp_path / "run.calgp").stat().st_size,
    )  # fmt: skip
    assert ("PUT" in {method for method, _ in server.seen}) == (lfs < 10**9)
    pack(folder, tmp_path / "again.calgp")
    assert (tmp_path / "again.calgp").read_bytes() == (tmp_path / "run.calgp").read_bytes()
    np.testing.assert_array_equal(
        calgp.load(folder.path).predict(DIGITS).probs, calgp.load("shipped").predict(DIGITS).probs
    )
    assert [path.name for path in Path("new").iterdir()] == ["digits"]


@pytest.mark.slow
def test_the_commands_of_the_page_run_and_what_they_make_is_verified(server):
    page = (Path(__file__).parents[1] / "docs" / "files.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.S)
    shutil.copytree(shipped_run().path, "runs/mnist")
    lines = [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("calgp")]
    assert [words[1] for words in lines] == ["push", "pull"]
    for words in [*lines, ["calgp", "verify", lines[1][lines[1].index("--out") + 1]]]:
        result = CliRunner().invoke(cli.app, words[1:])
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert TOKEN not in result.output
    assert (server.root / "me/mnist/private").exists()


def test_the_model_card_has_the_header_the_scores_and_lines_that_run(server):
    push(shipped_run(), "me/digits")
    card = (server.files("me/digits") / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---\n")[1])
    assert header == {
        "library_name": "calgp", "pipeline_tag": "image-classification",
        "tags": ["calgp", "gaussian-process", "calibration", "uncertainty"],
    }  # fmt: skip
    found = shipped_run().evaluation("digits")
    low, high = found.intervals.ece
    assert f"| ECE | {found.scores.ece:.4f} | {low:.4f} – {high:.4f} |" in card
    assert "4,500 images of digits" in card and "AUROC of the entropy 0.926" in card
    Image.fromarray(DIGITS[0]).save("image.png")
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.S)
    assert len(lines.splitlines()) == 3
    exec(compile(lines, "README.md", "exec"), scope := {})  # noqa: S102 (our own page)
    assert scope["run"].folder.path == Path("runs/digits")


def test_text_of_a_run_is_only_text_in_the_card(tmp_path):
    copy = shutil.copytree(shipped_run().path, tmp_path / "run")
    text = (copy / "run.json").read_text()
    (copy / "run.json").write_text(text.replace('"0"', '"<script>|**\\u001b\\n---"', 1))
    assert "\\<script\\>\\|\\*\\*\ufffd ---" in model_card(RunFolder(copy), "me/x")
    for scores in copy.glob("scores-*"):
        scores.unlink()
    assert "It has not been evaluated." in model_card(RunFolder(copy), "me/x")


def test_a_branch_a_commit_and_main_are_different_runs(server, tmp_path):
    first = push(shipped_run(), "me/digits")
    other = RunFolder(shutil.copytree(shipped_run().path, tmp_path / "other"))
    (other.path / "report.html").write_text("other")
    wide = push(other, "me/digits", revision="wide")
    push(other, "me/digits")
    assert push(other, "me/digits", revision="wide") == wide  # nothing has changed: no commit
    for revision, there in ((first.commit, False), ("wide", True), (None, True)):
        folder = pull("me/digits", f"runs/{revision}", revision=revision)
        assert (folder.path / "report.html").exists() == there
    with pytest.raises(CalgpError, match="me/digits has no revision narrow; its branches"):
        pull("me/digits", "runs/narrow", revision="narrow")


@pytest.mark.parametrize("place", [0, 700, 200_000, -1])
def test_one_changed_byte_is_refused_and_nothing_is_written(server, place):
    push(shipped_run(), "me/digits")
    file = server.files("me/digits") / "run.calgp"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        CalgpError, match=r"run.calgp of me/digits is not what `calgp push` wrote .* Nothing was written"
    ):
        pull("me/digits")
    assert not list(Path.cwd().rglob("*.json")) and not list(Path.cwd().glob("runs/*"))


def test_a_damaged_copy_in_the_cache_is_fetched_again(server, tmp_path):
    push(shipped_run(), "me/digits")
    pull("me/digits", "one")
    downloads = sum(method == "GET" and "run.calgp" in path for method, path in server.seen)
    pull("me/digits", "two")
    assert sum(method == "GET" and "run.calgp" in path for method, path in server.seen) == downloads
    (cached,) = (path for path in (tmp_path / "cache").rglob("run.calgp"))
    cached.resolve().write_bytes(b"broken")
    pull("me/digits", "three")
    assert content(Path("three")) == content(Path("one"))


def test_a_connection_that_breaks_is_resumed(server):
    push(shipped_run(), "me/digits")
    server.cut = 300_000
    folder = pull("me/digits")
    assert folder.path == Path("runs/digits") and folder.model() is not None


def test_a_pull_that_is_interrupted_leaves_nothing_and_the_next_one_succeeds(server, tmp_path):
    def interrupt():
        server.reached.wait(60)
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, in the middle of the download

    push(shipped_run(), "me/digits")
    server.stall = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt, daemon=True).start()
            pull("me/digits")
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(Path.cwd().iterdir()) == [] and not list((tmp_path / "cache").rglob("*.incomplete"))
    server.stall.set()
    server.stall = None
    assert pull("me/digits").model() is not None


def test_what_is_not_there_is_said(server, monkeypatch):
    with pytest.raises(
        CalgpError, match=r"There is no repository me/nothing on http.*, or it is private; check the name"
    ):
        pull("me/nothing")
    push(shipped_run(), "me/digits")
    (server.files("me/digits") / "run.calgp").unlink()
    with pytest.raises(CalgpError, match=r"me/digits holds no run of calgp: it has no file run.calgp"):
        pull("me/digits")
    push(shipped_run(), "me/secret", private=True)
    assert pull("me/secret").finished
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    shutil.rmtree(constants.HF_HUB_CACHE)
    with pytest.raises(CalgpError, match=r"There is no repository me/secret on .*, or it is private"):
        pull("me/secret", "runs/again")


def test_who_may_not_write_is_told_and_no_token_is_shown(server, monkeypatch):
    with pytest.raises(CalgpError, match=r"No permission to write to you/digits on .*HF_TOKEN"):
        push(shipped_run(), "you/digits")
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(CalgpError, match="No permission to write to me/digits") as error:
            push(shipped_run(), "me/digits")
        assert "hf_wrong" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_se\x07cret")
    with pytest.raises(CalgpError, match="The token for the Hub has characters that no token has") as error:
        pull("me/digits")
    assert "cret" not in str(error.value)


def test_a_public_repository_and_one_with_other_files_are_not_overwritten(server):
    push(shipped_run(), "me/digits")
    with pytest.raises(CalgpError, match="me/digits is there already and is public"):
        push(shipped_run(), "me/digits", private=True)
    push(shipped_run(), "me/other")
    files = server.files("me/other")
    (files / "run.calgp").rename(files / "pytorch_model.bin")
    with pytest.raises(CalgpError, match=r"me/other holds other files \(\['pytorch_model.bin'\]\) and no run of calgp"):
        push(shipped_run(), "me/other", revision="wide")
    assert [path.name for path in (server.root / "me/other/refs").iterdir()] == ["main"]


def test_without_a_network_or_the_extra_it_says_so(server, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(CalgpError, match=r"Cannot write to me/digits: ConnectError.* Check the network"):
        push(shipped_run(), "me/digits")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CalgpError, match="HF_HUB_OFFLINE is set"):
        pull("me/digits")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: push(shipped_run(), "me/digits"), lambda: pull("me/digits")):
        with pytest.raises(CalgpError, match=r"pip install 'calgp\[hub\]'"):
            call()


@pytest.mark.parametrize("repo", ["digits", "a/b/c", "../x", "me/..", "me/", "", "me/a b", "me/--x", "-x/y", "me/x\n"])
def test_names_that_are_none_are_refused(server, repo):
    with pytest.raises(CalgpError, match=r"Invalid repository .*: must be OWNER/NAME, such as me/digits"):
        pull(repo, "runs/x")
    assert server.seen == []


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path, monkeypatch):
    push(shipped_run(), "me/digits")
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CalgpError, match=r"Cannot write in .*/file/cache: Not a directory. Make room, or .* HF_HOME"):
        pull("me/digits")


def test_nothing_is_asked_for_what_cannot_be_done(server, tmp_path):
    Path("runs/digits").mkdir(parents=True)
    with pytest.raises(CalgpError, match="it exists, and nothing is overwritten"):
        pull("me/digits")
    with pytest.raises(CalgpError, match=r"Invalid revision '\.\./x'"):
        pull("me/digits", "new", revision="../x")
    copy = RunFolder(shutil.copytree(shipped_run().path, tmp_path / "run"))
    (copy.path / "model.safetensors").unlink()
    with pytest.raises(CalgpError, match="has no model to publish"):
        push(copy, "me/digits")
    assert server.seen == []
