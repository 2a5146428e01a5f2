"""The modules that plugins may import from core, one for each subject; docs/api.md lists their names.

A plugin may also import `sley_core.hookspecs`, `records`, `protocols` and `errors`. All other modules of core may change in any
version. `api.plan` and `api.actions` import no torch, so a plugin's hooks and tables may import them.
"""
