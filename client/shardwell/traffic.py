"""How many bytes a client has moved."""

from __future__ import annotations

import threading


class Traffic:
    """Counters of one client, over all parameters and tables; read them whenever you like.

    Examples:
        >>> before = client.traffic.sent_value_bytes
        >>> net = client.parameter("traffic", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> client.traffic.sent_value_bytes - before  # three float32
        12
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_bytes = 0
        """Messages of gradients, first weights and ids."""
        self.received_bytes = 0
        """Messages of weights and rows."""
        self.sent_value_bytes = 0
        """Bytes of the sent values as float32."""
        self.received_value_bytes = 0
        """Bytes of the received values as float32."""
        self.shared_bytes = 0
        """What of the bytes sent and received went through memory that is shared with shards or
        ranks of this machine, instead of over the network."""

    def __repr__(self) -> str:
        return f"Traffic(sent_bytes={self.sent_bytes}, received_bytes={self.received_bytes})"

    def add_sent(self, byte_count: int, element_count: int, shared_byte_count: int = 0) -> None:
        """Counts a message that leaves, and what of it is in shared memory."""
        with self._lock:
            self.sent_bytes += byte_count
            self.shared_bytes += shared_byte_count
            self.sent_value_bytes += 4 * element_count

    def add_received(self, byte_count: int, element_count: int, shared_byte_count: int = 0) -> None:
        """Counts a message that came, and what of it was in shared memory."""
        with self._lock:
            self.received_bytes += byte_count
            self.shared_bytes += shared_byte_count
            self.received_value_bytes += 4 * element_count
