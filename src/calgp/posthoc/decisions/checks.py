"""What the options of a decision must be."""

from collections.abc import Mapping

from calgp.errors import CalgpError, short_repr

STRICT = {"extra": "forbid"}  # a file that says more than this version knows describes another decision


def check_share(name: str, value: float) -> float:
    if not 0 < value < 1:  # also when it is NaN
        raise CalgpError(f"{name}={value:g} cannot be; it is a share between 0 and 1, such as 0.95 or 0.01.")
    return value


def check_choice(name: str, value: str, choices: Mapping[str, object]) -> str:
    if value not in choices:
        raise CalgpError(f"There is no {name} {short_repr(value)}; there are {', '.join(choices)}.")
    return value
