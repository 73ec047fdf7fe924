"""The bytes of messages: framing, checksums, chunks and rows."""
