"""The optimizer `optim.muon` for Sley, and the averages of weights over steps `optim.ema` and `optim.mean`."""
