"""The commands `doctor` and `report`."""
