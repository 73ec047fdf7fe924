"""One shard in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import os
from pathlib import Path

from shardwell.errors import ShardUnavailableError
from shardwell_server.config import ShardConfig
from shardwell_server.processes import PARENT_FLAG, ChildProcess

START_TIMEOUT_S = 60.0
"""A shard starts within a second; a busy machine may need a while to import its packages."""
NOT_READY = f"it was not ready within {START_TIMEOUT_S:g} s"
SERVING_LINE = "serving on "
"""What `shardwell serve` prints when it is ready, followed by HOST:PORT."""
_STOP_MARGIN_S = 5.0
_FLAGS = (
    "shard_index", "shard_count", "cluster_id", "listen", "chunk_size_bytes", "grace_s",
    "session_lease_s", "connection_age_s", "same_host", "tokens", "jwt_keys", "same_token",
    "audit_log", "contribution_log",
)  # fmt: skip
"""Fields of `ShardConfig` of which `shardwell serve` has flags of the same names."""


class ShardProcess(ChildProcess):
    """`shardwell serve` as a child process, whose logs go to this process's stderr.

    Args:
        config: Its place, and how it serves; without `limits`, which are the defaults.
        data_dir: Its own directory; None: all is in memory.
        log_level: The least that it logs.
    """

    def __init__(
        self, config: ShardConfig, data_dir: Path | None = None, *, log_level: str
    ) -> None:
        self._config = config
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
            ["-m", "shardwell_server", "serve", PARENT_FLAG, *arguments],
            environment=_plain_environment(),
        )

    def begins_to_serve(self) -> bool:
        """Whether it serves since the last look; true once."""
        line = self.read_first_line(0.0)
        return line is not None and line.startswith(SERVING_LINE)

    def await_address(self) -> str:
        """HOST:PORT where it listens, once it serves. Blocks; for one call.

        Raises:
            ShardUnavailableError: it has ended, or is not there in time.
        """
        line = self.read_first_line(START_TIMEOUT_S)
        if line is None or not line.startswith(SERVING_LINE):
            end = NOT_READY if line is None else f"exit code {self.wait(_STOP_MARGIN_S)}"
            raise not_started(self._config.shard_index, end)
        return line.removeprefix(SERVING_LINE)

    def stop(self) -> None:
        """Stops it as soon as its streams have ended, by force when they have had their time."""
        self.close(self._config.grace_s + _STOP_MARGIN_S)


def not_started(shard_index: int, end: str) -> ShardUnavailableError:
    """The error when a shard's process has not come to serve; `end` says what became of it."""
    return ShardUnavailableError(
        f"shard {shard_index} did not start: {end}; its log is on stderr", shard_index=shard_index
    )


def _plain_environment() -> dict[str, str]:
    """This process's environment without settings that are meant for shards started by hand."""
    return {name: v for name, v in os.environ.items() if not name.startswith("SHARDWELL_")}
