"""`python -m` entry of the stand-in for prefill."""

import sys

from tests.fakes.cluster_process import main

if __name__ == "__main__":
    main("prefill", sys.argv[1:])
