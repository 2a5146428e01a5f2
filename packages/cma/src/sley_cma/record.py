"""Declares the transport for the entry point group `sley.transports`. Imports no torch."""

from sley_core.records import TransportRecord

CMA = TransportRecord(name="cma", connect="sley_cma.transport:connect", scratch="sley_cma.transport:allocate_scratch")
"""The transport of cross-memory attach."""
