"""What names say is shown and never obeyed."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table

import calgp
from calgp.cli.terminal import PlainColumn, Terminal, styled
from forked import python

HOSTILE = "a[/b]:smile:[red]\x1b[2J\x9b31m\u202e"
SHOWN = "a[/b]:smile:[red]�[2J�31m�"


@pytest.fixture
def terminal():
    found = Terminal()
    found.file, found.width = io.StringIO(), 200
    return found


def tabled():
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    return table


@pytest.mark.parametrize(
    ("make", "times"),
    [(lambda: HOSTILE, 1), (tabled, 4), (lambda: styled((HOSTILE, "bold"), HOSTILE), 2)],
    ids=["line", "table", "styled"],
)
def test_text_is_shown_as_it_is_but_for_control_characters(terminal, make, times):
    terminal.print(make())
    shown = terminal.file.getvalue()
    assert shown.count(SHOWN) == times and "\x1b" not in shown and "\x9b" not in shown and "\u202e" not in shown


class Tty(io.StringIO):
    def isatty(self):
        return True


LONG = "/a/long/path/" + "x" * 40


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        (io.StringIO, [f"Error: One sentence of many words, about {LONG} and more.", f"Next: calgp report {LONG}"]),
        (Tty, ["Error: One sentence of many", "words, about", LONG, "and more.", f"Next: calgp report {LONG}"]),
    ],
    ids=["file", "terminal"],
)
def test_sentences_break_between_words_on_a_terminal_and_nowhere_else(file, lines):
    shown = Terminal()
    shown.file, shown.width = file(), 30
    shown.say(f"One sentence of many words, about {LONG} and more.\nNext: calgp report {LONG}", problem=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.file.getvalue())
    assert plain.splitlines() == lines


def test_columns_of_progress_bars_too(terminal):
    with Progress(PlainColumn("{task.description}"), console=terminal) as bar:
        bar.add_task(HOSTILE)
    assert SHOWN in terminal.file.getvalue()


def test_no_other_console_is_made():
    """One exit: every command prints by `out`, `err` or the progress bars' Terminal."""
    rooms = Path(calgp.__file__).parent
    assert [file.name for file in rooms.rglob("*.py") if "import Console" in file.read_text()] == ["terminal.py"]


TWO_COMMANDS = """
import sys
from calgp.cli import main

for arguments in (["methods", "cnn-gp-sorf"], ["evaluate", sys.argv[1]]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_what_it_can_show(tmp_path, encoding):
    environment = {"PYTHONIOENCODING": encoding, "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    program = [sys.executable, "-c", TWO_COMMANDS, str(tmp_path / "Löwe→")]
    done = subprocess.run(program, capture_output=True, env=environment | {"COLUMNS": "100"})
    assert done.returncode == 1 and b"Traceback" not in done.stderr, done.stderr
    assert "masks" in done.stdout.decode(encoding) and b"Error" in done.stderr


@pytest.mark.slow
def test_a_folder_whose_name_is_markup_can_be_trained_into(tmp_path):
    """It ended in a MarkupError, after the training."""
    command = ["-m", "calgp", "train", "--source", "digits", "--method", "cnn", "--steps", "1", "--out", "a[/b]"]
    for status, said in ((0, "into a[/b]."), (1, "Error: a[/b] already holds a run.")):
        done = python(*command, cwd=tmp_path)
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr[-2000:]
