"""Devices, groups and collectives: the one place that calls torch.distributed."""
