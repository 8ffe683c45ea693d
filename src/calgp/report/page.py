"""HTML from a template: the one place that knows the template engine."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from .svg import PALETTE


def render_page(template: str, **shown: object) -> str:
    """The page of a template in report/templates, with what it shows; text is escaped."""
    environment = Environment(
        loader=PackageLoader("calgp.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["themed"] = themed
    return environment.get_template(template).render(shown)


def themed(svg: str) -> str:
    """A figure in the page, where the style sheet may choose lighter colours for a dark screen."""
    for place, colour in enumerate(PALETTE):
        svg = svg.replace(colour, f"var(--c{place}, {colour})")
    return svg
