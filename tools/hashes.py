"""`requirements.lock`: the pinned set of calgp[all] with the hashes of its files. `make hashes` runs it (needs uv).

torch is left out with what it alone needs: its build depends on the machine.
"""

import re
import subprocess
import sys
from pathlib import Path

OF_TORCH = re.compile(r"(nvidia|triton|cuda)[-a-z0-9]*==")
HEAD = """\
# The pinned set of calgp[all] with the hashes of its files, but for torch, whose build depends on the machine:
#   pip install torch==2.13.0
#   pip install --require-hashes --no-deps -r requirements.lock
#   pip install --no-deps calgp
# Written by `make hashes` from pyproject.toml and constraints.txt.
"""


def main() -> None:
    command = ["uv", "pip", "compile", "pyproject.toml", "--extra", "all", "-c", "constraints.txt", "--generate-hashes"]
    command += ["--no-emit-package", "torch", "--no-emit-index-url", "--no-annotate", "--no-header", "-q"]
    found = subprocess.run([*command, *sys.argv[1:]], check=True, capture_output=True, text=True).stdout  # noqa: S603
    blocks = re.split(r"(?m)^(?=[a-z0-9])", found)  # a package and its hashes
    Path("requirements.lock").write_text(HEAD + "".join(block for block in blocks if not OF_TORCH.match(block)))


if __name__ == "__main__":
    main()
