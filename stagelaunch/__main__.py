"""``python -m stagelaunch``."""

import sys

from stagelaunch.cli.main import main

sys.exit(main())
