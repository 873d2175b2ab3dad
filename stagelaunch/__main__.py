"""``python -m stagelaunch``: the command line."""

import sys

# Not for the stages: multiprocessing imports this module in each of them, too, and they have no use for a command line.
if __name__ == "__main__":
    from stagelaunch.cli.main import main

    sys.exit(main())
