"""`python -m anyattn`: the command line, where its script is not on the path."""

import sys

from anyattn.cli import main

sys.exit(main())
