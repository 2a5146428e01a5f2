"""The plugin `memory` of Sley: offloads a run's memory to the host."""
