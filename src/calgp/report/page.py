"""Pages from a template, and the tables that several templates show; nothing else knows the template engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined

from . import metric_names, words
from .svg import PALETTE


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first columns name a row, the others are numbers with what stands below them."""

    caption: str
    names: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Sequence[tuple[str, str]]]]


def render_page(template: str, **shown: object) -> str:
    """The page of a template in report/templates, with what it shows; in HTML, text is escaped.

    Templates write numbers by `words` and call things by `names`.
    """
    environment = Environment(
        loader=PackageLoader("calgp.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"themed": themed, "figure": partial(_figure, set())}
    environment.globals |= {"words": words, "names": metric_names}
    return environment.get_template(template).render(shown)


def _figure(shown: set[str], svg: str) -> str:
    """A figure in the page; one that is shown twice gets other ids, since those of a page are unique."""
    key = svg.rpartition('aria-labelledby="title-')[2].partition('"')[0]
    while key in shown:
        svg, key = svg.replace(f"-{key}", f"-{key}x"), f"{key}x"
    shown.add(key)
    return themed(svg)


def themed(svg: str) -> str:
    """Colours that the style sheet may replace by lighter ones for a dark screen."""
    for place, colour in enumerate(PALETTE):
        svg = svg.replace(colour, f"var(--c{place}, {colour})")
    return svg
