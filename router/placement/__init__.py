"""Which worker takes the next prompt: one class per policy. Sans-I/O: candidates and a subject in, a key out."""
