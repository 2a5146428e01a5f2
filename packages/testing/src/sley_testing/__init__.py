"""Provides the test kit: contracts, fixtures and comparisons for tests of plugins and of Sley itself.

pytest loads `sley_testing.plugin` as the plugin `sley`; `-p no:sley` disables it. Loading the plugin does not import torch.
"""
