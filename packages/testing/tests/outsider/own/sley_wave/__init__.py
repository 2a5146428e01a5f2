"""Pipeline schedules in waves (Hanayo, arXiv 2308.15762) for Sley: plugin `wave`. Needs core alone."""
