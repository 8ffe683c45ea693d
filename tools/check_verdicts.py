"""Recompute the verdicts of `calgp reproduce --pages` from the small results, by other code, and compare.

Nothing of calgp is imported. The list of comparisons comes from table.json, all numbers from the scores and per-image
scores that it names. A comparison whose interval ends within 10 % of the bound may differ: resamples are drawn anew.

usage: python tools/check_verdicts.py reproduced/laptop [more folders]      (from the folder that --results is in)
"""

import gzip
import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load
from scipy import stats

RESAMPLES, CLOSE = 500, 0.1
Json = dict[str, Any]
Columns = dict[str, np.ndarray]


def main(*folders: str) -> int:
    disagreements = 0
    for file in sorted(file for folder in folders for file in Path(folder).glob("*/table.json")):
        table = json.loads(file.read_text())
        for verdict in table["verdicts"]:
            for problem in check(table, verdict):
                disagreements += 1
                print(f"{file.parent.name}: {verdict['claim']}: {problem}")
        print(f"{file.parent.name}: {sum(len(each['comparisons']) for each in table['verdicts'])} comparisons checked")
    return min(disagreements, 1)


def check(table: Json, verdict: Json) -> Iterator[str]:
    """What is not as stated: states of comparisons, and of the claim, for all of them and at the paper's scale."""
    found = [Comparison(table, each) for each in verdict["comparisons"]]
    for own, each in zip(found, verdict["comparisons"], strict=True):
        if not math.isclose(own.value, each["difference"], rel_tol=1e-6, abs_tol=1e-9):
            yield f"{each['what']}: {each['difference']}, recomputed {own.value}"
        if own.state() != each["state"] and not own.close():
            yield f"{each['what']}: {each['state']}, recomputed {own.state()}"
    chosen = [own for own, each in zip(found, verdict["comparisons"], strict=True) if each["at_paper_scale"]]
    for parts, stated in ((found, verdict["state"]), (chosen, verdict["at_paper_scale"]["state"])):
        if overall(parts) != stated and not any(own.close(len(parts)) or own.close() for own in parts):
            yield f"the claim is {stated}, recomputed {overall(parts)}"


def overall(parts: list["Comparison"]) -> str:
    if not parts:
        return "not run"
    repeated = [part for part in parts if part.freedom]
    if not repeated:
        return "one seed"
    hold = sum(part.state() == "held" for part in repeated)
    against = sum(part.state(len(repeated)) == "not held" for part in repeated)
    decided = (hold + against) / len(parts) >= 0.5
    if hold and against:
        return "not held" if decided and against > hold else "mixed"
    return ("held" if hold else "not held") if decided else "undecided"


class Comparison:
    """A difference of one metric between two rows, of two metrics of one row, or of one metric and a fixed number."""

    def __init__(self, table: Json, stated: Json) -> None:
        rows = [table["rows"][place] for place in stated["rows"]]
        terms = [Term(row, metric, table["faithful"]) for row in rows for metric in stated["metrics"]]
        samples = [term.values for term in terms]
        if len(rows) == 1 and len(terms) == 2:  # seed by seed
            samples = [terms[0].values - terms[1].values]
            self.value = float(samples[0].mean())
        else:
            self.value = terms[0].values.mean() - (terms[1].values.mean() if terms[1:] else stated["offset"])
        self.side, self.margin = stated["side"], stated["margin"]
        self.freedom = sum(len(values) - 1 for values in samples)
        squares = sum(((values - values.mean()) ** 2).sum() for values in samples)
        self.seeds = math.sqrt(squares / max(self.freedom, 1) * sum(1 / len(values) for values in samples))
        self.images = image_error(terms, paired=len(rows) == 2)

    def distance(self) -> float:
        return {"below": self.value, "above": -self.value, "within": abs(self.value) - self.margin}[self.side]

    def half(self, comparisons: int = 1) -> float:
        tail = 1 - 0.025 / comparisons
        return math.hypot(stats.t.ppf(tail, self.freedom) * self.seeds, stats.norm.ppf(tail) * self.images)

    def state(self, comparisons: int = 1) -> str:
        if not self.freedom:
            return "one seed"
        if abs(self.distance()) <= self.half(comparisons):
            return "undecided"
        return "held" if self.distance() < 0 else "not held"

    def close(self, comparisons: int = 1) -> bool:
        """Whether the interval ends so near to the bound that other resamples may decide otherwise."""
        return bool(self.freedom) and abs(abs(self.distance()) / max(self.half(comparisons), 1e-12) - 1) < CLOSE


class Term:
    """A metric of a row: a value and a stored half-interval a seed, and resamples where all seeds have columns."""

    def __init__(self, row: Json, metric: str, faithful: bool) -> None:
        paths = list(zip(row["scores"], row["outside_scores"], strict=True))
        evaluations = [(read(own), read(outside)) for own, outside in paths]
        found = [stored(own, outside, metric, faithful) for own, outside in evaluations]
        self.values = np.array([value for value, _ in found if value is not None])
        halves = [half for _, half in found if half is not None]
        self.half = float(np.mean(halves)) if halves else math.inf  # unknown: no interval, nothing is decided
        self.images = {(own["checksum"], (outside or own)["checksum"]) for own, outside in evaluations}
        self.resamples = None
        files = [(columns_file(own), columns_file(outside)) for own, outside in paths]
        if len(self.images) == 1 and all(own and own.is_file() for own, _ in files):
            most = largest(evaluations[0][1])
            runs = np.mean([resampled(*pair, metric, most) for pair in files], axis=0)
            if np.isfinite(runs).all() and abs(runs[0] - self.values.mean()) <= 0.1 * self.half + 1e-6:
                self.resamples = runs[1:]

    def error(self) -> float:
        return self.half / stats.norm.ppf(0.975) if self.resamples is None else float(self.resamples.std(ddof=1))


def image_error(terms: list[Term], paired: bool) -> float:
    resamples = [term.resamples for term in terms]
    if paired and all(each is not None for each in resamples) and terms[0].images == terms[1].images:
        return float((resamples[0] - resamples[1]).std(ddof=1))
    return math.hypot(*(term.error() for term in terms))


def largest(outside: Json | None) -> float:
    """log Q, where the histogram of entropies ends."""
    return outside["entropy_histogram"]["edges"][-1] if outside and outside.get("entropy_histogram") else 0.0


@cache
def read(path: str | None) -> Json | None:
    return None if path is None else json.loads(Path(path).read_text())


def columns_file(path: str | None) -> Path | None:
    if path is None:
        return None
    scores = Path(path)
    return scores.with_name(scores.name.replace("scores-", "images-", 1).removesuffix(".json") + ".safetensors.gz")


def stored(own: Json, outside: Json | None, metric: str, faithful: bool) -> tuple[float | None, float | None]:
    """The value of a metric, and half its 95 % interval over test images; None where older scores lack it."""
    scores, halves = own["scores"], {name: (high - low) / 2 for name, (low, high) in own["intervals"].items()}
    if metric == "ece" and faithful:
        return own["ece_variants"]["authors"], halves["ece"]
    if metric in halves:
        return scores[metric], halves[metric]
    if metric == "gap":
        return scores["confidence"] - 1 + scores["err"], halves["err"]
    if metric.startswith("entropy"):
        found = own if metric == "entropy_inside" else outside
        if not found.get("entropy_histogram"):
            return found["mean_entropy"], None
        edges, counts = (np.array(found["entropy_histogram"][name]) for name in ("edges", "count"))
        middles = (edges[1:] + edges[:-1]) / 2
        spread = math.sqrt(np.average((middles - np.average(middles, weights=counts)) ** 2, weights=counts))
        return found["mean_entropy"], 1.959964 * spread / math.sqrt(counts.sum())
    if metric == "low_entropy_outside":
        if not outside.get("entropy_histogram"):
            return None, None
        counts = np.array(outside["entropy_histogram"]["count"])
        share = counts[: len(counts) // 10].sum() / counts.sum()
        return share, 1.959964 * math.sqrt(share * (1 - share) / counts.sum())
    number = outside["ood"]["entropy"][metric]
    return number["value"], (number["interval"][1] - number["interval"][0]) / 2


@cache
def weights(n: int, stream: int) -> np.ndarray:
    drawn = np.random.default_rng([stream, n]).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    return np.concatenate([np.ones((1, n)), drawn]).astype(np.float32)


@cache
def columns(path: Path) -> Columns:
    found = load(gzip.decompress(path.read_bytes()))
    n = len(found["entropy"])
    correct = {"correct": np.unpackbits(found.pop("correct"), count=n)} if "correct" in found else {}
    return correct | {name: each.astype(np.float32) for name, each in found.items()}


@cache
def resampled(own_file: Path, outside_file: Path | None, metric: str, most: float) -> np.ndarray:
    own = columns(own_file)
    w = weights(len(own["entropy"]), 0)
    if metric == "ece":
        confidence = 1 - own["one_minus_confidence"]
        bins = np.clip(np.ceil(confidence * 20).astype(int) - 1, 0, 19)
        table = np.zeros((len(bins), 20), np.float32)
        table[np.arange(len(bins)), bins] = confidence - own["correct"]
        return np.abs(w @ table).sum(1) / len(bins)
    inside = {"err": lambda: 1 - own["correct"], "mnll": lambda: -own["log_prob"], "brier": lambda: own["brier"],
              "gap": lambda: 1 - own["one_minus_confidence"] - own["correct"],
              "entropy_inside": lambda: own["entropy"]}  # fmt: skip
    if metric in inside:
        return w @ inside[metric]().astype(np.float32) / w.shape[1]
    outside = columns(outside_file)["entropy"]
    v = weights(len(outside), 1)
    if metric in ("entropy_outside", "low_entropy_outside"):
        column = outside if metric == "entropy_outside" else (outside < 0.1 * most).astype(np.float32)
        return v @ column / len(outside)
    return np.array([detected(own["entropy"], outside, a, b, metric) for a, b in zip(w, v, strict=True)])


def detected(inside: np.ndarray, outside: np.ndarray, w: np.ndarray, v: np.ndarray, metric: str) -> float:
    """AUROC or FPR95 of weighted entropies, ties counted by half."""
    levels, place = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    a = np.bincount(place[: len(inside)], w, len(levels))[::-1].astype(float)
    b = np.bincount(place[len(inside) :], v, len(levels))[::-1].astype(float)
    if metric == "auroc":
        return float((a * (b.cumsum() - b / 2)).sum() / (a.sum() * b.sum()))
    return float(a.cumsum()[np.argmax(20 * b.cumsum() >= 19 * b.sum())] / a.sum())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
