"""`python -m` entry of the stand-in for decode."""

import sys

from tests.fakes.cluster_process import main

if __name__ == "__main__":
    main("decode", sys.argv[1:])
