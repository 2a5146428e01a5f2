import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "own"))  # modules of tests import from there while they are collected
