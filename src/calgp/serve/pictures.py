"""From the bytes of a request to pictures as the model takes them: the only place where a request's bytes are read."""

import binascii
from base64 import b64decode
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from torch import Tensor

from calgp.data.decode import Size, picture_array
from calgp.data.images import Colour
from calgp.serve.limits import Limits
from calgp.serve.problems import Trouble
from calgp.serve.schemas import Encoded, Grey, Pictures, Rgb

FORMATS = ("PNG", "JPEG", "WEBP")  # the only decoders that see what a request brings
RAW = {"image/png", "image/jpeg", "image/webp", "application/octet-stream"}


def read_pictures(body: bytes, content_type: str, *, size: Size, colour: Colour, limits: Limits) -> Tensor:
    """Pictures as uint8 [N, C, H, W]: upright, on white where transparent, stretched, as `calgp predict` has them."""
    return _decode(_raw(body, content_type, limits), size=size, colour=colour, limits=limits)


def _raw(body: bytes, content_type: str, limits: Limits) -> list[bytes | Grey | Rgb]:
    """The pictures in a body, whatever its form, not decoded yet."""
    kind = content_type.split(";")[0].strip().lower()
    if kind in RAW:
        found: list[bytes | Grey | Rgb] = [body]
    elif kind == "application/json":
        found = _from_json(body)
    elif kind == "multipart/form-data":
        found = [*_from_form(body, content_type, limits.images)]
    else:
        raise Trouble(
            415, "Send pictures as multipart/form-data, application/json, image/png, image/jpeg or image/webp."
        )
    if len(found) > limits.images:
        raise Trouble(413, f"A request may have {limits.images} images; this one has {len(found)}.")
    return found


def _from_json(body: bytes) -> list[bytes | Grey | Rgb]:
    try:
        pictures = Pictures.model_validate_json(body)
    except ValidationError as error:
        raise Trouble(422, validation_sentence(error.errors(include_url=False, include_input=False))) from None
    return [
        _decoded64(each, place) if isinstance(each, Encoded) else each for place, each in enumerate(pictures.images)
    ]


def _decoded64(picture: Encoded, place: int) -> bytes:
    try:
        return b64decode(picture.base64, validate=True)
    except (binascii.Error, ValueError):
        raise Trouble(422, f"Image {place} is not base64.") from None


def _from_form(body: bytes, kind: str, most: int) -> list[bytes]:
    """The parts of a form in their order, each a picture, whatever its name; they never touch the disk."""
    parts: list[bytearray] = []
    ended = False

    def begin() -> None:
        if len(parts) == most:
            raise Trouble(413, f"A request may have {most} images; this form has more.")
        parts.append(bytearray())

    def add(data: bytes, start: int, end: int) -> None:
        parts[-1] += data[start:end]

    def finish() -> None:
        nonlocal ended
        ended = True

    boundary = parse_options_header(kind)[1].get(b"boundary", b"")
    try:
        callbacks = {"on_part_begin": begin, "on_part_data": add, "on_end": finish}
        MultipartParser(boundary, callbacks).write(body)  # type: ignore[arg-type]
    except FormParserError:
        ended = False
    if not ended or not parts or not boundary:
        raise Trouble(422, "The form cannot be read; send pictures as curl does with -F images=@photo.png.")
    return [bytes(part) for part in parts]


def _decode(raw: list[bytes | Grey | Rgb], *, size: Size, colour: Colour, limits: Limits) -> Tensor:
    left = limits.pixels
    arrays = []
    for place, each in enumerate(raw):
        try:
            with _opened(each) as picture:
                width, height = picture.size
                left -= width * height
                if max(width, height) > limits.side or left < 0:
                    raise Trouble(
                        413,
                        f"Image {place} has {width} × {height} pixels; a side may have {limits.side:,} and a request "
                        f"{limits.pixels:,} pixels in all.",
                    )
                arrays.append(picture_array(ImageOps.exif_transpose(picture), size=size, colour=colour))
        except Trouble:
            raise
        except Exception:  # Pillow's decoders raise nearly everything on damaged files
            raise Trouble(
                422, f"Image {place} is not a readable picture; PNG, JPEG, WebP and even lists of pixels are."
            ) from None
    return torch.from_numpy(np.stack(arrays))


def _opened(raw: bytes | Grey | Rgb) -> Image.Image:
    if isinstance(raw, bytes):
        return Image.open(BytesIO(raw), formats=FORMATS)
    lines = raw.grey if isinstance(raw, Grey) else raw.rgb
    return Image.fromarray(np.array(lines, np.uint8))


def validation_sentence(errors: Any) -> str:
    """What pydantic found, without what was sent."""
    found = [f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}" for error in errors[:3]]
    return "; ".join(found)[:500]
