"""Self-check: some finished requests are computed again, alone and in spare time, and compared bit for bit."""
