"""What a server takes on at most: every limit with its default."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from calgp.errors import CalgpError


@dataclass(frozen=True)
class Limits:
    """Beyond any of these a request is refused with a sentence that names the limit."""

    body: int = 4 * 2**20  # bytes of a request
    side: int = 8192  # pixels, of a picture
    pixels: int = 25_000_000  # of all pictures of a request together
    images: int = 32  # of a request
    samples: int = 1000  # of an image
    queue: int = 256  # images accepted and not yet answered
    requests: int = 128  # read, waiting or computed at a time: with `body` it bounds memory
    seconds: float = 30.0  # from the first byte of a request to its answer
    connections: int = 512  # open at a time, idle ones with them
    wait: float = 0.002  # seconds that an idle server waits for company, to compute several images at once
    batch: int = 64  # images computed at once; fewer where their samples would not fit into the caches

    @staticmethod
    def parse(settings: Iterable[str]) -> "Limits":
        """The defaults but for settings like samples=200.

        >>> Limits.parse(["samples=200", "seconds=2.5"]).seconds
        2.5
        """
        kinds = {field.name: type(field.default) for field in fields(Limits)}
        given = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in kinds:
                raise CalgpError(f"There is no limit {name!r}; there are {', '.join(kinds)}.")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                raise CalgpError(f"The limit {setting!r} is not NAME=NUMBER, such as samples=200.") from None
        return Limits(**given)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.type is float or field.type == "float" else 1
            if not least <= value < float("inf"):
                raise CalgpError(f"The limit {field.name}={value} cannot be; it must be at least {least}.")
