"""Several router processes on one port: one parent that starts them, and a channel on which they tell each other."""
