"""A plugin of somebody else's: a run saves itself as a folder of pickles."""
