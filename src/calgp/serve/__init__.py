"""Serving: a run over HTTP, with its uncertainty. Needs the extra `serve`: pip install "calgp[serve]".

Names are fetched when first used: the processes that decode images import `image_worker` alone, and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calgp.serve.app import create_app
    from calgp.serve.limits import Limits
    from calgp.serve.server import read_token, serve

__all__ = ["Limits", "create_app", "read_token", "serve"]
_FILES = {"Limits": "limits", "create_app": "app", "read_token": "server", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'calgp.serve' has no attribute {name!r}")
    return getattr(import_module(f"calgp.serve.{_FILES[name]}"), name)
