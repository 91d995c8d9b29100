"""Moves KV blocks, routing rows and the first token from a prefill to a decode worker: docs/wire-protocol.md."""
