"""Draw README's picture: reliability of a run, and the entropies of one that was evaluated inside and outside.

usage: python tools/readme_picture.py RUN RUN docs/picture.png     (needs chromium)
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from calgp.report.figures import Bins, entropies, reliability
from calgp.runs import RunFolder

PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 24px; background: #fff; color: #222; font: 15px/1.4 system-ui, sans-serif }}
body {{ display: flex; gap: 40px }} figure {{ margin: 0; flex: 1 }} svg {{ width: 100%; height: auto }}
figcaption {{ font-weight: 600; margin-bottom: 8px }}
</style><figure><figcaption>Reliability on {known}</figcaption>{left}</figure>
<figure><figcaption>Entropy of the predictions on {inside} and {outside}</figcaption>{right}</figure>"""


def main(calibrated: str, doubting: str, out: str) -> None:
    known = next(each for each in RunFolder(calibrated).evaluations() if not each["outside"])
    left = reliability(Bins(**known["reliability"]), ece=known["scores"]["ece"], mce=known["scores"]["mce"])
    folder = RunFolder(doubting)
    own = folder.card().run.source
    outside = next(each for each in folder.evaluations() if each["outside"])
    entropy = {
        name: folder.tensors(folder.predictions_name(name))["entropy"].tolist() for name in (own, outside["source"])
    }
    auroc = outside["ood"]["entropy"]["auroc"]
    right = entropies(
        entropy[own],
        entropy[outside["source"]],
        classes=len(folder.card().classes),
        names=(own, outside["source"]),
        auroc=(auroc["value"], tuple(auroc["interval"])),
    )
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "page.html"
        page.write_text(
            PAGE.format(left=left, right=right, known=known["source"], inside=own, outside=outside["source"]), "utf-8"
        )
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
        options += ["--disable-background-networking", f"--user-data-dir={place}/profile", "--window-size=1120,690"]
        subprocess.run(["chromium", *options, f"--screenshot={out}", page.as_uri()], check=True, capture_output=True)  # noqa: S603, S607


if __name__ == "__main__":
    main(*sys.argv[1:])
