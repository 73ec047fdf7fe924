"""A server of S3's protocol on this machine, moto's, which keeps its objects in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
import botocore.config
import botocore.exceptions

from harness.polling import eventually
from harness.programs.ports import free_port

BUCKET = "bucket"


class ObjectStore:
    """The server, a process; killed, it has lost its objects."""

    def __init__(self) -> None:
        self.port = free_port()
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="key-of-tests",
            aws_secret_access_key="secret-of-tests",
            config=botocore.config.Config(retries={"max_attempts": 0}),
        )
        self.start()

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which S3's tools find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "key-of-tests",
            "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Starts it, with an empty bucket."""
        command = (sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port))
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually("the bucket is made", self._made)

    def _made(self) -> bool:
        """Makes the bucket; False: the server does not answer yet."""
        try:
            self.client.create_bucket(Bucket=BUCKET)
        except botocore.exceptions.EndpointConnectionError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """Returns an object."""
        found: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return found

    def put(self, key: str, data: bytes) -> None:
        """Puts an object, or replaces it."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def delete(self, key: str) -> None:
        """Removes an object."""
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def listed(self) -> list[str]:
        """Returns the keys of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def kill(self) -> None:
        """Ends it at once."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def object_store(monkeypatch: Any) -> Iterator[ObjectStore]:
    """Gives a store, which this process finds by its variables."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    store = ObjectStore()
    try:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store
    finally:
        store.kill()
