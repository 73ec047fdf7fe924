"""Clients made of the generated stubs alone, which follow what the .proto files say."""
