"""Bytes and seconds of a run before it starts, and the search for its fastest layout."""
