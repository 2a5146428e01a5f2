"""Pipeline parallelism for Sley: plugin `pp`."""
