"""`python -m jaxfp8rl ...` does what the command `jaxfp8rl ...` does."""

import sys

from jaxfp8rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
