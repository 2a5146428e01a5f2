"""What a run tells about itself: rows per step, throughput, and the summary at the end."""
