"""Print the lower bounds of pyproject.toml as constraints, for `make oldest`: name==version, a line each."""

import re
from pathlib import Path

import tomllib

PACKAGES = ("svdkl", "serve")  # extras that the quick tests need


def lower_bounds(project: dict) -> dict[str, str]:
    """The oldest version of each package that calgp says it works with; of two bounds, the higher."""
    optional = project["optional-dependencies"]
    found: dict[str, str] = {}
    for text in [*project["dependencies"], *(each for name in PACKAGES for each in optional[name])]:
        name, version = re.match(r"([A-Za-z0-9._-]+).*?>=([0-9.]+)", text).groups()  # type: ignore[union-attr]
        found[name] = max(found.get(name, "0"), version, key=lambda v: [int(part) for part in v.split(".")])
    return found


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for name, version in lower_bounds(project).items():
        print(f"{name}=={version}")
