"""HTTP by hand, for what no client would send."""

import json
import socket


def connect(port, *, buffer=None, timeout=20):
    """A connection; `buffer` bytes are read ahead at most."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(timeout)
    connection.connect(("127.0.0.1", port))
    return connection


def head(path, length, *headers, method="POST"):
    """The head of a request with a JSON body."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
    ]
    lines += [f"Content-Length: {length}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request(path, body):
    """A whole request."""
    data = json.dumps(body).encode()
    return head(path, len(data)) + data


def read_all(connection):
    """All bytes until the server closes the connection."""
    data = bytearray()
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return bytes(data)
