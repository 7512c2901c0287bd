"""A child for the tests of the pool: it says a lot and ends before it has heard anything."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    print(("\x1b[31m" + "noise " * 20 + "\n") * 5_000, file=sys.stderr)  # more than a pipe holds
    sys.exit(3)
