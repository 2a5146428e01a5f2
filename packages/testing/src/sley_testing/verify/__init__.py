"""`train-cli verify`: the plan's layout beside one process of the same plan."""
