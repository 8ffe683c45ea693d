"""Requests that nobody would think of: as the OpenAPI document allows and forbids them, and bodies broken at random."""

import base64
import io

import hypothesis
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from calgp.serve import Limits, create_app

from .conftest import RAW, png, sampled

SECONDS = 10.0  # no answer may take longer; the server itself gives up before
QUICK = {"deadline": None, "derandomize": True, "database": None}
APP = create_app(sampled(), hosts=None, limits=Limits(samples=3, images=4, seconds=SECONDS / 2))
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


OPERATIONS = {operation.label: operation for operation in (each.ok() for each in schema.get_all_operations())}
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_as_the_document_says(label):
    """To good requests and, where there can be any, to bad ones: both were among them."""
    seen: set[int] = set()

    @given(OPERATIONS[label].as_strategy())
    @settings(max_examples=12, suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate], **QUICK)
    def ask(case):
        response = case.call()
        assert response.elapsed < SECONDS
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    assert {200, 422} <= seen if "predict" in label else seen == {200}


def image(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(144, dtype=np.uint8).reshape(12, 12)).save(file, kind)
    return file.getvalue()


IMAGES = [image(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF")]
BOUNDARY = b"frontier"
FORM = b'--frontier\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n%s\r\n--frontier--\r\n'
BODIES = [
    *((content, "image/png") for content in IMAGES),
    *((FORM % content, "multipart/form-data; boundary=frontier") for content in IMAGES[:3]),
    *((b'{"images":[{"base64":"%s"}]}' % base64.b64encode(each), "application/json") for each in IMAGES[:3]),
    (b'{"images":[{"grey":[[1,2],[3,4]]},{"rgb":[[[1,2,3]]]}]}', "application/json"),
]


@st.composite
def broken(draw) -> tuple[bytes, str]:
    """A good body with some bytes changed, cut out, doubled or put in."""
    content, kind = draw(st.sampled_from(BODIES))
    found = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(found)))
        length = draw(st.integers(0, 12))
        part = draw(st.one_of(st.binary(max_size=12), st.just(bytes(found[place : place + length]) * 2), st.just(b"")))
        found[place : place + length] = part
    return bytes(found), draw(
        st.sampled_from([kind, kind, kind, "application/json", "image/png", "multipart/form-data"])
    )


@pytest.mark.slow
@given(broken(), st.sampled_from(["", "/stream"]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], **QUICK)
def test_broken_bodies_are_answered_in_time_and_never_break_the_server(client, body, path):
    content, kind = body
    response = client.post(f"/v1/predict{path}?samples=1", content=content, headers={"content-type": kind})
    assert response.status_code in (200, 413, 415, 422), response.text
    assert response.elapsed.total_seconds() < SECONDS


def test_the_server_lives_on(client, digits):
    response = client.post("/v1/predict?samples=1", content=png(digits[0]), headers=RAW)
    assert response.status_code == 200
