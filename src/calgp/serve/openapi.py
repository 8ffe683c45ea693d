"""The parts of the OpenAPI document that FastAPI cannot find itself: bodies of several kinds, problems, the token."""

from typing import Any

from fastapi import FastAPI

from calgp.json_values import Json
from calgp.serve.limits import Limits
from calgp.serve.middleware import PROBLEM_MEDIA
from calgp.serve.schemas import PIXEL, ImagesRequest, Problem, StreamLine

REFERENCE = "#/components/schemas/{model}"
MEANING = {
    400: "Not valid HTTP, or a header that cannot be read",
    401: "The token is missing or wrong",
    403: "A page of another origin asked",
    405: "Another method is needed",
    408: "The body was not sent in time",
    413: "Too many bytes, pixels or images",
    415: "Bodies of this kind are not taken",
    421: "The server does not answer to this Host",
    422: "Something in the request is not as described",
    503: "Overloaded, too late, starting or shutting down: Retry-After says when to try again",
}
_PROBLEM = {PROBLEM_MEDIA: {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "content": _PROBLEM} for status, meaning in MEANING.items()
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines of JSON, each a StreamLine; if something fails on the way the last is a Problem",
        "content": {"application/x-ndjson": {"schema": {"type": "string", "description": "Lines of StreamLine"}}},
    }
}
BINARY = {"type": "string", "format": "binary"}
_IMAGES = {"images": {"type": "array", "items": BINARY, "minItems": 1}}
FILES = {"type": "object", "properties": _IMAGES, "required": ["images"]}
TAKES: dict[str, Json] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": REFERENCE.format(model="ImagesRequest")},
                "examples": {
                    "a file": {"value": {"images": [{"base64": PIXEL}]}},
                    "pixels": {"value": {"images": [{"grey": [[0, 128], [255, 0]]}]}},
                },
            },
            "multipart/form-data": {"schema": FILES},
            **{f"image/{kind}": {"schema": BINARY} for kind in ("png", "jpeg", "webp")},
        },
    }
}


def complete(app: FastAPI, limits: Limits) -> None:
    """Let the application's document have the schemas that only bodies and problems use, and the limits."""
    whole = app.openapi()
    schemas = whole["components"]["schemas"]
    for model in (ImagesRequest, Problem, StreamLine):
        found = model.model_json_schema(ref_template=REFERENCE)
        schemas |= found.pop("$defs", {})
        schemas[model.__name__] = found
    schemas["ImagesRequest"]["properties"]["images"]["maxItems"] = limits.images
    for operation in (whole["paths"][path]["post"] for path in ("/v1/predict", "/v1/predict/stream")):
        asked = next(parameter for parameter in operation["parameters"] if parameter["name"] == "samples")
        asked["schema"]["maximum"] = limits.samples
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
