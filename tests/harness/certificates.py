"""Certificates for tests: made once a process, by an authority each."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from shardwell import Tls
from shardwell_server.certificates import Certificates, make_certificates

HOSTS = ("localhost", "127.0.0.1")


@functools.cache
def authority(name: str = "ours", hosts: tuple[str, ...] = HOSTS) -> Certificates:
    """Those of an authority of that name, in a directory that ends with the process."""
    _directories.append(tempfile.TemporaryDirectory(prefix=f"certificates-{name}-"))
    return make_certificates(Path(_directories[-1].name), hosts, 7)


_directories: list[tempfile.TemporaryDirectory[str]] = []


def of_server(files: Certificates) -> Tls:
    """What a shard, or a member of a group, is given; mutual."""
    return Tls(ca=files.ca, cert=files.server, key=files.server_key)


def of_client(files: Certificates) -> Tls:
    """What a worker is given; mutual."""
    return Tls(ca=files.ca, cert=files.client, key=files.client_key)
