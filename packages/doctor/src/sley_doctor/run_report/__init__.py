"""A report about runs as one self-contained HTML page."""
