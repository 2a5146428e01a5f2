"""Gives plugins what core lets them use, by subject; docs/api.md lists it.

Beside these modules a plugin imports `sley_core.hookspecs`, `records`, `protocols` and `errors`. Everything else in core may
change in any version. `api.plan` and `api.actions` import no torch, so that a plugin's hooks and tables may use them.
"""
