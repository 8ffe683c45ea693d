"""What goes wrong, as RFC 9457 tells it: JSON, one sentence, no traceback."""

import math
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from calgp.serve.schemas import Problem

MEDIA = "application/problem+json"


class Trouble(Exception):
    """A request cannot be answered: the status and a sentence for whoever sent it."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers

    @staticmethod
    def busy(detail: str, retry: float) -> "Trouble":
        """503 with the time after which to try again."""
        return Trouble(503, f"{detail} Try again later.", {"Retry-After": str(min(max(math.ceil(retry), 1), 60))})


def problem(status: int, detail: str, headers: Any = None) -> Response:
    told = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(told.model_dump_json(), status, headers, MEDIA)
