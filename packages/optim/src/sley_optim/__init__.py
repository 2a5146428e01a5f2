"""The optimizer `optim.muon`, and the averages of weights `optim.ema` and `optim.mean`, for Sley."""
