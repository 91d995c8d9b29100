"""`python -m` entry of the stand-in for router."""

import sys

from tests.fakes.cluster_process import main

if __name__ == "__main__":
    main("router", sys.argv[1:])
