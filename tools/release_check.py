"""Build the wheel, look into it, install it into an empty environment, and use the shipped model from elsewhere.

`make release-check` runs it. The wheel is left in dist/.
"""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGE = """
from PIL import Image
from calgp.data import load
Image.fromarray(load("digits", "test").x[0, 0].numpy()).save("digit.png")
"""


def main() -> None:
    dist = ROOT / "dist"
    with tempfile.TemporaryDirectory() as place:
        _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(dist), str(ROOT)], ROOT)
        (wheel,) = sorted(dist.glob("calgp-*.whl"), key=lambda file: file.stat().st_mtime)[-1:]
        _look_into(wheel)
        venv.create(Path(place) / "venv", with_pip=True)
        python = str(Path(place) / "venv" / "bin" / "python")
        constraints = str(ROOT / "constraints.txt")
        _run([python, "-m", "pip", "install", "-q", "--no-compile", "-c", constraints, str(wheel)], place)
        version = _run([python, "-m", "calgp", "--version"], place).strip()
        if f"-{version}-" not in wheel.name:
            sys.exit(f"The installed package says it is {version}; the wheel is {wheel.name}.")
        _run([python, "-c", IMAGE], place)
        print(_run([python, "-m", "calgp", "predict", "shipped", "digit.png"], place))
    print(f"{wheel.relative_to(ROOT)} ({wheel.stat().st_size / 1e6:.1f} MB) installs and predicts.")


def _look_into(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    strange = [name for name in names if not name.startswith("calgp/") and ".dist-info/" not in name]
    missing = {"calgp/py.typed", "calgp/runs/shipped/model.safetensors"} - set(names)
    if strange or missing:
        sys.exit(f"{wheel.name} holds {strange[:3] or 'nothing strange'}, and lacks {sorted(missing) or 'nothing'}.")


def _run(command: list[str], place: Path | str) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
