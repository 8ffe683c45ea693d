"""A terminal recording as an SVG that plays in browsers: real output of a real run, in twenty seconds.

    python tools/terminal_svg.py record demo.json calgp demo             run it in a terminal of 80 × 24
    python tools/terminal_svg.py draw demo.json docs/figures/demo.svg    the same screens, time compressed

Waiting is shortened, nothing else is changed. Readers who prefer reduced motion see the last screen.
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from html import escape
from pathlib import Path

COLUMNS, ROWS = 80, 24
SECONDS, LAST = 20.0, 7.0  # of the whole, and of the last screen
FRAMES = 36
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|[\r\n]|[^\x1b\r\n]")
COLOURS = {  # on #161b22, each with a contrast of at least 4.5
    "30": "#8b949e", "31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff",
    "36": "#76e3ea", "37": "#e6edf3", "90": "#8b949e",
    "38;5;197": "#ff7b72", "38;5;70": "#7ee787", "38;5;237": "#57606a",
}  # fmt: skip
Cell = tuple[str, str]  # a character, and its style: a colour and perhaps bold
Screen = tuple[tuple[Cell, ...], ...]


def record(file: Path, command: list[str]) -> None:
    """Run a command in a terminal of its own; what it writes, with the seconds since its start."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)  # noqa: S603
    os.close(slave)
    events: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # the command has ended
            break
        rest += part
        text = rest.decode("utf-8", errors="ignore")
        rest = rest[len(text.encode()) :]
        events.append((round(time.monotonic() - start, 2), text))
    if process.wait():
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}")
    file.write_text(json.dumps({"command": " ".join(command), "folder": str(Path.cwd()), "events": events}))


class Emulator:
    """As much of a terminal as progress bars and tables need: lines, cursor up, erase, colours."""

    def __init__(self) -> None:
        self.lines: list[list[Cell]] = [[]]
        self.row = self.column = 0
        self.style = ""

    def write(self, text: str) -> None:
        for match in CONTROL.finditer(text):
            piece, number, kind = match[0], match[1] or "", match[2]
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self.row += 1
                self.lines += [[]] * (self.row >= len(self.lines))
                self.lines = [list(line) for line in self.lines]
            elif kind == "A":
                self.row = max(0, self.row - int(number or 1))
            elif kind == "K":
                self.lines[self.row] = [] if number == "2" else self.lines[self.row][: self.column]
            elif kind == "m":
                self._set_style(number)
            elif kind is None and len(piece) == 1:
                line = self.lines[self.row]
                line += [(" ", "")] * (self.column + 1 - len(line))
                line[self.column] = (piece, self.style)
                self.column += 1

    def _set_style(self, codes: str) -> None:
        bold, colour = "bold" in self.style, self.style.removeprefix("bold ").removeprefix("bold")
        for code in re.findall(r"38;5;\d+|38;2;\d+;\d+;\d+|\d+", codes) or ["0"]:
            if code == "0":
                bold, colour = False, ""
            elif code == "1":
                bold = True
            elif code.startswith("38;2;"):
                colour = "#{:02x}{:02x}{:02x}".format(*map(int, code.split(";")[2:]))
            elif code in COLOURS:
                colour = COLOURS[code]
            elif code == "39":
                colour = ""
        self.style = f"{'bold ' * bold}{colour}".strip()

    def screen(self) -> Screen:
        return tuple(tuple(line) for line in self.lines[-ROWS:])


def frames(recording: dict) -> list[tuple[float, Screen]]:
    """Screens and when they begin, in seconds of the drawing: changes evenly, the last one for longer."""
    terminal, screens = Emulator(), []
    terminal.write(f"\x1b[1;32m$\x1b[0m {recording['command']}\r\n")
    screens.append(terminal.screen())
    for _, text in recording["events"]:
        terminal.write(text.replace(recording.get("folder", "\0"), "~"))
        if (now := terminal.screen()) != screens[-1]:
            screens.append(now)
    chosen = sorted({round(k * (len(screens) - 1) / (FRAMES - 1)) for k in range(FRAMES)})
    step = (SECONDS - LAST) / max(1, len(chosen) - 1)
    return [(number * step, screens[k]) for number, k in enumerate(chosen)]


def line_svg(line: tuple[Cell, ...], y: int) -> str:
    """Runs of one style as tspans; spaces stay."""
    parts: list[list[str]] = []
    for character, style in line:
        if parts and parts[-1][1] == style:
            parts[-1][0] += character
        else:
            parts.append([character, style])
    text = ""
    for content, style in parts:
        colour = style.removeprefix("bold").strip()
        attributes = (' font-weight="700"' * style.startswith("bold")) + (f' fill="{colour}"' if colour else "")
        text += f"<tspan{attributes}>{escape(content)}</tspan>" if attributes else escape(content)
    return f'<text y="{y}">{text}</text>' if text.strip() else ""


def draw(recording: dict, title: str) -> str:
    timed = frames(recording)
    width, height = 8.43 * COLUMNS + 32, 18 * ROWS + 28
    groups, rules = [], []
    ends = [start for start, _ in timed[1:]] + [SECONDS]
    for number, ((start, screen), end) in enumerate(zip(timed, ends, strict=True)):
        body = "".join(line_svg(line, 18 * row) for row, line in enumerate(screen))
        last = number == len(timed) - 1
        groups.append(f'<g id="f{number}" class="{"last" if last else "frame"}">{body}</g>')
        a, b = 100 * start / SECONDS, 100 * end / SECONDS
        rules.append(
            f"@keyframes k{number}{{0%{{opacity:{int(start == 0)}}}{a:.2f}%{{opacity:1}}"
            + ("" if last else f"{b:.2f}%{{opacity:0}}")
            + f"100%{{opacity:{int(last)}}}}}#f{number}{{animation:k{number} {SECONDS:g}s steps(1,end) infinite}}"
        )
    style = (
        ".frame{opacity:0}@media (prefers-reduced-motion:no-preference){" + "".join(rules) + "}"
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6edf3;"
        "white-space:pre}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>{style}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#161b22"/><g transform="translate(16 28)" xml:space="preserve">'
        + "".join(groups)
        + "</g></svg>\n"
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", file, *command] if command:
            record(Path(file), command)
        case ["draw", file, target]:
            recording = json.loads(Path(file).read_text())
            Path(target).write_text(draw(recording, f"Terminal recording of {recording['command']}"), encoding="utf-8")
        case _:
            sys.exit(__doc__)
