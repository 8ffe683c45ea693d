"""Headless Chromium over its DevTools protocol, by a pipe: no driver, no package. For the tests of pages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import time
from collections import deque
from importlib.resources import files
from pathlib import Path
from select import select
from typing import Any

import pytest

AXE = """axe.run(document, {resultTypes: ['violations', 'incomplete']}).then(found => ({
    violations: found.violations.map(rule => [rule.id, rule.nodes.map(node => [node.html, node.failureSummary])]),
    unsure: found.incomplete.flatMap(rule => rule.nodes.map(node => [rule.id, node.html])),
    passes: found.passes.map(rule => rule.id),
}))"""
SECONDS = 60.0  # after which a step is taken for one that never ends, on a slow machine


def chromium() -> str:
    """The path of Chromium; skips where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("Chromium is not installed (Debian: apt install chromium)")
    return found


class Browser:
    """A browser process; `page` opens a tab of its own storage.

    Commands go to file descriptor 3 of the browser and events come from 4, as JSON that ends with a zero byte.
    """

    def __init__(self, profile: Path) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-extensions", "--disable-background-networking", "--disable-component-update",
                 "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        path = chromium()
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        # above 4, so that neither is overwritten before it is duplicated
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (reads, writes)]
        log = str(profile.parent / "chromium.log")
        actions = [
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, high[0], 3),
            (os.POSIX_SPAWN_DUP2, high[1], 4),
        ]
        self._process = os.posix_spawn(path, [path, *flags], os.environ, file_actions=actions)
        for each in (reads, writes, *high):
            os.close(each)
        self._buffer, self._last = b"", 0
        self.events: deque[dict[str, Any]] = deque()

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            message = self._message(deadline)
            if message is None:
                raise TimeoutError(f"{method} was not answered")
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def listen(self, seconds: float) -> None:
        """Hear events for a while."""
        deadline = time.monotonic() + seconds
        while (message := self._message(deadline)) is not None:
            self.events.append(message)

    def _message(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select([self._in], [], [], left)[0]:
                return None
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended; chromium.log beside its profile says why")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def page(self, **options: Any) -> Page:
        return Page(self, **options)

    def close(self) -> None:
        try:
            self.command("Browser.close")
        except (OSError, RuntimeError, TimeoutError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._out)
        os.close(self._in)


class Page:
    """A tab. What goes wrong in it (exceptions, console errors, violations of its policy) is kept in `troubles`."""

    def __init__(
        self, browser: Browser, *, width: int = 1280, height: int = 900, dark: bool = False, still: bool = True,
        touch: bool = False,
    ) -> None:  # fmt: skip
        self._browser = browser
        self._context = browser.command("Target.createBrowserContext")["browserContextId"]
        target = browser.command("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._target = target
        self._session = browser.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        if touch:
            self.send("Emulation.setTouchEmulationEnabled", enabled=True)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        self.send("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **parameters)

    def open(self, address: str, ready: str = "true") -> None:
        self.send("Page.navigate", url=address)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        self.until(ready)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        message = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in message:
            raise RuntimeError(message["exceptionDetails"].get("exception", {}).get("description", "it threw"))
        return message["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never came true: {condition}; troubles: {self.troubles}")
            self._browser.listen(0.03)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """x, y, width and height of an element, scrolled into the window."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        return tuple(self.evaluate(f"(b => [b.x, b.y, b.width, b.height])({found}.getBoundingClientRect())"))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        held = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1, "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **(held | more))

    def click(self, selector: str) -> None:
        x, y, width, height = self.box(selector)
        self.mouse("mousePressed", x + width / 2, y + height / 2)
        self.mouse("mouseReleased", x + width / 2, y + height / 2)

    def draw(self, selector: str, strokes: list[list[tuple[float, float]]]) -> None:
        """Draw with the mouse: strokes of points of the unit square."""
        x, y, width, height = self.box(selector)
        for stroke in strokes:
            places = [(x + width * a, y + height * b) for a, b in stroke]
            self.mouse("mousePressed", *places[0])
            for place in places[1:]:
                self.mouse("mouseMoved", *place)
            self.mouse("mouseReleased", *places[-1])

    def touch(self, selector: str, strokes: list[list[tuple[float, float]]]) -> None:
        """Draw with a finger."""
        x, y, width, height = self.box(selector)
        for stroke in strokes:
            for kind, (a, b) in zip(["touchStart"] + ["touchMove"] * (len(stroke) - 1), stroke, strict=True):
                point = {"x": x + width * a, "y": y + height * b}
                self.send("Input.dispatchTouchEvent", type=kind, touchPoints=[point])
            self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, times: int = 1, *, shift: bool = False) -> None:
        """Press a key, such as Tab or ArrowLeft."""
        codes = {"Tab": 9, "Enter": 13, "Space": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
                 "Delete": 46}  # fmt: skip
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        event = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": codes[key],
                 "modifiers": 8 if shift else 0}  # fmt: skip
        for _ in range(times):
            self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
            self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an <input type=file>."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def drop(self, selector: str, file: Path) -> None:
        """Drop a file on an element."""
        x, y, width, height = self.box(selector)
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=x + width / 2, y=y + height / 2, data=data)

    def axe(self) -> dict[str, Any]:
        """What axe finds: violations of rules of accessibility, what it is unsure of, and the rules that are kept."""
        self.evaluate((files("axe_core_python") / "axe.min.js").read_text("utf-8") + "; 0")
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found = self.evaluate(AXE)
        # of text in figures it cannot tell the background; their colours are those of text that it checks elsewhere
        return found | {"unsure": [each for each in found["unsure"] if not each[1].startswith("<text")]}

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    @property
    def troubles(self) -> list[str]:
        self._browser.listen(0.02)
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        thrown = [e["params"]["exceptionDetails"] for e in own if e["method"] == "Runtime.exceptionThrown"]
        console = [e["params"] for e in own if e["method"] == "Runtime.consoleAPICalled"]
        logged = [e["params"]["entry"] for e in own if e["method"] == "Log.entryAdded"]
        return [
            *(each.get("exception", {}).get("description", each["text"]) for each in thrown),
            *(str(each["args"]) for each in console if each["type"] in ("error", "warning", "assert")),
            *(each["text"] for each in logged if each["level"] in ("error", "warning")),
        ]

    def forgive(self) -> None:
        """Forget what has happened so far."""
        self._browser.listen(0.02)
        self._browser.events = deque(e for e in self._browser.events if e.get("sessionId") != self._session)

    def close(self) -> None:
        self._browser.command("Target.disposeBrowserContext", browserContextId=self._context)
        self.forgive()
