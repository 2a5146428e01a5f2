"""PowerSGD for Sley: gradients are summed as low-rank approximations. Uses only Sley's public modules."""
