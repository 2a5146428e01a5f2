"""A page about runs, for people: what they left in their folders, as one HTML file that asks for nothing else."""
