"""Pause, weights and sleep of the whole cluster: the state lives in the workers, this router relays to all of them."""
