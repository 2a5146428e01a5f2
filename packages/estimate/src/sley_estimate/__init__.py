"""What a plan will need, told before it runs: bytes, and seconds on a machine that a file describes."""
