"""Who may talk to whom: keys between processes, files that are read again, and what may listen beyond this machine."""
