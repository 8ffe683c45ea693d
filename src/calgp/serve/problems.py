"""A request that cannot be answered, as an exception."""

import math


class HTTPProblem(Exception):
    """The status and one sentence for the client; `middleware.problem_response` makes it a response (RFC 9457)."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, detail, headers)  # all of them, so that it can be sent from one process to another
        self.status, self.detail, self.headers = status, detail, headers

    @staticmethod
    def busy(detail: str, retry: float) -> "HTTPProblem":
        """503 with the seconds after which to try again."""
        return HTTPProblem(503, f"{detail} Try again later.", {"Retry-After": str(min(max(math.ceil(retry), 1), 60))})

    @staticmethod
    def closing(status: int, detail: str) -> "HTTPProblem":
        """A refusal after which the connection is closed: what is still to come of the request is not read."""
        return HTTPProblem(status, detail, {"Connection": "close"})
