"""The record by which core finds this transport: an entry point of the group `sley.transports`. Imports no torch."""

from sley_core.records import TransportRecord

CMA = TransportRecord(name="cma", connect="sley_cma.transport:connect", scratch="sley_cma.rows:scratch")
