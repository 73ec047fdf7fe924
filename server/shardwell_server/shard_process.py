"""One shard in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import os
from pathlib import Path

from shardwell.connection.tls import Tls
from shardwell.errors import ShardUnavailableError
from shardwell_server.config import ShardConfig
from shardwell_server.processes import PARENT_FLAG, ChildProcess

START_TIMEOUT_S = 60.0
"""A shard starts within a second; a busy machine may need a while to import its packages."""
NOT_READY = f"it was not ready within {START_TIMEOUT_S:g} s"
SERVING_LINE = "serving on "
"""What `shardwell serve` prints when it is ready, followed by HOST:PORT."""
_STOP_MARGIN_S = 5.0


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
        arguments = [
            "-m",
            "shardwell_server",
            "serve",
            f"--shard-index={config.shard_index}",
            f"--shard-count={config.shard_count}",
            f"--cluster-id={config.cluster_id}",
            f"--listen={config.listen}",
            f"--chunk-size-bytes={config.chunk_size_bytes}",
            f"--grace-s={config.grace_s}",
            f"--session-lease-s={config.session_lease_s}",
            f"--connection-age-s={config.connection_age_s}",
            f"--durability={config.durability.setting}",
            f"--same-host={config.same_host}",
            f"--log-level={log_level}",
            PARENT_FLAG,
        ]
        if config.tls is not None:
            arguments += _tls_arguments(config.tls)
        for name in ("tokens", "jwt_keys", "same_token", "audit_log", "contribution_log"):
            path = getattr(config, name)
            if path is not None:
                arguments.append(f"--{name.replace('_', '-')}={path}")
        if config.admin_listen:
            arguments += [f"--admin-listen={config.admin_listen}"]
            arguments += [f"--cluster={','.join(config.cluster)}"]
        if config.insecure:
            arguments.append("--insecure")
        if data_dir is not None:
            arguments.append(f"--data-dir={data_dir}")
        super().__init__(arguments, environment=_plain_environment())

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


def _tls_arguments(tls: Tls) -> list[str]:
    files = {"cert": tls.cert, "key": tls.key, "client-ca": tls.ca}
    return [f"--tls-{name}={os.fspath(path)}" for name, path in files.items() if path is not None]


def _plain_environment() -> dict[str, str]:
    """This process's environment without settings that are meant for shards started by hand."""
    return {name: v for name, v in os.environ.items() if not name.startswith("SHARDWELL_")}
