"""A run as a page of the Hugging Face Hub: README.md with the header that the Hub reads."""

import re

from calgp._version import __version__
from calgp.errors import printable
from calgp.runs.folder import RunFolder

from .page import render_page
from .run_section import calibration_facts, facts

MARKS = re.compile(r"([\\`*_\[\]<>|#~$])")  # of Markdown and HTML


def model_card(folder: RunFolder, repo: str) -> str:
    """The README.md of a run in the repository OWNER/NAME.

    >>> from calgp.runs import shipped_run
    >>> page = model_card(shipped_run(), "me/digits")
    >>> page.splitlines()[:3]
    ['---', 'library_name: calgp', 'pipeline_tag: image-classification']
    """
    card = folder.card()
    return render_page(
        "model_card.jinja", name=repo.partition("/")[2], repo=repo, card=card, version=__version__, markdown=escaped,
        facts=[pair for pair in facts(folder, card) if pair[0] != "folder"] + calibration_facts(folder.calibration()),
        evaluations=sorted(folder.evaluations(), key=lambda each: (each.outside, each.source, each.calibrator or "")),
    )  # fmt: skip


def escaped(text: str) -> str:
    r"""Text of a run in one line of Markdown, in which it means nothing but itself.

    >>> escaped("a|b\n<c>")
    'a\\|b \\<c\\>'
    """
    return MARKS.sub(r"\\\1", printable(" ".join(text.split())))
