"""`moerelay keys`: makes, rotates and shows the keys of a cluster."""
