"""`python -m flashdraft`: the same as the flashdraft command."""

import sys

from flashdraft.cli import main

sys.exit(main())
