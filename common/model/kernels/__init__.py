"""Everything that a decoder computes with, behind one interface, chosen once when a worker starts."""
