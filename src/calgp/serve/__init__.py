"""Serving: a run over HTTP, with its doubts. Needs the extra `serve`: pip install "calgp[serve]"."""

from calgp.serve.app import create_app
from calgp.serve.limits import Limits
from calgp.serve.running import read_token, serve

__all__ = ["Limits", "create_app", "read_token", "serve"]
