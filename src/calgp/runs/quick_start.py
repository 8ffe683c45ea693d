"""Imports lightning-fabric without torchmetrics, which it would import, where it is installed, to look at its version.

That takes longer than all of calgp: two seconds of every start, for a package that nothing here uses. A module that has
nothing but the version stands in for it meanwhile.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

NAME = "torchmetrics"

if NAME not in sys.modules:
    try:
        stand_in = ModuleType(NAME)
        stand_in.__version__ = version(NAME)  # type: ignore[attr-defined]
        sys.modules[NAME] = stand_in
        import lightning_fabric  # noqa: F401
    except PackageNotFoundError:
        pass  # nor will lightning-fabric find it
    finally:
        sys.modules.pop(NAME, None)
