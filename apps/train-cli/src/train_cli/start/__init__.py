"""The start of a run on several ranks: all of them meet, one that is missing or has died is named, and all begin or none."""
