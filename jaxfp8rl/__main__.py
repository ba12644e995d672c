"""`python -m jaxfp8rl ...` is the command `jaxfp8rl ...`."""

import sys

from jaxfp8rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
