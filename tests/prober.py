"""Asks /healthz of a server on loopback: `python tests/prober.py PORT SECONDS`. It imports nothing, to start at once.

By new connections, twenty times a second. It prints the seconds that each took, or -1 where it failed. A process of its
own: what it measures shall be the server, not the event loop of attacks.py.
"""

import socket
import sys
import time


def probe(port: int, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        try:
            with socket.create_connection(("127.0.0.1", port), 20) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                healthy = client.recv(2**16).startswith(b"HTTP/1.1 200")
        except OSError:
            healthy = False
        print(time.perf_counter() - start if healthy else -1, flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    probe(int(sys.argv[1]), float(sys.argv[2]))
