"""Python programs in processes of their own, without the seconds that each would take to import torch and calgp.

`python` takes what stands behind `python` on a command line, as `subprocess.run` does. A process that has imported what
nearly all of them need, and computed nothing, forks for each; the checks of types of the tests are not in it.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_started: list[subprocess.Popen[str]] = []


def python(*arguments: object, cwd: Path | str | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS…` (-c CODE, -m MODULE or a file): its end, and what it printed. It has this environment."""
    words = [str(each) for each in arguments]
    if not hasattr(os, "fork"):
        return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=check)
    if not _started or _started[0].poll() is not None:
        alone = os.environ | {"OMP_NUM_THREADS": "1"}  # a process with threads should not be forked
        server = [sys.executable, __file__]
        _started[:] = [subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone)]
        atexit.register(_started[0].stdin.close)
    server = _started[0]
    with tempfile.TemporaryDirectory() as place:
        asked = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": dict(os.environ), "place": place}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        printed, errors = (Path(place, name).read_text() for name in ("out", "err"))
    done = subprocess.CompletedProcess([sys.executable, *words], status, printed, errors)
    if check:
        done.check_returncode()
    return done


def _serve() -> None:
    import runpy
    import traceback

    import onnxscript  # noqa: F401
    import torch._dynamo
    import torch.onnx  # noqa: F401

    import calgp.cli
    import calgp.runs  # noqa: F401
    from calgp.data import load

    for split in ("train", "test"):
        load("digits", split)  # which is kept
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    answers = os.dup(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if pid := os.fork():
            os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
            continue
        status = 1
        try:
            _begin(**asked)
            first, *sys.argv = asked["words"]
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


if __name__ == "__main__":
    _serve()
