"""The page and what it needs: the files of `static`, read once at the start, so that no request names a file."""

import mimetypes
from pathlib import Path

STATIC = Path(__file__).parent / "static"


def static_files() -> dict[str, tuple[bytes, str]]:
    """Address → (content, media type): index.html is `/`, the others are /static/NAME."""
    files = sorted(file for file in STATIC.iterdir() if file.is_file() and not file.name.startswith("."))
    return {_address(file): (file.read_bytes(), _media(file)) for file in files}


def _address(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/static/{file.name}"


def _media(file: Path) -> str:
    known = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    return known.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
