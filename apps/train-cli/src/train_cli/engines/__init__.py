"""What starts ranks on several hosts, as text that each engine's own client takes; and what a run tells an engine."""
