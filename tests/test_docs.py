"""The documentation site is built from what is there, without a warning; its notebooks run; CONTRIBUTING is true."""

import asyncio
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from calgp import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "results").glob("**/*.md"))]  # not on the site


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)], cwd=ROOT, capture_output=True,
        text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr  # --strict: a warning ends it
    return folder


@pytest.mark.slow
def test_the_site_needs_no_other_host(site):
    """Pages load nothing from elsewhere; links that a reader may follow do not count."""
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not [place for place in loaded if "canonical" not in place], page.name


@pytest.mark.slow
def test_equations_are_linked_to_the_code(site):
    text = (site / "paper.html").read_text()
    for place in ("calgp.gp.inference.Bound", "calgp.gp.masks.Masking.kl", "calgp.metrics._calibration.ece"):
        assert f"#{place}" in text
    assert "][calgp" not in text  # a link that was not resolved


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site):
    """What is in docs/ can be reached."""
    start = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in start, page


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def notebook_outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def words_of(notebook):
    """What is printed, without numbers: these may differ between machines."""
    printed = "".join(output.text for output in notebook_outputs(notebook) if output.output_type == "stream")
    return re.sub(r"[\d.,]+", "#", printed)


@pytest.fixture(scope="module")
def kernel():
    """A process for all notebooks, so that one imports torch."""
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager(kernel_name="python3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")  # Jupyter has its own
        asyncio.run(manager.start_kernel())
    yield manager
    asyncio.run(manager.shutdown_kernel(now=True))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_is_stored_in_it(path, kernel, tmp_path):
    import nbformat

    shorter = tmp_path / path.name  # what is printed, but for numbers, depends on no number of steps
    text = path.read_text(encoding="utf-8").replace("steps=300)", "steps=100)").replace("steps=400)", "steps=50)")
    shorter.write_text(text, encoding="utf-8")
    found, stored = tool("notebooks").execute(shorter, tmp_path, kernel), nbformat.read(path, as_version=4)
    assert words_of(found) == words_of(stored) and len(notebook_outputs(stored)) >= 4
    assert any("image/png" in output.get("data", {}) for output in notebook_outputs(found))
    assert not [output for output in notebook_outputs(found) if output.get("name") == "stderr"]


def test_there_is_a_notebook_for_each_way_in():
    """Four, each with a guarded installation, and a text for every image."""
    import nbformat

    assert [path.stem for path in NOTEBOOKS] == ["embeddings", "folder_of_images", "own_training_loop", "trained_model"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        first = next(cell for cell in notebook.cells if cell.cell_type == "code")
        assert "find_spec" in first.source and "%pip install" in first.source
        assert str(ROOT) not in path.read_text() and path.stat().st_size < 200_000
        for cell in notebook.cells:
            drawn = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
            assert not drawn or len(cell.metadata["alt"]) > 40


def test_a_terminal_recording_ends_with_the_last_screen():
    """A progress bar that is overwritten, then a result in green; without motion only the end is shown."""
    recording = tool("terminal_svg")
    events = [(0.1, "half\r\n"), (0.2, "\x1b[1A\x1b[2Kdone\r\n"), (0.3, "\x1b[32mbetter\x1b[0m <1\r\n")]
    svg = recording.draw({"command": "calgp demo", "events": events}, "A demo")
    *frames, last = re.findall(r'<g id="f\d+" class="(\w+)">(.*?)</g>', svg)
    assert [name for name, _ in frames] == ["frame"] * 3 and last[0] == "last"
    text = re.sub(r"<[^>]*>", "|", last[1])
    assert "calgp demo" in text and "done" in text and "half" not in text and "better" in text and "&lt;1" in text
    assert recording.COLOURS["32"] in last[1]
    assert "prefers-reduced-motion:no-preference" in svg and "<title>A demo</title>" in svg


def command_lines(page):
    """The calls of calgp in a page's blocks of shell commands, without comments, as lists of words."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "calgp" in words and not {"pip", "#SBATCH"} & set(words):
                yield words[words.index("calgp") + 1 :]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_commands_and_options_exist(page):
    group = get_command(cli.app)
    for words in command_lines(page):
        if words[0] == "--network":
            words = words[2:]
        command = group.commands.get(words[0], group)
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
        assert command is not group or words[0].startswith("--"), words
        assert {word for word in words if re.match(r"--?[a-zA-Z]", word)} <= known, words


@pytest.mark.parametrize("name", ["metrics.md", "ece.md"])
def test_examples_of_metrics_run(name):
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.S):
        exec(compile(block, name, "exec"), {})  # noqa: S102 (our own page)


def test_the_site_stays_short():
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES if page.parent.name != "api")
    assert words <= 20_000


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.stem)
def test_links_outside_of_the_site_resolve(page):
    """mkdocs checks those of the site."""
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert re.match(r"https?:", link) or (page.parent / link).exists(), link


def test_pages_that_the_code_names_are_there():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"docs/[\w/-]+\.md", text))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.fixture(scope="module")
def rooms():
    return tool("rooms")


def test_the_drawing_of_the_rooms_is_that_of_the_import_contract(rooms):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert rooms.drawn(page) == page, "run `python tools/rooms.py`"
    named = {room for layer in rooms.layers() for room in layer} - {"trackers", "errors", "json_values"}
    assert named == set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    there = {path.stem for path in (ROOT / "src" / "calgp").iterdir() if not path.name.startswith("_")}
    assert named | {"trackers", "errors", "json_values"} == there - {"py"}


def test_contributing_names_files_that_are_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:src/calgp/)?((?:\w+/)*\w+\.py)`", page)) - {
        "methods/yours.py",
        "tests/methods/test_yours.py",
    }
    assert len(named) > 20
    assert [name for name in named if not any((ROOT / place / name).is_file() for place in ("src/calgp", "."))] == []


def test_contributing_names_what_is_in_those_files():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)*\w+\.py)` \(`([\w.]+)`\)", page)
    assert len(named) > 12
    for file, name in named:
        source = (ROOT / "src/calgp" / file).read_text(encoding="utf-8")
        assert all(re.search(rf"^ *(?:def|class) {part}\b", source, re.M) for part in name.split(".")), (file, name)
