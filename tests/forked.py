"""Python programs in processes of their own, without the seconds that each would take to import torch and calgp.

`python` takes what stands behind `python` on a command line, as `subprocess.run` does; `Started` does not wait for its
end. A process that has imported what nearly all of them need, and computed nothing, forks for each; the checks of types
of the tests are not in it.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NEVER = 300.0  # seconds after which what has not happened is taken for what never does, on a slow machine
_servers: list[subprocess.Popen[str]] = []


def python(*arguments: object, cwd: Path | str | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS…` (-c CODE, -m MODULE or a file): its end, and what it printed. It has this environment."""
    words = [str(each) for each in arguments]
    if not hasattr(os, "fork"):
        return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=check)
    with tempfile.TemporaryDirectory() as place:
        status = _ask(words, cwd, place, wait=True)
        printed, errors = (Path(place, name).read_text() for name in ("out", "err"))
    assert not check or status == 0, (words, status, errors[-3000:])
    return subprocess.CompletedProcess([sys.executable, *words], status, printed, errors)


class Started:
    """`python ARGUMENTS…` that runs meanwhile, as `subprocess.Popen` does; it is killed at the end of the `with`."""

    def __init__(self, *arguments: object, cwd: Path | str | None = None) -> None:
        self._place = tempfile.TemporaryDirectory()
        self.pid = _ask([str(each) for each in arguments], cwd, self._place.name, wait=False)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self._place.cleanup()

    def poll(self) -> int | None:
        """Its status, negative for a signal; None while it runs."""
        status = Path(self._place.name, "status")
        return int(status.read_text()) if status.exists() else None

    def wait(self) -> int:
        deadline = time.monotonic() + NEVER
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, f"it does not end: {self.printed}"
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def printed(self) -> str:
        """What it has printed and its errors, so far."""
        return "".join(Path(self._place.name, name).read_text() for name in ("out", "err"))


def _ask(words: list[str], cwd: Path | str | None, place: str, *, wait: bool) -> int:
    """What the server answers: a status if it is to wait for the end, else a process id."""
    if not _servers or _servers[0].poll() is not None:
        alone = os.environ | {"OMP_NUM_THREADS": "1"}  # a process with threads should not be forked
        started = [sys.executable, __file__]
        _servers[:] = [subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone)]
        atexit.register(_servers[0].stdin.close)
    server = _servers[0]
    asked = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": dict(os.environ), "place": place}
    server.stdin.write(json.dumps({"wait": wait, "program": asked}) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def _serve() -> None:
    import onnxscript  # noqa: F401
    import torch._dynamo
    import torch.onnx  # noqa: F401

    import calgp.cli
    import calgp.runs  # noqa: F401
    from calgp.data import load

    for split in ("train", "test"):
        load("digits", split)  # which is kept
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    answers, watchers = os.dup(1), set()
    for line in sys.stdin:
        asked = json.loads(line)
        watchers = {pid for pid in watchers if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if asked["wait"]:
            answer = _fork(asked["program"], _run)[1]
            os.write(answers, f"{answer()}\n".encode())
        else:
            watchers.add(_fork({"answers": answers, "program": asked["program"]}, _watch)[0])


def _fork(options: dict, do) -> tuple[int, Callable[[], int]]:
    """The process that does it, and how to wait for its status."""
    if pid := os.fork():
        return pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    do(**options)
    raise AssertionError("it has ended the process")


def _watch(answers: int, program: dict) -> None:
    """Start a program, tell who it is, and leave its status in a file when it ends."""
    pid, status = _fork(program, _run)
    os.write(answers, f"{pid}\n".encode())
    part = Path(program["place"], "part")
    part.write_text(str(status()))
    part.rename(part.with_name("status"))
    os._exit(0)


def _run(**program) -> None:
    """Be the program."""
    import runpy
    import traceback

    status = 1
    try:
        _begin(**program)
        first, *sys.argv = program["words"]
        if first == "-c":
            code, sys.argv[0] = sys.argv[0], "-c"
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        elif first == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv.insert(0, first)
            sys.path[0] = str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _begin(*, words: list[str], cwd: str, environment: dict[str, str], place: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[0] = cwd
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(os.path.join(place, name), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(handle, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background do not have


if __name__ == "__main__":
    _serve()
