"""Screenshots of report and server page, light and dark, wide and narrow: `python tools/screenshots.py FOLDER`.

They show the run in the package. docs/figures has those that the documentation uses, reduced to 64 colours.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from calgp.report import write_report  # noqa: E402
from calgp.runs import load, shipped_run  # noqa: E402
from chromium import Browser, Page  # noqa: E402
from serve.conftest import serving  # noqa: E402

SIZES = {"desktop": {"width": 1200, "height": 800}, "phone": {"width": 390, "height": 844}}
READY = "'ready' in document.documentElement.dataset"
DONE = "/sure|know/.test(document.querySelector('#announced').textContent)"
W = [[(0.15, 0.2), (0.32, 0.8), (0.5, 0.35), (0.68, 0.8), (0.85, 0.2)]]


def keep(page: Page, file: Path, *, whole: bool) -> None:
    page.screenshot(file, whole=whole)
    image = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.name}: {image.width} × {image.height}, {file.stat().st_size / 1000:.0f} kB")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, serving(load("shipped")) as address:
        report = write_report([shipped_run()], Path(place) / "report.html").resolve()
        browser = Browser(Path(place) / "profile")
        for form, size in SIZES.items():
            for dark in (False, True):
                name = f"{form}-{'dark' if dark else 'light'}.png"
                page = browser.page(dark=dark, **size)
                page.open(report.as_uri(), "document.readyState == 'complete'")
                keep(page, folder / f"report-{name}", whole=False)
                keep(page, folder / f"whole-report-{name}", whole=True)
                page.close()
                page = browser.page(dark=dark, **size)
                page.open(f"{address}/", READY)
                page.draw("#pad", W)
                page.until(DONE)
                page.evaluate("window.scrollTo(0, 0)")
                keep(page, folder / f"server-{name}", whole=False)
                keep(page, folder / f"whole-server-{name}", whole=True)
                page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
