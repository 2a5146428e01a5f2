"""Declares the transport for the entry point group `sley.transports`. Imports no torch."""

from sley_core.records import TransportRecord

CMA = TransportRecord(name="cma", connect="sley_cma.transport:connect", scratch="sley_cma.transport:allocate_scratch")
"""The record of the transport that uses cross-memory attach."""
