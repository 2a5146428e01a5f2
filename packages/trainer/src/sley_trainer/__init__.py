"""The trainer of Sley: assembles the parts of a plan into a run, and takes its steps."""
