"""What starts ranks on several hosts, as text: commands, scripts and manifests that each engine's own client takes."""
