"""Images in: published sets, folders and tar shards of one's own, and the small sets that come with calgp.

This room reads files that anybody may have made, so it trusts none of them. It knows nothing of models. Names are
imported when first used: the server's image workers need `decode` alone, and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corruptions import CORRUPTIONS, SEVERITIES, Corruption, corrupted
    from .datasets import from_dataset
    from .downloads import download
    from .folder import Folder
    from .images import Images
    from .shards import Shards, write_shards
    from .source import data_directory
    from .sources import SOURCES, load, open_source

_FILES = {
    "corruptions": ("CORRUPTIONS", "SEVERITIES", "Corruption", "corrupted"),
    "datasets": ("from_dataset",),
    "downloads": ("download",),
    "folder": ("Folder",),
    "images": ("Images",),
    "shards": ("Shards", "write_shards"),
    "source": ("data_directory",),
    "sources": ("SOURCES", "load", "open_source"),
}

__all__ = [
    "CORRUPTIONS", "SEVERITIES", "SOURCES", "Corruption", "Folder", "Images", "Shards", "corrupted", "data_directory",
    "download", "from_dataset", "load", "open_source", "write_shards",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f".{file}", __name__), name)
    raise AttributeError(f"module 'calgp.data' has no attribute {name!r}")
