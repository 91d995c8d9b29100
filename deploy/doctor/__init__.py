"""`moerelay doctor`: what this machine and installation are, and whether what is to be started here can."""
