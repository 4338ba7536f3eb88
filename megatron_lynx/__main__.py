"""``python -m megatron_lynx`` is ``lynx``."""

import sys

try:
    from megatron_lynx.cli.main import main

    code = main()
except KeyboardInterrupt:  # while Python still imports
    code = 130
sys.exit(code)
