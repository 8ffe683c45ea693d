"""From a matplotlib figure to an SVG that can stand in a page: same input, same bytes; light and dark; read aloud.

Text stays text, in the page's own font. The ink takes the colour of the text around it (`currentColor`).
"""

import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from xml.etree import ElementTree as ET

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#010203"  # stands for currentColor until the figure is an SVG
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito (2008): colour-blind safe
WIDTH = 430  # the unit is a pixel of a phone; a page may show it larger
SMALL = 250

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "calgp",
    "text.parse_math": False,  # a $ in somebody's folder name is a $
    "axes.unicode_minus": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, and is wider than the fonts that will be shown
    "font.size": 12.5,
    "axes.labelsize": 12.5,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "legend.fontsize": 11.5,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "hatch.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.8,
    "axes.linewidth": 0.8,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}  # fmt: skip
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of that many pixels, and its style: the caller's own settings neither matter nor change."""
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # the page has other fonts
        yield Figure(figsize=(width / 72, height / 72), layout="constrained")


def set_css_class(artist: Artist, name: str) -> None:
    """Give what is drawn a class in the SVG, for style sheets and tests."""
    artist.set_gid(f"class-{name}")


def plain(text: str, longest: int = 60) -> str:
    """Somebody's text as one printable line, of bounded length."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def hide_axis(axes: Axes, axis: str) -> None:
    """Leave out the ticks and the spine of an axis that says nothing by itself."""
    axes.spines["bottom" if axis == "x" else "left"].set_visible(False)
    axes.tick_params(axis=axis, length=0)  # pyright: ignore[reportArgumentType]


def rendered(figure: Figure, title: str) -> str:
    """The figure as an <svg> element, with a title for those who cannot see it."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ET.fromstring(file.getvalue())  # noqa: S314 (our own SVG)
    width, height = (float(root.attrib.pop(side).removesuffix("pt")) for side in ("width", "height"))
    for parent in list(root.iter()):
        for useless in ("metadata", "style"):  # a style sheet would hold for the whole page
            for element in parent.findall(f"{{{_SVG}}}{useless}"):
                parent.remove(element)
    root.attrib.update({"stroke-linejoin": "round", "role": "img", "style": f"max-width: {width * 1.3:g}px"})
    root.attrib["viewBox"] = f"0 0 {width:g} {height:g}"
    name = ET.Element(f"{{{_SVG}}}title", {"id": "title"})
    name.text = plain(title, 400)
    root.insert(0, name)
    _rename(root, hashlib.sha256(file.getvalue().encode() + title.encode()).hexdigest()[:8])
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    text = ET.tostring(root, encoding="unicode").replace(INK, "currentColor")
    return re.sub(r"'DejaVu Sans'(, sans-serif)?", _FONT, re.sub(r"\n\s*", "\n", text))


def _rename(root: ET.Element, key: str) -> None:
    """Ids that are this figure's own, since a page has many figures; those that nothing refers to are left out."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    used = {"title"} | {name for value in values for name in re.findall(r"#([\w-]+)", value)}
    for element in root.iter():
        name = element.attrib.pop("id", "")
        for attribute, value in element.attrib.items():
            reference = attribute.endswith("href") or "url(#" in value
            element.attrib[attribute] = re.sub(r"#([\w-]+)", rf"#\1-{key}", value) if reference else value
        if name in used:
            element.attrib["id"] = f"{name}-{key}"
        elif name.startswith("class-"):
            element.attrib["class"] = name.removeprefix("class-")
    root.attrib["aria-labelledby"] = f"title-{key}"
