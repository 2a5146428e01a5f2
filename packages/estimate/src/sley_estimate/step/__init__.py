"""Records a step of a plan, and estimates its seconds on a machine."""
