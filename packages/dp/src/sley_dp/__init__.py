"""Data parallelism for Sley: plugin `dp`."""
