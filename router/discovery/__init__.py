"""Where workers are: what --prefill and --decode list, looked up again and again."""
