"""What went wrong in a run of Sley, and which rank is slow, from what its ranks have recorded."""
