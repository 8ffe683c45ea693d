"""Pictures: published image sets, folders of one's own, and the small sets that come with calgp."""

from .corruptions import CORRUPTIONS, SEVERITIES, Corruption, corrupted
from .datasets import from_dataset
from .fetch import download
from .folder import Folder
from .images import Images
from .shards import Shards, write_shards
from .source import data_directory
from .sources import SOURCES, load, open_source

__all__ = [
    "CORRUPTIONS", "SEVERITIES", "SOURCES", "Corruption", "Folder", "Images", "Shards", "corrupted", "data_directory",
    "download", "from_dataset", "load", "open_source", "write_shards",
]  # fmt: skip
