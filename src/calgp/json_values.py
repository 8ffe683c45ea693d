"""The type of what JSON holds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # TOML holds the same; a tuple is a list there
    Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
else:
    Json = Any  # pydantic leaves such a field as it is: who takes the value checks it
