"""Generated wire contract, version 1. Made by `make protos`; do not edit."""
