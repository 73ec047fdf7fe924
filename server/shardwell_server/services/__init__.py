"""gRPC in: requests to calls on the shard, results and errors to answers."""
