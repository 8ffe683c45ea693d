"""Write docs/claims.md and its figure: what our runs say about each of the paper's claims.

usage: python tools/claims.py reproduced/laptop [reproduced/desk reproduced/paper]      (the largest scale last)
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calgp.paper import EXPERIMENTS
from calgp.paper.tables import NAMES as METRICS
from calgp.report.svg import drawing

DOCS = Path(__file__).parent.parent / "docs"
NAMES = {
    "fig1": "Figure 1", "fig2": "Figure 2", "fig3": "Figure 3", "fig4": "Figure 4", "fig5": "Supplement, figure",
    "tab2": "Supplement, table of θ", "tab3": "Supplement, table of GPDNN with MCD",
}  # fmt: skip
WORDS = {"held": "supported", "not held": "contradicted", "mixed": "mixed", "undecided": "undecided"}
UNTESTED = "not tested"
# what comparisons say, from for to against; those of one seed are pale
KINDS = {
    "for": "#0072b2", "one seed, for": "#9cc4de", "undecided": "#8a8a8a", "one seed, unclear": "#dcdcdc",
    "one seed, against": "#efbd99", "against": "#d55e00",
}  # fmt: skip
HEAD = """# The paper's claims

What our runs say about each claim of “Calibrating Deep Convolutional Gaussian Processes” (Tran et al., 2018).
Written by `tools/claims.py` (`make claims`) from `results/`; not edited by hand.

- **The paper's scale** means the paper's network, trained on all images. MNIST: LeNet. CIFAR-10: LeNet and ResNet n=5.
  CIFAR-100: ResNet n=25. The paper names no number of steps, so budgets are ours.
- **supported / contradicted**: by at least half of the comparisons there, with two or more seeds and 95 % intervals
  over seeds and test images. **mixed**: some comparisons are for the claim and some surely against it. **undecided**:
  tested, but the intervals are too wide. **not tested**: not run, or with one seed, which is only indicative.
- **Smaller scales** have smaller networks or fewer images. They are no test of the paper.

[How claims are judged](reproduce.md#verdicts). All numbers: `results/reproduced.md` in the repository.

"""


@dataclass(frozen=True)
class Claim:
    """A claim with what each scale found, the largest scale last."""

    experiment: str
    text: str
    found: tuple[tuple[str, list[dict[str, Any]], dict[str, Any]], ...]  # scale, its rows, its verdict


def main(*folders: str) -> None:
    claims = list(read(folders))
    (DOCS / "figures").mkdir(exist_ok=True)
    draw(claims, DOCS / "figures" / "claims.png")
    states = Counter(at_paper_scale(claim)[0].split(",")[0] for claim in claims)
    summary = ", ".join(f"{states[word]} {word}" for word in (*WORDS.values(), UNTESTED) if states[word])
    lines = [HEAD, f"**Of {len(claims)} claims at the paper's scale: {summary}.**\n\n"]
    lines.append("![Shares of comparisons for and against each claim](figures/claims.png)\n")
    for name in NAMES:
        lines.append(f"\n## {NAMES[name]}\n\n{EXPERIMENTS[name].title}.\n\n")
        lines.append("| claim | at the paper's scale | evidence there | smaller scales |\n| --- | --- | --- | --- |\n")
        for claim in (claim for claim in claims if claim.experiment == name):
            word, evidence = at_paper_scale(claim)
            lines.append(f"| {claim.text} | **{word}** | {evidence} | {elsewhere(claim)} |\n")
    (DOCS / "claims.md").write_text("".join(lines))


def read(folders: Sequence[str]) -> list[Claim]:
    """The claims of the paper's own figures and tables."""
    claims = []
    for name in NAMES:
        tables = [json.loads((Path(folder) / name / "table.json").read_text()) for folder in folders]
        for place, judge in enumerate(tables[-1]["verdicts"]):
            found = tuple((table["scale"], table["rows"], table["verdicts"][place]) for table in tables)
            claims.append(Claim(name, judge["claim"], found))
    return claims


def at_paper_scale(claim: Claim) -> tuple[str, str]:
    """Supported, contradicted, …, and the evidence, from the largest scale that has a comparison at the paper's."""
    panels = {part["panel"] for _, _, verdict in claim.found for part in verdict["comparisons"]}
    untested = UNTESTED, "not run"
    for _, rows, verdict in reversed(claim.found):
        parts = [part for part in verdict["comparisons"] if part["at_paper_scale"]]
        if not parts:
            continue
        state = verdict["at_paper_scale"]["state"]
        if state == "one seed":
            untested = (UNTESTED, evidence(rows, parts)) if untested[1] == "not run" else untested
            continue
        tested = {part["panel"] for part in parts if part["state"] != "one seed"}
        where = "" if tested == panels else f", {len(tested)} of {len(panels)} panels"
        return WORDS[state] + where, evidence(rows, parts)
    return untested


def elsewhere(claim: Claim) -> str:
    """What comparisons that are not at the paper's scale found, a line for each scale."""
    found = []
    for scale, rows, verdict in claim.found:
        parts = [part for part in verdict["comparisons"] if not part["at_paper_scale"]]
        found += [f"{scale}: {evidence(rows, parts)}"] if parts else []
    return "<br>".join(found) or "–"


def evidence(rows: list[dict[str, Any]], parts: list[dict[str, Any]]) -> str:
    """A single difference with its interval, or how comparisons went; then what was run."""
    used = [rows[place] for part in parts for place in part["rows"]]
    text = _single(parts[0]) if len(parts) == 1 else _counted(parts)
    networks = " / ".join(dict.fromkeys(row["network"] for row in used if row["network"] != "none"))
    sizes = sorted({_images(row) for row in used})
    images = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    seeds = sorted({len(row["seeds"]) for row in used})
    counted = "1 seed" if seeds == [1] else f"{' to '.join(dict.fromkeys(map(str, (seeds[0], seeds[-1]))))} seeds"
    return f"{text}; {networks or 'no network'}, {images} images, {counted}"


def _single(part: dict[str, Any]) -> str:
    """The number that is compared: a metric against its bound, or a difference."""
    numbers = [part["difference"], *(part["interval"] or [])]
    if part["offset"]:
        numbers = [number + part["offset"] for number in numbers]
    name = "difference" if len(part["rows"]) > 1 or len(part["metrics"]) > 1 else METRICS[part["metric"]]
    value, *ends = (f"{number:.3f}".replace("-", "−") for number in numbers)
    return f"{_kind(part)}: {name} {value}" + (f" ({' … '.join(ends)})" if ends else "")


def _counted(parts: list[dict[str, Any]]) -> str:
    """How comparisons went: those with repeated seeds, then those of single seeds."""
    counts = Counter(map(_kind, parts))
    repeated = [f"{counts[kind]} {kind}" for kind in ("for", "against", "undecided") if counts[kind]]
    kinds = {kind: counts[f"one seed, {kind}"] for kind in ("for", "against", "unclear")}
    single = [f"{count} {kind}" for kind, count in kinds.items() if count]
    return "; ".join(
        ([", ".join(repeated)] if repeated else []) + (["one seed: " + ", ".join(single)] if single else [])
    )


def _images(row: dict[str, Any]) -> int:
    found = row["training images"]
    return int(found.replace(",", "")) if isinstance(found, str) else int(found)


def _kind(part: dict[str, Any]) -> str:
    if part["state"] == "one seed":
        return f"one seed, {part['leaning']}"
    return {"held": "for", "not held": "against"}.get(part["state"], "undecided")


def draw(claims: Sequence[Claim], path: Path) -> None:
    """A bar for each claim: shares of all its comparisons, at any scale, and how many there are."""
    with drawing(860, 70 + 26 * len(claims)) as figure:
        axes = figure.subplots()
        for place, claim in enumerate(claims):
            parts = [part for _, _, verdict in claim.found for part in verdict["comparisons"]]
            left = 0.0
            for kind, colour in KINDS.items():
                share = sum(_kind(part) == kind for part in parts) / max(len(parts), 1)
                axes.barh(place, share, left=left, color=colour, height=0.72, label=kind if place == 0 else None)
                left += share
            axes.text(1.01, place, f"{len(parts)}", va="center", size=10)
        axes.set_yticks(range(len(claims)), [_short(claim) for claim in claims], size=10)
        axes.set(xlim=(0, 1), ylim=(len(claims) - 0.4, -0.6), xticks=(0, 0.5, 1))
        axes.set_xticklabels(["0", "half of the comparisons", "all"])
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper left", ncols=3, fontsize=10)
        figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


def _short(claim: Claim) -> str:
    text = f"{claim.experiment}: {claim.text}"
    return text if len(text) <= 68 else text[:66].rsplit(" ", 1)[0] + " …"


if __name__ == "__main__":
    main(*sys.argv[1:])
