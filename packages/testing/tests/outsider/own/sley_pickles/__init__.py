"""A plugin of a third party, which saves a run as a folder of pickles."""
