"""A run as a page of the Hugging Face Hub: README.md with the header that the Hub reads."""

import re

from calgp._version import __version__
from calgp.errors import printable
from calgp.runs.card import Card
from calgp.runs.folder import RunFolder
from calgp.runs.results import Evaluation

from .metric_names import METRICS, PAPER
from .run_section import calibration_facts, facts
from .words import detection, interval, nats, summary

PAGE = """\
---
library_name: calgp
pipeline_tag: {task}
tags:
- calgp
- gaussian-process
- calibration
- uncertainty
---

# {name}

{label}: {kind} with uncertainty, {classes}.

{facts}

## Use

```python
import calgp, calgp.hub
run = calgp.load(calgp.hub.pull("{repo}", "runs/{name}").path)
print(run.predict({example}))
```

Needs `pip install 'calgp[hub]'`. On the command line: `calgp pull {repo}`. Every file is checked against its SHA-256 on
arrival, and none holds code. Written by calgp {version}.

## Scores

{scores}
"""
MARKS = re.compile(r"([\\`*_\[\]<>|#~$])")  # of Markdown and HTML


def model_card(folder: RunFolder, repo: str) -> str:
    """The README.md of a run in the repository OWNER/NAME.

    >>> from calgp.runs import shipped_run
    >>> page = model_card(shipped_run(), "me/digits")
    >>> page.splitlines()[:3]
    ['---', 'library_name: calgp', 'pipeline_tag: image-classification']
    """
    card = folder.card()
    found = sorted(folder.evaluations(), key=lambda each: (each.outside, each.source, each.calibrator or ""))
    described = [pair for pair in facts(folder, card) if pair[0] != "folder"] + calibration_facts(folder.calibration())
    return PAGE.format(
        task="image-classification" if card.vectors is None else "tabular-classification",
        name=repo.partition("/")[2],
        repo=repo,
        label=escaped(card.label),
        kind="an image classifier" if card.vectors is None else "a classifier of embeddings",
        classes=escaped(card.task_summary()),
        facts="\n".join(f"- {name}: {escaped(value)}" for name, value in described),
        example='"image.png"' if card.vectors is None else "embeddings",
        version=__version__,
        scores="\n\n".join(_scores(each, card) for each in found) or "It has not been evaluated.",
    )


def escaped(text: str) -> str:
    r"""Text of a run in one line of Markdown, in which it means nothing but itself.

    >>> escaped("a|b\n<c>")
    'a\\|b \\<c\\>'
    """
    return MARKS.sub(r"\\\1", printable(" ".join(text.split())))


def _scores(found: Evaluation, card: Card) -> str:
    """What an evaluation found: a sentence, and a table with 95 % intervals."""
    title = f"### {escaped(found.source)}" + (f", calibrated by {found.calibrator}" if found.calibrator else "")
    if not found.outside:
        rows = []
        for key in PAPER:
            name, form, meaning = METRICS[key]
            ends = interval(getattr(found.own.intervals, key), form)
            rows.append(f"| {name} | {form(getattr(found.own.scores, key))} | {ends} | {meaning} |")
        table = ["| score | value | 95 % interval | meaning |", "| --- | --- | --- | --- |", *rows]
        return "\n".join([title, "", summary(found.own.scores, None), "", *table])
    said = f"{found.n:,} images of other classes."
    if found.ood is not None:
        auroc = found.ood["entropy"].auroc
        said += " " + escaped(detection(found.source, found.inside or card.run.source, auroc.value))
        said += f" AUROC of the entropy {nats(auroc.value)} (95 % interval {interval(auroc.interval, nats)})."
    return "\n".join([title, "", said])
