"""gRPC connections of both sides: their options, TLS, tokens, and the statuses of errors."""
