"""Fault reports and work records: files that each rank writes into the run's folder."""
