"""Who is slow in a run: which rank others wait for, at which layer or action, from what ranks have recorded. Without torch."""
