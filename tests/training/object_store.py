"""A local S3 server, by moto."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, dict[str, str]]]:
    """A local S3 server with a bucket, and the environment in which it is found."""
    moto, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        system = s3fs.S3FileSystem(skip_instance_cache=True)
        system.makedirs("bucket", exist_ok=True)  # moto keeps what is there beyond the end of a server
        try:
            yield system, environment
        finally:
            system.rm("bucket", recursive=True)
    finally:
        server.stop()
