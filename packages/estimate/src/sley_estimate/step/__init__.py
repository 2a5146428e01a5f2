"""Records a step of a plan, and estimates how long it takes on a machine."""
