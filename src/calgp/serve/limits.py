"""What a server accepts at most: every limit with its default."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from calgp.errors import CalgpError


@dataclass(frozen=True)
class Limits:
    """A request beyond any of these is refused with a sentence that names the limit."""

    head: int = 16 * 2**10  # bytes of a request's first line and headers
    body: int = 4 * 2**20  # bytes of a request's body
    json_body: int = 2**20  # bytes of a body of JSON, which takes longer to parse than a file to decode
    bodies: int = 64 * 2**20  # bytes of all bodies that are being received or decoded
    side: int = 8192  # pixels of the longer side of an image
    pixels: int = 16_000_000  # of all images of a request together
    images: int = 32  # of a request
    samples: int = 1000  # of an image
    draws: int = 50_000  # numbers (images × samples × classes) of a stream with draws=true
    queue: int = 256  # images accepted and not yet answered
    requests: int = 128  # received, waiting or computed at a time
    connections: int = 512  # open at a time; one more closes the one that has been idle for longest
    decoders: int = 2  # processes that decode images, each one request at a time
    seconds: float = 30.0  # from the head of a request to its answer
    client: float = 10.0  # seconds that a client may take to send a head, to send a body, to take a part of an answer
    decode: float = 5.0  # seconds of decoding the images of a request
    wait: float = 0.002  # seconds that an idle server waits for more images, to compute several at once
    batch: int = 64  # images computed at once; fewer where their samples would not fit into the caches

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @staticmethod
    def parse(settings: Iterable[str]) -> "Limits":
        """The defaults, but for settings like samples=200.

        >>> Limits.parse(["samples=200", "seconds=2.5"]).seconds
        2.5
        """
        kinds = {field.name: type(field.default) for field in fields(Limits)}
        given = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in kinds:
                raise CalgpError(f"Invalid limit {name!r}: must be one of {', '.join(kinds)}.")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                raise CalgpError(f"Invalid limit {setting!r}: must be NAME=NUMBER, such as samples=200.") from None
        return Limits(**given)

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.type is float else 1
            if not least <= value < float("inf"):
                raise CalgpError(
                    f"Invalid limit {field.name}={value}: must be at least {least}, such as {field.default}."
                )
