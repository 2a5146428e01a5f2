"""Marks functions as hooks of Sley, and as a plugin's implementations of them."""

import pluggy

PROJECT = "sley"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
