"""Clients on a socket: heads that never end, clients that say nothing, that never read, that leave."""

import threading
import time
from contextlib import suppress
from dataclasses import replace

import h11
import httpx2 as httpx
import pytest

from calgp.serve import Limits
from calgp.serve.protocol import HEAD_LINES, PIECES, BoundedConnection

from .conftest import NEVER, RAW, Connection, metric, png, sampled, serving, until

CLIENT = 1.0  # seconds that the server waits for a client
LIMITS = Limits(client=CLIENT, seconds=1000, samples=10**7, connections=30, requests=8)  # what ends, ends by CLIENT


@pytest.fixture(scope="module")
def address():
    with serving(sampled(), LIMITS) as address:
        yield address


@pytest.fixture(scope="module")
def patient():
    """A server that waits for its clients, for tests in which none is too slow."""
    with serving(sampled(), replace(LIMITS, client=NEVER)) as address:
        yield address


HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"X-Long: "] + [b"a" * 4096] * 2000,
        [HEAD + b"X: y\r\n" * 100_000],
        [HEAD] + [b"X: y\r\n"] * (HEAD_LINES + 1),
        [b"GET /" + b"a" * 100_000],
        [HEAD + b"X: " + b"a" * LIMITS.head + b"\r\n\r\n"],
    ],
    ids=["a long header", "many headers at once", "many headers one by one", "a long path", "a whole head"],
)
def test_a_head_has_an_end(address, parts):
    """Without one, a client that sent headers for ever made the server grow by a gigabyte."""
    with Connection(address) as client:
        with suppress(ConnectionError, TimeoutError):  # it is closed on the way
            for part in parts:
                client.send(part)
        found = client.rest()
    assert found.startswith(b"HTTP/1.1 431 ") or found == b""  # a reset can overtake the answer
    assert found == b"" or b"content-security-policy: default-src 'none'" in found.lower()


def test_the_bounds_of_a_connection():
    """Exactly: a head of as many bytes and lines is taken, and one more is not; so are pieces of a body."""

    def events(data: bytes, head: int) -> list:
        connection = BoundedConnection(head)
        connection.receive_data(data)
        found = []
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            found.append(type(event))
        return found

    whole = HEAD + b"\r\n"
    assert events(whole, len(whole)) == [h11.Request, h11.EndOfMessage]
    for data, most in ((whole, len(whole) - 3), (b"G" * 101, 100)):
        with pytest.raises(h11.RemoteProtocolError, match="head is too large") as caught:
            events(data, most)
        assert caught.value.error_status_hint == 431
    lines = HEAD + b"X: y\r\n" * (HEAD_LINES - 2)
    assert events(lines + b"\r\n", 10_000)[0] is h11.Request
    with pytest.raises(h11.RemoteProtocolError, match="head is too large"):
        events(lines + b"X: y\r\n" * 2 + b"\r\n", 10_000)
    body = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * PIECES
    assert events(body, 1000).count(h11.Data) == PIECES
    with pytest.raises(h11.RemoteProtocolError, match="pieces"):
        events(body + b"1\r\nx\r\n", 1000)


def test_what_is_no_http_gets_a_problem_with_all_headers(address):
    with Connection(address) as client:
        client.send(b"\x16\x03\x01 hello\r\n\r\n")
        found = client.rest().lower()
    assert found.startswith(b"http/1.1 400 bad request")
    for header in (b"content-security-policy", b"x-content-type-options", b"application/problem+json", b"no-store"):
        assert header in found


def test_a_client_that_says_nothing_or_little_is_cut(address):
    start = time.monotonic()
    with Connection(address) as silent, Connection(address) as slow:
        slow.send(b"GET /healthz HTTP/1.1\r\nHo")
        assert silent.rest() == slow.rest() == b""
    assert time.monotonic() - start > CLIENT * 0.9
    with Connection(address) as idle:  # after an answer, too
        idle.send(HEAD + b"\r\n")
        assert idle.rest().startswith(b"HTTP/1.1 200")


def test_silent_clients_do_not_keep_others_out(address):
    crowd = [Connection(address) for _ in range(3 * LIMITS.connections)]
    assert httpx.get(f"{address}/healthz", timeout=NEVER).status_code == 200
    for client in crowd:
        client.close()


def test_a_slow_body_is_refused_in_time(address):
    with Connection(address) as client:
        client.post("/v1/predict", b"\x89PNG", length=1000)
        assert client.rest().startswith(b"HTTP/1.1 408 ")
    until(lambda: metric(address, "calgp_open_requests") == 0)


@pytest.mark.slow
def test_a_client_that_never_reads_its_stream_holds_nothing(address, digits):
    """More than sockets hold, to clients that take nothing: their places are free once the time for sending is over."""
    body = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n%s\r\n' % png(digits[row % 24])
        for row in range(32)
    )
    clients = [Connection(address, receive_buffer=4096) for _ in range(2)]
    for client in clients:
        client.post(
            "/v1/predict/stream?samples=10000000&every=1", body + b"--x--\r\n", kind="multipart/form-data; boundary=x"
        )
    until(lambda: ended_streams(address) == 2)
    until(lambda: metric(address, "calgp_open_requests") == 0)
    assert metric(address, "calgp_queue_images") == 0
    response = httpx.post(f"{address}/v1/predict?samples=2", content=png(digits[0]), headers=RAW, timeout=NEVER)
    assert response.status_code == 200
    for client in clients:
        client.close()


def ended_streams(address: str) -> float:
    lines = httpx.get(f"{address}/metrics", timeout=NEVER).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(STREAMS))


STREAMS = 'calgp_requests_total{path="/v1/predict/stream"'


@pytest.mark.parametrize("path", ["/v1/predict", "/v1/predict/stream"])
def test_a_client_that_leaves_frees_its_place_at_once(patient, digits, path):
    """Long before its samples are drawn."""
    client = Connection(patient)
    client.post(f"{path}?samples=10000000", png(digits[0]))
    until(lambda: metric(patient, "calgp_queue_images") == 1)
    client.close()
    until(lambda: metric(patient, "calgp_queue_images") == 0)
    until(lambda: metric(patient, "calgp_open_requests") == 0)


def test_a_client_that_leaves_in_its_body_is_no_error(patient, caplog):
    for announced in ("Content-Length: 1000", "Transfer-Encoding: chunked"):
        with Connection(patient) as client:
            client.send(f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n{announced}\r\n\r\n".encode())
            client.send(b"5\r\nabcde\r\n")
            until(lambda: metric(patient, "calgp_open_requests") == 1)
    until(lambda: metric(patient, "calgp_open_requests") == 0)
    with Connection(patient) as client:  # a body that breaks the protocol
        client.send(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n")
        assert client.rest() == b""
    until(lambda: metric(patient, "calgp_open_requests") == 0)
    text = httpx.get(f"{patient}/metrics", timeout=NEVER).text
    assert 'calgp_requests_total{path="/v1/predict",status="499"}' in text and 'status="500"' not in text
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


def test_tiny_pieces_do_not_stop_the_event_loop(address):
    """A body of a million pieces would keep the loop for ten seconds: a million times what one costs here and now."""
    slowest, alone, done = 0.0, time.monotonic(), threading.Event()
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000)
    while parser.next_event() is not h11.NEED_DATA:
        pass
    a_million = (time.monotonic() - alone) * 50

    def attack() -> None:
        with Connection(address) as client:
            client.send(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            with suppress(ConnectionError, TimeoutError):
                client.send(b"1\r\nx\r\n" * 1_000_000)
        done.set()

    threading.Thread(target=attack).start()
    with httpx.Client(timeout=NEVER) as client:
        while not done.is_set():
            start = time.monotonic()
            assert client.get(f"{address}/healthz", timeout=NEVER).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
    assert slowest < a_million / 2
