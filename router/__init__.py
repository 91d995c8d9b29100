"""The HTTP API in front of prefill and decode workers."""
