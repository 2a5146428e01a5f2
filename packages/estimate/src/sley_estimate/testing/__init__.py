"""For tests of estimates: small machine files, short calibrations, and runs beside their estimates."""
