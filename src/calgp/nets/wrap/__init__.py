"""Anybody's network as a backbone: hooks in front of its layers mask their inputs, and its weights are kept.

What cannot be masked is refused by name, with the option that leaves it out; nothing here imports a network by itself.
"""

from calgp.nets.wrap.backbone import NETWORKS, Wrapped, wrap
from calgp.nets.wrap.features import WrappedFeatures

__all__ = ["NETWORKS", "Wrapped", "WrappedFeatures", "wrap"]
