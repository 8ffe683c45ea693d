"""From the bytes of a request to images: the only code that reads what a request brings, in a process of its own.

`decoders` starts this file as a program, where a hostile image costs neither the server's time nor its memory. What is
imported here needs no torch, so that it starts in a fraction of a second and takes 40 MB.
"""

import binascii
import json
import signal
import struct
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from calgp.data.decode import Colour, Size, image_array, open_image
from calgp.errors import CalgpError
from calgp.serve.limits import Limits
from calgp.serve.problems import HTTPProblem
from calgp.serve.schemas import Encoded, Grey, ImagesRequest, Rgb, validation_sentence

FORMATS = ("PNG", "JPEG", "WEBP")  # the only decoders that see what a request brings
RAW = {"image/png", "image/jpeg", "image/webp", "application/octet-stream"}
PIXEL_BYTES = 24  # that decoding takes at most, a pixel: a transparent WebP
LARGE = 4_000_000  # pixels of an image that is decoded while no other large one is
SPARE = 128 * 2**20  # bytes for all else

REQUEST = struct.Struct(">LL")  # bytes of the content type, and of the body
ANSWER = struct.Struct(">HL")  # status, and bytes of the pixels or of the sentence

RawImage = bytes | Grey | Rgb  # a file, or lists of pixels


def main() -> None:
    """Answer requests from stdin on stdout, until there are no more.

    The first argument is JSON: size, colour and limits. A request is two lengths, the content type and the body; an
    answer is a status, a length and the pixels, or a sentence if the status is not 200. The first answer, to no
    request, is empty: the process is ready.
    """
    given = json.loads(sys.argv[1])
    size, colour, limits = tuple(given["size"]), given["colour"], Limits(**given["limits"])
    prepare_process(limits)
    _answer(200, b"")
    while head := sys.stdin.buffer.read(REQUEST.size):
        kind, body = (sys.stdin.buffer.read(length) for length in REQUEST.unpack(head))
        try:
            status, content = 200, read_images(body, kind.decode("latin-1"), size, colour, limits).tobytes()
        except HTTPProblem as problem:
            status, content = problem.status, problem.detail.encode()
        _answer(status, content)


def _answer(status: int, content: bytes) -> None:
    sys.stdout.buffer.write(ANSWER.pack(status, len(content)) + content)
    sys.stdout.buffer.flush()


def prepare_process(limits: Limits) -> None:
    """Bound its memory; leave Ctrl-C to the server, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + limits.pixels * PIXEL_BYTES + SPARE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read_images(body: bytes, content_type: str, size: Size, colour: Colour, limits: Limits) -> np.ndarray:
    """Images as uint8 [N, C, H, W]: upright, on white where transparent, stretched, as `calgp predict` has them.

    Raises:
        HTTPProblem: what is wrong with them, without what was sent.
    """
    try:
        return _decode(_raw_images(body, content_type, limits), size, colour, limits)
    except MemoryError:
        raise HTTPProblem(413, "Decoding these images takes more memory than a request may have.") from None


def _raw_images(body: bytes, content_type: str, limits: Limits) -> list[RawImage]:
    """The images in a body, whatever its form, not decoded yet."""
    kind = content_type.split(";")[0].strip().lower()
    if kind in RAW:
        return [body]
    if kind == "application/json":
        return _from_json(body, limits.images)
    if kind == "multipart/form-data":
        return [*_from_form(body, content_type, limits.images)]
    raise HTTPProblem(415, "Send images as multipart/form-data, application/json, image/png, image/jpeg or image/webp.")


def _from_json(body: bytes, most: int) -> list[RawImage]:
    if body.count(b"{") > most + 1:  # before anything is made of them
        raise HTTPProblem(413, f"A request may have {most} images; this one has more.")
    try:
        images = ImagesRequest.model_validate_json(body).images
    except ValidationError as error:
        raise HTTPProblem(422, validation_sentence(error.errors(include_url=False, include_input=False))) from None
    return [_file(each, place) if isinstance(each, Encoded) else each for place, each in enumerate(images)]


def _file(image: Encoded, place: int) -> bytes:
    try:
        return b64decode(image.base64, validate=True)
    except (binascii.Error, ValueError):
        raise HTTPProblem(422, f"Image {place} is not base64.") from None


def _from_form(body: bytes, content_type: str, most: int) -> list[bytes]:
    """The parts of a form in their order, each an image, whatever its name.

    By hand on python-multipart, which Starlette's `request.form` uses too: that one writes parts above 1 MB to the
    disk, takes parts without a file name for text, and runs in the event loop.
    """
    parts: list[bytearray] = []
    ended = False

    def begin() -> None:
        if len(parts) == most:
            raise HTTPProblem(413, f"A request may have {most} images; this form has more.")
        parts.append(bytearray())

    def add(data: bytes, start: int, end: int) -> None:
        parts[-1] += data[start:end]

    def finish() -> None:
        nonlocal ended
        ended = True

    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    try:
        callbacks = {"on_part_begin": begin, "on_part_data": add, "on_end": finish}
        MultipartParser(boundary, callbacks).write(body)  # type: ignore[arg-type]
    except FormParserError:
        ended = False
    if not ended or not parts or not boundary:
        raise HTTPProblem(422, "The form cannot be read; send images as curl does with -F images=@photo.png.")
    return [bytes(part) for part in parts]


def _decode(raw: list[RawImage], size: Size, colour: Colour, limits: Limits) -> np.ndarray:
    left = limits.pixels
    arrays = []
    for place, each in enumerate(raw):
        try:
            if isinstance(each, bytes):
                opened = open_image(BytesIO(each), FORMATS, limits.pixels)
            else:
                opened = Image.fromarray(np.array(each.grey if isinstance(each, Grey) else each.rgb, np.uint8))
            with opened as image:
                width, height = image.size
                left -= width * height
                if max(width, height) > limits.side or left < 0:
                    most = f"a side may have {limits.side:,} and a request {limits.pixels:,} pixels in all"
                    raise HTTPProblem(413, f"Image {place} has {width} × {height} pixels; {most}.")
                with _turn(width * height):
                    ImageOps.exif_transpose(image, in_place=True)
                    arrays.append(image_array(image, size=size, colour=colour))
        except (HTTPProblem, MemoryError):
            raise
        except CalgpError as error:
            raise HTTPProblem(413, f"Image {place} is refused: {error}.") from None
        except Exception:  # Pillow's decoders raise nearly everything on damaged files
            known = "PNG, JPEG, WebP or lists of pixels of one length"
            raise HTTPProblem(422, f"Image {place} cannot be decoded; send {known}.") from None
    return np.stack(arrays)


@contextmanager
def _turn(pixels: int) -> Iterator[None]:
    """Large images are decoded by one worker after the other, so that their memory does not add up."""
    if pixels < LARGE or sys.platform == "win32":
        yield
        return
    import fcntl

    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
