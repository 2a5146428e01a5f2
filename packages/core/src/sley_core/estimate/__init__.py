"""What a plan will cost, said before it runs: bytes, and seconds on a machine that a file describes."""
