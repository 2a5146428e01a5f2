"""The test kit: fixtures and helpers for those who write a part of Sley or a plugin of their own.

Installed with sley-core as the pytest plugin `sley`; `-p no:sley` turns it off. Importing a module of the kit costs no
torch until a fixture that needs it is used.
"""
