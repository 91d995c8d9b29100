"""Moves KV blocks, routing rows and the first tokens from a prefill to a decode worker: docs/wire-protocol.md."""
