"""`python -m without_hangups -m MODULE ...` runs the module as `nohup python -m MODULE ...` does: SIGHUP is ignored."""

from __future__ import annotations

import runpy
import signal
import sys

signal.signal(signal.SIGHUP, signal.SIG_IGN)
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
