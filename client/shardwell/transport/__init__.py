"""The transport of bytes to a server: gRPC, streams over Unix sockets, memory that is shared."""
