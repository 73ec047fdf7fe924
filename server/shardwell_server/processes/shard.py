"""One shard in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import os
from pathlib import Path

from shardwell.errors import ShardUnavailableError
from shardwell_server.config import ShardConfig
from shardwell_server.processes.child import PARENT_FLAG, Child, describe_exit, python

START_TIMEOUT_S = 60.0
"""A shard starts within a second; a busy machine may need a while to import its packages."""
NOT_READY = f"it was not ready within {START_TIMEOUT_S:g} s"
SERVING_LINE = "serving on "
"""The beginning of `shardwell serve`'s line, followed by HOST:PORT."""
STOP_MARGIN_S = 5.0
_END_S = 5.0
_FLAGS = (
    "shard_index", "shard_count", "cluster_id", "listen", "chunk_size_bytes", "grace_s",
    "session_lease_s", "connection_age_s", "same_host", "tokens", "jwt_keys", "same_token",
    "audit_log", "contribution_log",
)  # fmt: skip


class ShardProcess(Child):
    """The child process of `shardwell serve`, with default limits; its logs go to our stderr."""

    def __init__(
        self, config: ShardConfig, data_dir: Path | None = None, *, log_level: str
    ) -> None:
        self._shard_index = config.shard_index
        self._address = ""
        flags: dict[str, object] = {name: getattr(config, name) for name in _FLAGS}
        flags["durability"], flags["log_level"] = config.durability.setting, log_level
        flags["data_dir"] = data_dir
        if (tls := config.tls) is not None:
            files = {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.ca}
            flags |= {name: path and os.fspath(path) for name, path in files.items()}
        if config.admin_listen:
            flags |= {"admin_listen": config.admin_listen, "cluster": ",".join(config.cluster)}
        arguments = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in flags.items()
            if value is not None
        ]
        if config.insecure:
            arguments.append("--insecure")
        super().__init__(
            python("-m", "shardwell_server", "serve", PARENT_FLAG, *arguments),
            environment=_plain_environment(),
        )

    def is_ready(self) -> bool:
        """Returns True once it serves."""
        return bool(self._address) or self._is_told(0.0)

    def await_address(self) -> str:
        """Waits until it serves, and returns its HOST:PORT."""
        if not self._address and not self._is_told(START_TIMEOUT_S):
            end = describe_exit(self.wait(_END_S)) if self.is_silent else NOT_READY
            raise not_started(self._shard_index, end)
        return self._address

    def _is_told(self, timeout_s: float) -> bool:
        for line in self.read_lines(timeout_s)[:1]:
            if line.startswith(SERVING_LINE):
                self._address = line.removeprefix(SERVING_LINE)
        return bool(self._address)


def not_started(shard_index: int, end: str) -> ShardUnavailableError:
    """Makes the error of a shard whose process does not serve; `end` says why."""
    return ShardUnavailableError(
        f"shard {shard_index} did not start: {end}; its log is on stderr", shard_index=shard_index
    )


def _plain_environment() -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if not name.startswith("SHARDWELL_")}
