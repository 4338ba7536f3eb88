"""``python -m megatron_lynx`` is ``lynx``."""

import sys

from megatron_lynx.cli.main import main

sys.exit(main())
