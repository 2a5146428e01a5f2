"""Devices, groups and collectives: the only code that calls torch.distributed."""
